"""A demonstration that needs nothing but this package: real prose, planted facts, the embedded policy.

The document is the language reference that every Python brings (then its docstrings), with facts set between its
paragraphs: those that are asked for, at stated depths, and as many foreign ones. The composition is seeded.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from memagent_graph.evaluation.planted_facts import Fact, PlantedFacts
from memagent_graph.evaluation.prose import prose
from memagent_graph.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class PlantedQuestion:
    """A fact in the document, and where: `depth` is its share of the document's length, 0 to 1."""

    fact: Fact
    depth: float


@dataclass(frozen=True, slots=True)
class DemoDocument:
    """A composed document and what can be asked about it."""

    text: str
    tokens: int
    questions: tuple[PlantedQuestion, ...]
    foreign_facts: int


def compose(tokenizer: Tokenizer, *, tokens: int = 100_000, questions: int = 4, seed: int = 7) -> DemoDocument:
    """A document of at least `tokens` tokens with `questions` planted facts and four foreign ones to each.

    One of the four resembles the fact that is asked for. Facts come from the held-out split and stand between
    paragraphs.
    """
    generator = random.Random(seed)
    facts = PlantedFacts(generator, held_out=True, number_share=1.0)
    asked: list[Fact] = []
    for _ in range(questions):
        asked.append(facts.fact(exclude=frozenset(fact.entity.lower() for fact in asked)))
    entities = frozenset(fact.entity.lower() for fact in asked)
    foreign = [facts.near_miss(fact) for fact in asked]
    foreign += [facts.fact(exclude=entities) for _ in range(3 * questions)]
    paragraphs: list[str] = []
    length = 0
    for paragraph in prose():
        if length >= tokens:
            break
        paragraphs.append(paragraph)
        length += tokenizer.count(paragraph + "\n\n")
    depths = [(index + generator.uniform(0.2, 0.8)) / questions for index in range(questions)]
    placed = list(zip(depths, asked, strict=True)) + [(generator.random(), fact) for fact in foreign]
    for depth, fact in sorted(placed, key=lambda item: -item[0]):
        paragraphs.insert(int(depth * len(paragraphs)), fact.statement)
    text = "\n\n".join(paragraphs)
    return DemoDocument(
        text=text,
        tokens=tokenizer.count(text),
        questions=tuple(PlantedQuestion(fact, text.index(fact.statement) / len(text)) for fact in asked),
        foreign_facts=len(foreign),
    )
