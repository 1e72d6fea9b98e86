"""RULER's eight needle tasks and variable tracking: values under keys, hidden in noise, in prose, or among others.

The small variants ask for facts that the embedded policy was trained for: those of `planted_facts`, with entities and
values of its held-out split, numbers of four to seven digits. The first five are "special magic numbers" of an
adjective and a noun; `niah_single_3` and `niah_multikey_3`, which have UUIDs at full size, draw any attribute and
entity. `niah_multivalue` has two values instead of four, `niah_multiquery` two questions instead of four, each in a
form that the policy knows.

Variable tracking passes a value from variable to variable, in noise; the answer is all their names. One chain of four
hops: five variables of five capitals, the first with a value of five digits. Before the text is a worked example of the
same kind, with some 500 tokens, or half as many below 4096 tokens. The small variant has two hops, three variables of
three capitals, and no example, because its lengths are too small.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import string
import uuid
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from memagent_evaluation.planted_facts import MAGIC, MAGIC_STATEMENT, PlantedFacts
from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.tasks import haystacks
from memagent_evaluation.tasks.generated import DEPTHS, SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_evaluation.tasks.placements import Haystack, Insertion
from memagent_graph.errors import EvaluationError
from memagent_graph.extra_modules import extra_module


class Hay(StrEnum):
    """The text around the needles."""

    NOISE = "noise"
    PROSE = "prose"
    NEEDLES = "needles"
    """Lines of the same form as needles, with other keys."""


class KeyKind(StrEnum):
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
    key: KeyKind = KeyKind.WORDS
    value: KeyKind = KeyKind.NUMBERS


SHAPES = {
    "niah_single_1": Shape(Hay.NOISE),
    "niah_single_2": Shape(Hay.PROSE),
    "niah_single_3": Shape(Hay.PROSE, value=KeyKind.UUIDS),
    "niah_multikey_1": Shape(Hay.PROSE, keys=4),
    "niah_multikey_2": Shape(Hay.NEEDLES),
    "niah_multikey_3": Shape(Hay.NEEDLES, key=KeyKind.UUIDS, value=KeyKind.UUIDS),
    "niah_multivalue": Shape(Hay.PROSE, values=4),
    "niah_multiquery": Shape(Hay.PROSE, keys=4, queried=4),
}

_ANSWER_TOKENS = 128
_SMALL_MOST = 2
_SMALL_DRAWS = 5000
"""The number of attempts to draw an unused key."""
_VARIABLES_ANSWER_TOKENS = 30
_SHORT_LENGTH = 4096
_EXAMPLE_NOISE = (8, 36)
"""How many noise sentences the worked example of variable tracking has: in short texts, and in others."""
_PLAIN = re.compile(r"[a-z]+")


@dataclass(frozen=True, slots=True)
class _Key:
    """A key, its values, the sentences that state them, and the question for only this key."""

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    question: str


class _FullSize:
    """Keys and values of RULER's kinds, each new: not in `used`."""

    def __init__(self, shape: Shape, chance: random.Random) -> None:
        self._shape = shape
        self._chance = chance

    def key(self, values: int, used: Container[str]) -> _Key:
        name = self._new(self._shape.key, used)
        numbers: list[str] = []
        while len(numbers) < values:
            value = self._new(self._shape.value, used)
            if value not in (name, *numbers):
                numbers.append(value)
        kind = self._shape.value
        statements = [MAGIC_STATEMENT.format(plural=f"{kind}s", entity=name, value=value) for value in numbers]
        verb = f"is the special magic {kind}" if values == 1 else f"are all the special magic {kind}s"
        question = f"What {verb} for {name} mentioned in the provided text?"
        return _Key(name, tuple(numbers), tuple(statements), question)

    def _new(self, kind: KeyKind, used: Container[str]) -> str:
        while True:
            if kind is KeyKind.WORDS:
                drawn = pair(self._chance)
            elif kind is KeyKind.NUMBERS:
                drawn = str(self._chance.randrange(10**6, 10**7))
            else:
                drawn = str(uuid.UUID(int=self._chance.getrandbits(128), version=4))
            if drawn not in used:
                return drawn


