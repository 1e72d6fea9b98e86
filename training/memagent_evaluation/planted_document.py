"""A demonstration that needs only this package: real prose, planted facts, the installed policy.

The document is the language reference that every Python brings (then its docstrings), with facts between its
paragraphs: those that are asked for, at given depths, and foreign ones. The composition is seeded. Facts are numbers,
the only ones that the embedded policy can find, or of all kinds in plain English.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

from memagent_evaluation.english_facts import EnglishFact, EnglishFacts, clear_of
from memagent_evaluation.planted_facts import Fact, PlantedFacts
from memagent_evaluation.tasks.haystacks import python_prose
from memagent_graph.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class PlantedQuestion:
    """A question, its answer, and the statement in the document that gives it."""

    question: str
    answer: str
    statement: str
    depth: float
    """Where the statement begins, as a share of the document's length, 0 to 1."""


@dataclass(frozen=True, slots=True)
class PlantedDocument:
    """A composed document and its questions."""

    text: str
    tokens: int
    questions: tuple[PlantedQuestion, ...]
    foreign_facts: int


def compose(
    tokenizer: Tokenizer, *, tokens: int = 100_000, questions: int = 4, seed: int = 7, in_english: bool = False
) -> PlantedDocument:
    """Return a document of at least `tokens` tokens with `questions` planted facts and four foreign ones for each.

    One of the four resembles the fact that is asked for. Facts come from the held-out split and are between paragraphs.
    They are numbers, or with `in_english`: people, places, dates, colours, reasons.
    """
    generator = random.Random(seed)
    chosen, foreign = (_in_english if in_english else _numbers)(generator, questions)
    paragraphs: list[str] = []
    length = 0
    for paragraph in python_prose():
        if length >= tokens:
            break
        paragraphs.append(paragraph)
        length += tokenizer.count(paragraph + "\n\n")
    depths = [(index + generator.uniform(0.2, 0.8)) / questions for index in range(questions)]
    placed = list(zip(depths, [statement for statement, _, _ in chosen], strict=True))
    placed += [(generator.random(), statement) for statement in foreign]
    for depth, statement in sorted(placed, key=lambda item: -item[0]):
        paragraphs.insert(int(depth * len(paragraphs)), statement)
    text = "\n\n".join(paragraphs)
    return PlantedDocument(
        text=text,
        tokens=tokenizer.count(text),
        questions=tuple(
            PlantedQuestion(question, answer, statement, text.index(statement) / len(text))
            for statement, question, answer in chosen
        ),
        foreign_facts=len(foreign),
    )


def _numbers(generator: random.Random, questions: int) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Statements with their questions and answers, and foreign statements."""
    facts = PlantedFacts(generator, held_out=True, number_share=1.0)
    chosen: list[Fact] = []
    for _ in range(questions):
        chosen.append(facts.fact(exclude=frozenset(fact.entity.lower() for fact in chosen)))
    entities = frozenset(fact.entity.lower() for fact in chosen)
    foreign = [facts.near_miss(fact) for fact in chosen]
    foreign += [facts.fact(exclude=entities) for _ in range(3 * questions)]
    return [(fact.statement, fact.question, fact.value) for fact in chosen], [fact.statement for fact in foreign]


def _in_english(generator: random.Random, questions: int) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Return the same of facts of many kinds, no two questions in a row of one."""
    facts = EnglishFacts(generator, held_out=True)
    chosen: list[EnglishFact] = []
    while len(chosen) < questions:
        fact = facts.fact()
        if fact.relation.ask not in {other.relation.ask for other in chosen[-3:]} and clear_of(chosen)(fact):
            chosen.append(fact)
    # There are fewer words of some kinds, such as weekdays, than facts: a repeated word must not be an answer.
    clear = clear_of(chosen)
    foreign = [next(filter(clear, iter(partial(facts.near_miss, fact), None))) for fact in chosen]
    foreign += [next(filter(clear, iter(facts.fact, None))) for _ in range(3 * questions)]
    return [(fact.statement, *facts.question(fact)) for fact in chosen], [fact.statement for fact in foreign]
