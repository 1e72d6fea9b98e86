"""Documents to measure on: held-out prose cut into chunks, with planted facts and the questions about them.

Two settings. *Foreign*: on average one fact per chunk, half of them asked for, and next to each of these a foreign
fact, half of which are near misses. *Alone*: the asked fact is the only one. Depths are uniform, and the reader's own
chunker is used, so the end of a chunk can cut a fact; such questions are counted and marked. A fact that the document's
end cuts off is not asked for.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import islice
from tempfile import TemporaryDirectory

from memagent_evaluation.planted_facts import Fact, PlantedFacts
from memagent_graph.documents import Document, DocumentStore
from memagent_graph.documents.chunking import Boundary, Chunker
from memagent_graph.tokenizers import Tokenizer

_LONGEST_STATEMENT = 90
"""Approximate number of characters; one statement per chunk is planted."""


@dataclass(frozen=True)
class Question:
    """A question on a document: the chunks that its reader sees, and the fact that is asked for (None if absent)."""

    problem: str
    value: str | None
    chunks: tuple[str, ...]
    fact_chunk: int | None
    whole: bool


@dataclass(frozen=True)
class Setting:
    """How documents are composed."""

    chunks: int
    foreign: bool
    chunk_tokens: int = 256
    number_share: float = 1.0
    boundary: Boundary = "sentence"


def cut(tokenizer: Tokenizer, text: str, setting: Setting) -> tuple[str, ...]:
    """Return the first `setting.chunks` chunks, cut by the reader's own chunker."""
    with TemporaryDirectory() as folder:
        store = DocumentStore(folder)
        reference = store.add(Document.from_text(text))
        chunker = Chunker(store, reference, tokenizer, setting.chunk_tokens, setting.boundary)
        return tuple(chunk.text for chunk in islice(chunker.chunks(), setting.chunks))


def prose_from(text: str, rng: random.Random, characters: int) -> str:
    """Return a piece of this length from a random place; at the end it continues from the beginning."""
    start = rng.randrange(len(text))
    doubled = text[start : start + characters]
    while len(doubled) < characters:
        doubled += text[: characters - len(doubled)]
    return doubled


def questions_with_foreign_facts(
    tokenizer: Tokenizer, prose: str, setting: Setting, facts: PlantedFacts, absent: int
) -> list[Question]:
    """One document's questions; every second fact is asked for, and `absent` questions ask for missing facts."""
    rng = facts.random
    text = prose_from(prose, rng, setting.chunks * setting.chunk_tokens * 5)
    ends = _ends_of(r"[.!?:]\s+", text) or _ends_of(r"\s+", text)
    length = sum(map(len, cut(tokenizer, text, setting))) - setting.chunks * _LONGEST_STATEMENT
    targets: list[Fact] = []
    insertions: list[tuple[int, str]] = []
    used: set[tuple[str, str]] = set()

    def fresh(make: str, like: Fact | None = None) -> Fact:
        while True:
            fact = facts.near_miss(like) if make == "near" and like is not None else facts.fact()
            if (fact.attribute, fact.entity) not in used:
                used.add((fact.attribute, fact.entity))
                return fact

    for _ in range(max(1, setting.chunks // 2)):
        target = fresh("new")
        companion = fresh("near" if rng.random() < 0.5 else "new", target)
        spot = rng.randrange(length)
        targets.append(target)
        insertions.append((spot, target.statement))
        insertions.append((max(0, min(length - 1, spot + rng.randint(-600, 600))), companion.statement))
    for spot, statement in sorted(insertions, key=lambda pair: -pair[0]):
        place = ends[min(bisect_left(ends, spot), len(ends) - 1)]
        text = text[:place] + statement + " " + text[place:]
    chunks = cut(tokenizer, text, setting)
    whole = "".join(chunks)
    questions = [_about(target, chunks) for target in targets if target.statement in whole]
    for _ in range(absent):
        miss = fresh("near", rng.choice(targets))
        questions.append(Question(miss.question, None, chunks, None, True))
    return questions


def questions_alone(
    tokenizer: Tokenizer, prose: str, setting: Setting, facts: PlantedFacts, count: int
) -> list[Question]:
    """`count` questions, each with its own fact planted in the same prose, and so in a document of its own.

    They differ in the chunk where the fact was planted, and in the next one, because it moves the text after it.
    """
    rng = facts.random
    text = prose_from(prose, rng, setting.chunks * setting.chunk_tokens * 5)
    chunks = cut(tokenizer, text, setting)
    questions: list[Question] = []
    while len(questions) < count:
        fact = facts.fact()
        where = rng.randrange(len(chunks))
        first, rest = chunks[where], "".join(chunks[where + 1 : where + 2])
        place = rng.choice(_ends_of(r"\s+", first) or [0])
        planted = f"{first[:place]}{fact.statement} {first[place:]}{rest}"
        anew = cut(tokenizer, planted, replace(setting, chunks=2 if rest else 1))
        if fact.statement in "".join(anew):  # otherwise the document ended before it
            questions.append(_about(fact, (*chunks[:where], *anew, *chunks[where + len(anew) :])))
    return questions


def _about(fact: Fact, chunks: tuple[str, ...]) -> Question:
    holding = [index for index, chunk in enumerate(chunks) if fact.statement in chunk]
    return Question(fact.question, fact.value, chunks, holding[0] if holding else None, bool(holding))


def _ends_of(pattern: str, text: str) -> list[int]:
    return [match.end() for match in re.finditer(pattern, text)]
