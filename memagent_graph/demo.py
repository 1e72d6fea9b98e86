"""A demonstration that needs nothing but this package: real prose, planted facts, the embedded policy.

The document is the language reference that every Python brings (then its docstrings), with facts set between its
paragraphs: those that are asked for, at stated depths, and as many foreign ones. The composition is seeded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from memagent_graph.evaluation.planted_facts import Fact, PlantedFacts
from memagent_graph.evaluation.prose import prose
from memagent_graph.tokenizers import Tokenizer
from memagent_graph.trace import MemoryUpdate


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


def is_right(answer: str | None, fact: Fact) -> bool:
    """Whether an answer is the fact's value, letter case and outer spaces aside."""
    return (answer or "").strip().casefold() == fact.value.strip().casefold()


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """A stretch of chunks on one branch, both ends included, over which the memory stayed the same."""

    first_chunk: int
    last_chunk: int
    memory: str
    branch: str = ""


def memory_spans(updates: Sequence[MemoryUpdate]) -> Iterator[MemorySpan]:
    """The memory's history, branch after branch: one entry for each time it changed.

    Merges, which read no chunk, are left out.
    """
    read: dict[str, list[tuple[int, str]]] = {}
    for update in updates:
        if update.chunk_index is not None:
            read.setdefault(update.branch, []).append((update.chunk_index, update.memory))
    for branch, chunks in read.items():
        for memory, same in groupby(chunks, key=itemgetter(1)):
            numbers = [chunk for chunk, _ in same]
            yield MemorySpan(numbers[0], numbers[-1], memory, branch)
