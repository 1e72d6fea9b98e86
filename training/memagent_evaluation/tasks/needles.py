"""RULER's eight needle tasks: numbers or UUIDs under keys, hidden in noise, in prose, or among other needles.

The small variants ask for facts that the embedded policy was trained for: those of `planted_facts`, with entities and
values of its held-out split, numbers of four to seven digits. The first five are "special magic numbers" of an
adjective and a noun; `niah_single_3` and `niah_multikey_3`, which have UUIDs at full size, draw any attribute and
entity. `niah_multivalue` has two values instead of four, `niah_multiquery` two questions instead of four, each in a
form that the policy knows.
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Protocol

from memagent_evaluation.planted_facts import MAGIC, MAGIC_STATEMENT, PlantedFacts
from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.tasks import haystacks
from memagent_evaluation.tasks.fitting import Haystack, Insertion
from memagent_evaluation.tasks.generated import DEPTHS, SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_evaluation.tasks.vocabulary import pair
from memagent_graph.errors import EvaluationError


class Hay(StrEnum):
    """The text around the needles."""

    NOISE = "noise"
    PROSE = "prose"
    NEEDLES = "needles"
    """Lines of the same form as needles, with other keys."""


class Kind(StrEnum):
    """The kinds of keys and values."""

    WORDS = "word"
    """An adjective and a noun."""
    NUMBERS = "number"
    """Seven digits."""
    UUIDS = "uuid"


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of RULER's table."""

    hay: Hay
    keys: int = 1
    """How many keys are in the text besides the haystack's own."""
    values: int = 1
    """How many values each of them has."""
    queried: int = 1
    """How many of them are asked for."""
    key: Kind = Kind.WORDS
    value: Kind = Kind.NUMBERS


SHAPES = {
    "niah_single_1": Shape(Hay.NOISE),
    "niah_single_2": Shape(Hay.PROSE),
    "niah_single_3": Shape(Hay.PROSE, value=Kind.UUIDS),
    "niah_multikey_1": Shape(Hay.PROSE, keys=4),
    "niah_multikey_2": Shape(Hay.NEEDLES),
    "niah_multikey_3": Shape(Hay.NEEDLES, key=Kind.UUIDS, value=Kind.UUIDS),
    "niah_multivalue": Shape(Hay.PROSE, values=4),
    "niah_multiquery": Shape(Hay.PROSE, keys=4, queried=4),
}

_ANSWER_TOKENS = 128
_SMALL_MOST = 2
_SMALL_DRAWS = 5000
"""The number of attempts to draw an unused key."""


@dataclass(frozen=True, slots=True)
class _Key:
    """A key, its values, the sentences that state them, and the question for only this key."""

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    question: str


class _Keys(Protocol):
    """Draws keys."""

    def key(self, values: int, taken: Container[str]) -> _Key:
        """A new key with a number of values; neither key nor values are in `taken`."""
        ...


class _FullSize:
    """Keys and values of RULER's kinds."""

    def __init__(self, shape: Shape, chance: random.Random) -> None:
        self._shape = shape
        self._chance = chance

    def key(self, values: int, taken: Container[str]) -> _Key:
        name = self._new(self._shape.key, taken)
        found: list[str] = []
        while len(found) < values:
            value = self._new(self._shape.value, taken)
            if value not in (name, *found):
                found.append(value)
        kind = self._shape.value
        statements = [MAGIC_STATEMENT.format(plural=f"{kind}s", entity=name, value=value) for value in found]
        asked = f"is the special magic {kind}" if values == 1 else f"are all the special magic {kind}s"
        question = f"What {asked} for {name} mentioned in the provided text?"
        return _Key(name, tuple(found), tuple(statements), question)

    def _new(self, kind: Kind, taken: Container[str]) -> str:
        while True:
            if kind is Kind.WORDS:
                drawn = pair(self._chance)
            elif kind is Kind.NUMBERS:
                drawn = str(self._chance.randrange(10**6, 10**7))
            else:
                drawn = str(uuid.UUID(int=self._chance.getrandbits(128), version=4))
            if drawn not in taken:
                return drawn