class _Small:
    """Facts in a form that the embedded policy can read, from the split that it never saw."""

    def __init__(self, shape: Shape, chance: random.Random) -> None:
        self._facts = PlantedFacts(chance, held_out=True, number_share=1.0)
        self._any_attribute = shape.value is KeyKind.UUIDS

    def key(self, values: int, used: Container[str]) -> _Key:
        for _ in range(_SMALL_DRAWS):
            attribute = self._facts.attribute(numeric=True) if self._any_attribute else f"{MAGIC}number"
            entity = self._facts.entity(bare=attribute.startswith(MAGIC))
            name = entity.replace("-", " ").removeprefix("the ").lower()
            drawn: list[str] = []
            while len(drawn) < values:
                value = self._facts.value(attribute)
                if value not in used and value not in drawn:
                    drawn.append(value)
            if name not in used:
                break
        else:
            raise EvaluationError(
                "a document needs more keys than the small variant has",
                hint="Ask for fewer questions on each document.",
            )
        statements = [self._facts.statement(attribute, entity, value) for value in drawn]
        return _Key(name, tuple(drawn), tuple(statements), self._facts.question(attribute, entity))


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleTask(GeneratedTask):
    """One of RULER's needle tasks.

    Attributes:
        shape: its row of the table.
    """

    shares_documents: ClassVar[bool] = True

    shape: Shape

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for needles, question and answer.
            MissingExtraError: the word lists that full-size keys come from are not installed.
        """
        number, member = self.shared(index)
        chance = self.chance(length, number)
        source = self._keys(chance)
        used: set[str] = set()
        keys: list[_Key] = []
        for _ in range(self.settings.questions_per_document * self.shape.keys):
            key = source.key(self.shape.values, used)
            used |= {key.name, *key.values}
            keys.append(key)
        groups = [keys[first : first + self.shape.queried] for first in range(0, len(keys), self.shape.keys)]
        queried = groups[member]
        statements = len(keys) * self.shape.values
        depths = iter(chance.sample(DEPTHS * math.ceil(statements / len(DEPTHS)), statements))
        insertions = [
            Insertion(statement, next(depths), value if key in queried else None)
            for key in keys
            for value, statement in zip(key.values, key.statements, strict=True)
        ]
        gold = tuple(value for key in queried for value in key.values)
        haystack = self._haystack(length, number, frozenset(used))
        questions = [self._question(group) for group in groups]
        return self.planned(length, index, questions[member], gold, haystack, insertions, questions)

    def _keys(self, chance: random.Random) -> _FullSize | _Small:
        return (_Small if self.settings.small else _FullSize)(self.shape, chance)

    def _haystack(self, length: int, number: int, used: frozenset[str]) -> Haystack:
        if self.shape.hay is Hay.NOISE:
            return haystacks.noise()
        if self.shape.hay is Hay.PROSE:
            return haystacks.prose(self.settings.haystack, self.chance(length, number, "prose"))

        def lines() -> Iterator[str]:
            source = self._keys(self.chance(length, number, "lines"))
            while True:
                yield source.key(1, used).statements[0]

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
        number = min(shape.queried, _SMALL_MOST)
        shape = replace(
            shape,
            keys=number if shape.queried > 1 else shape.keys,
            values=min(shape.values, _SMALL_MOST),
            queried=number,
        )
    return NeedleTask(name=name, settings=settings, answer_tokens=answer_tokens, shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariablesTask(GeneratedTask):
    """Variable tracking.

    Attributes:
        hops: how often the value is passed on.
        capitals: how long a variable's name is.
    """

    hops: int = 4
    capitals: int = 5

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length. Raises EvaluationError where the length is too small."""
        chance = self.chance(length, index)
        names, value, statements = self._chain(chance)
        depths = sorted(chance.sample(DEPTHS, len(names)))
        chain = [
            Insertion(statement, depth, name) for name, statement, depth in zip(names, statements, depths, strict=True)
        ]
        if not self.settings.small:
            # Before everything else at the beginning: insertions of one depth keep their order.
            example = self._example(length, self.chance(length, index, "example"), {*names, value})
            chain.insert(0, Insertion(example, 0.0))
        question = (
            f"Which variables have the value {value} in the provided text, be it assigned or taken over from "
            "another variable? Name all of them."
        )
        return self.planned(length, index, question, tuple(names), haystacks.noise(), chain)

    def _chain(self, chance: random.Random, used: Container[str] = ()) -> tuple[list[str], str, list[str]]:
        """Variables, their value, and the sentences that state it; without anything in `used`."""
        names: list[str] = []
        while len(names) <= self.hops:
            name = "".join(chance.choices(string.ascii_uppercase, k=self.capitals))
            if name not in names and name not in used:
                names.append(name)
        value = str(chance.randrange(10_000, 100_000))
        while value in used:
            value = str(chance.randrange(10_000, 100_000))
        sources = [value, *(f"VAR {name}" for name in names)]
        return names, value, [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=False)]

    def _example(self, length: int, chance: random.Random, used: Container[str]) -> str:
        names, value, statements = self._chain(chance, used)
        number = _EXAMPLE_NOISE[length >= _SHORT_LENGTH]
        lines = list(itertools.islice(haystacks.noise().units(), number))
        for place, statement in zip(
            sorted(chance.sample(range(number), len(names)))[::-1], statements[::-1], strict=True
        ):
            lines.insert(place, statement)
        listed = "\n".join(lines)
        return (
            f"An example of a text:\n{listed}\nThe variables that have the value {value} in the example are: "
            f"{', '.join(names)}.\n\nThe text in question:"
        )


def variables_task(name: str, settings: TaskSettings) -> VariablesTask:
    """`vt`."""
    if settings.small:
        return VariablesTask(name=name, settings=settings, answer_tokens=_VARIABLES_ANSWER_TOKENS, hops=2, capitals=3)
    return VariablesTask(name=name, settings=settings, answer_tokens=_VARIABLES_ANSWER_TOKENS)


def pair(chance: random.Random) -> str:
    """Return an adjective and a noun as one word, such as "quiet-falcon".

    Raises:
        MissingExtraError: the word lists are not installed.
    """
    return f"{chance.choice(words('adjective'))}-{chance.choice(words('noun'))}"


def all_words() -> tuple[str, ...]:
    """Adjectives, nouns and verbs, each once, in alphabetical order."""
    return tuple(sorted({*words("adjective"), *words("noun"), *words("verb")}))


@functools.cache
def words(part_of_speech: str) -> tuple[str, ...]:
    """Return the plain words of a part of speech, in alphabetical order.

    Raises:
        MissingExtraError: the word lists are not installed.
    """
    wonderwords = extra_module("wonderwords", "eval", "RULER's word keys and word lists")
    choices = wonderwords.RandomWord().filter(include_categories=[part_of_speech])
    return tuple(sorted({word for word in choices if _PLAIN.fullmatch(word)}))