class _Small:
    """Facts in a form that the embedded policy can read, from the split that it never saw."""

    def __init__(self, shape: Shape, chance: random.Random) -> None:
        self._facts = PlantedFacts(chance, held_out=True, number_share=1.0)
        self._any_attribute = shape.value is Kind.UUIDS

    def key(self, values: int, taken: Container[str]) -> _Key:
        for _ in range(_SMALL_DRAWS):
            attribute = self._facts.attribute(numeric=True) if self._any_attribute else f"{MAGIC}number"
            entity = self._facts.entity(bare=attribute.startswith(MAGIC))
            name = entity.replace("-", " ").removeprefix("the ").lower()
            found: list[str] = []
            while len(found) < values:
                value = self._facts.value(attribute)
                if value not in taken and value not in found:
                    found.append(value)
            if name not in taken:
                break
        else:
            raise EvaluationError(
                "a document needs more keys than the small variant has",
                hint="Ask for fewer questions on each document.",
            )
        statements = [self._facts.statement(attribute, entity, value) for value in found]
        return _Key(name, tuple(found), tuple(statements), self._facts.question(attribute, entity))


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleTask(GeneratedTask):
    """One of RULER's needle tasks.

    Attributes:
        shape: its row of the table.
    """

    shares_documents: ClassVar[bool] = True

    shape: Shape

    def sample(self, length: int, index: int) -> Sample:
        """The `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for needles, question and answer.
            MissingExtraError: the word lists that full-size keys come from are not installed.
        """
        number, member = self.shared(index)
        chance = self.chance(length, number)
        source = self._keys(chance)
        taken: set[str] = set()
        keys: list[_Key] = []
        for _ in range(self.settings.questions_per_document * self.shape.keys):
            key = source.key(self.shape.values, taken)
            taken |= {key.name, *key.values}
            keys.append(key)
        asked = [keys[first : first + self.shape.queried] for first in range(0, len(keys), self.shape.keys)]
        queried = asked[member]
        statements = len(keys) * self.shape.values
        depths = iter(chance.sample(DEPTHS * math.ceil(statements / len(DEPTHS)), statements))
        insertions = [
            Insertion(statement, next(depths), value if key in queried else None)
            for key in keys
            for value, statement in zip(key.values, key.statements, strict=True)
        ]
        gold = tuple(value for key in queried for value in key.values)
        haystack = self._haystack(length, number, frozenset(taken))
        questions = [self._question(each) for each in asked]
        return self.planned(length, index, questions[member], gold, haystack, insertions, questions)

    def _keys(self, chance: random.Random) -> _Keys:
        return (_Small if self.settings.small else _FullSize)(self.shape, chance)

    def _haystack(self, length: int, number: int, taken: frozenset[str]) -> Haystack:
        if self.shape.hay is Hay.NOISE:
            return haystacks.noise()
        if self.shape.hay is Hay.PROSE:
            return haystacks.prose(self.settings.haystack, self.chance(length, number, "prose"))

        def lines() -> Iterator[str]:
            source = self._keys(self.chance(length, number, "lines"))
            while True:
                yield source.key(1, taken).statements[0]

        return haystacks.Lines(lines)

    def _question(self, queried: list[_Key]) -> str:
        if len(queried) == 1:
            return queried[0].question
        if self.settings.small:
            return " ".join(key.question for key in queried)
        names = ", ".join(key.name for key in queried[:-1]) + f" and {queried[-1].name}"
        return f"What are all the special magic {self.shape.value}s for {names} mentioned in the provided text?"


def needle_task(name: str, settings: TaskSettings) -> NeedleTask:
    """One of `SHAPES`."""
    shape, answer_tokens = SHAPES[name], _ANSWER_TOKENS
    if settings.small:
        answer_tokens = SMALL_ANSWER_TOKENS
        asked = min(shape.queried, _SMALL_MOST)
        shape = replace(
            shape,
            keys=asked if shape.queried > 1 else shape.keys,
            values=min(shape.values, _SMALL_MOST),
            queried=asked,
        )
    return NeedleTask(name=name, settings=settings, answer_tokens=answer_tokens, shape=shape)
