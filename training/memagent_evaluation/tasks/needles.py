"""RULER's eight needle tasks and variable tracking: values under keys, hidden in noise, in prose, or among others.

The small variants ask for facts of the embedded policy's kind (`planted_facts`), with entities and values of the
held-out split: numbers of four to seven digits. Six tasks ask for "special magic numbers" of an adjective and a noun;
`niah_single_3` and `niah_multikey_3`, which have UUIDs at full size, draw any attribute and entity. `niah_multivalue`
has two values instead of four, `niah_multiquery` two questions instead of four, each in a form that the policy knows.

Variable tracking passes a value from variable to variable, in noise; the answer is the names of all of them. There is
one chain of four hops, so five variables, each of five capital letters; the value has five digits. Before the text is a
worked example of the same kind, with some 500 tokens, or half as many below 4096 tokens. The small variant has two
hops, three variables of three capitals, and no example, because its lengths are too small.
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
from memagent_graph.errors import EvaluationError, load_extra


class HaystackKind(StrEnum):
    """The text around the needles."""

    NOISE = "noise"
    PROSE = "prose"
    NEEDLES = "needles"
    """Lines of the same form as needles, with other keys."""


class StringKind(StrEnum):
    """The kinds of keys and values."""

    WORDS = "word"
    """An adjective and a noun."""
    NUMBERS = "number"
    """Seven digits."""
    UUIDS = "uuid"


@dataclass(frozen=True, slots=True)
class NeedleConfig:
    """One row of RULER's table."""

    haystack_kind: HaystackKind
    key_count: int = 1
    """The number of keys in the text, without those of the haystack."""
    value_count: int = 1
    """The number of values per key."""
    queried_count: int = 1
    """The number of keys that the question asks about."""
    key_kind: StringKind = StringKind.WORDS
    value_kind: StringKind = StringKind.NUMBERS


NEEDLE_CONFIGS = {
    "niah_single_1": NeedleConfig(HaystackKind.NOISE),
    "niah_single_2": NeedleConfig(HaystackKind.PROSE),
    "niah_single_3": NeedleConfig(HaystackKind.PROSE, value_kind=StringKind.UUIDS),
    "niah_multikey_1": NeedleConfig(HaystackKind.PROSE, key_count=4),
    "niah_multikey_2": NeedleConfig(HaystackKind.NEEDLES),
    "niah_multikey_3": NeedleConfig(HaystackKind.NEEDLES, key_kind=StringKind.UUIDS, value_kind=StringKind.UUIDS),
    "niah_multivalue": NeedleConfig(HaystackKind.PROSE, value_count=4),
    "niah_multiquery": NeedleConfig(HaystackKind.PROSE, key_count=4, queried_count=4),
}

_ANSWER_TOKENS = 128
_MAX_SMALL_COUNT = 2
"""The maximum number of values or queried keys in small variants."""
_MAX_KEY_DRAWS = 5000
"""The number of attempts to draw an unused key."""
_VARIABLES_ANSWER_TOKENS = 30
_SHORT_LENGTH = 4096
_EXAMPLE_NOISE_SENTENCES = (8, 36)
"""The number of noise sentences in the worked example of variable tracking: in short texts, and in others."""
_PLAIN_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True, slots=True)
class _Key:
    """A key, its values, the sentences that state them, and the question about this key alone."""

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    question: str


class _RulerKeys:
    """Draws keys and values of RULER's kinds that are not in `used_texts`."""

    def __init__(self, config: NeedleConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng

    def draw_key(self, value_count: int, used_texts: Container[str]) -> _Key:
        name = self._draw(self._config.key_kind, used_texts)
        key_values: list[str] = []
        while len(key_values) < value_count:
            value = self._draw(self._config.value_kind, used_texts)
            if value not in (name, *key_values):
                key_values.append(value)
        kind = self._config.value_kind
        statements = [MAGIC_STATEMENT.format(plural=f"{kind}s", entity=name, value=value) for value in key_values]
        verb = f"is the special magic {kind}" if value_count == 1 else f"are all the special magic {kind}s"
        question = f"What {verb} for {name} mentioned in the provided text?"
        return _Key(name, tuple(key_values), tuple(statements), question)

    def _draw(self, kind: StringKind, used_texts: Container[str]) -> str:
        while True:
            if kind is StringKind.WORDS:
                key = draw_word_pair(self._rng)
            elif kind is StringKind.NUMBERS:
                key = str(self._rng.randrange(10**6, 10**7))
            else:
                key = str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
            if key not in used_texts:
                return key


class _SmallKeys:
    """Draws facts in a form that the embedded policy can read, from the split that it was not trained on."""

    def __init__(self, config: NeedleConfig, rng: random.Random) -> None:
        self._facts = PlantedFacts(rng, held_out=True, number_fraction=1.0)
        self._draws_any_attribute = config.value_kind is StringKind.UUIDS

    def draw_key(self, value_count: int, used_texts: Container[str]) -> _Key:
        for _ in range(_MAX_KEY_DRAWS):
            attribute = self._facts.draw_attribute(numeric=True) if self._draws_any_attribute else f"{MAGIC}number"
            entity = self._facts.draw_entity(bare=attribute.startswith(MAGIC))
            name = entity.replace("-", " ").removeprefix("the ").lower()
            key_values: list[str] = []
            while len(key_values) < value_count:
                value = self._facts.draw_value(attribute)
                if value not in used_texts and value not in key_values:
                    key_values.append(value)
            if name not in used_texts:
                break
        else:
            raise EvaluationError(
                "a document needs more keys than the small variant has",
                hint="Ask for fewer questions on each document.",
            )
        statements = [self._facts.draw_statement(attribute, entity, value) for value in key_values]
        return _Key(name, tuple(key_values), tuple(statements), self._facts.draw_question(attribute, entity))


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleTask(GeneratedTask):
    """One of RULER's needle tasks.

    Attributes:
        needle_config: the row of RULER's table.
    """

    shares_documents: ClassVar[bool] = True

    needle_config: NeedleConfig

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for needles, question and answer.
            MissingExtraError: the word lists that full-size keys come from are not installed.
        """
        document_index, question_index = divmod(index, self.settings.questions_per_document)
        rng = self.make_sample_rng(length, document_index)
        key_source = self._make_key_source(rng)
        used_texts: set[str] = set()
        keys: list[_Key] = []
        for _ in range(self.settings.questions_per_document * self.needle_config.key_count):
            key = key_source.draw_key(self.needle_config.value_count, used_texts)
            used_texts |= {key.name, *key.values}
            keys.append(key)
        group_starts = range(0, len(keys), self.needle_config.key_count)
        groups = [keys[start : start + self.needle_config.queried_count] for start in group_starts]
        queried_keys = groups[question_index]
        statement_count = len(keys) * self.needle_config.value_count
        depths = iter(rng.sample(DEPTHS * math.ceil(statement_count / len(DEPTHS)), statement_count))
        insertions = [
            Insertion(statement, next(depths), value if key in queried_keys else None)
            for key in keys
            for value, statement in zip(key.values, key.statements, strict=True)
        ]
        gold = tuple(value for key in queried_keys for value in key.values)
        haystack = self._make_haystack(length, document_index, frozenset(used_texts))
        questions = [self._make_question(group) for group in groups]
        return self.lay_out_sample(length, index, questions[question_index], gold, haystack, insertions, questions)

    def _make_key_source(self, rng: random.Random) -> _RulerKeys | _SmallKeys:
        return (_SmallKeys if self.settings.small else _RulerKeys)(self.needle_config, rng)

    def _make_haystack(self, length: int, document_index: int, used_texts: frozenset[str]) -> Haystack:
        if self.needle_config.haystack_kind is HaystackKind.NOISE:
            return haystacks.make_noise_haystack()
        if self.needle_config.haystack_kind is HaystackKind.PROSE:
            return haystacks.make_prose_haystack(
                self.settings.haystack, self.make_sample_rng(length, document_index, "prose")
            )

        def iter_lines() -> Iterator[str]:
            key_source = self._make_key_source(self.make_sample_rng(length, document_index, "lines"))
            while True:
                yield key_source.draw_key(1, used_texts).statements[0]

        return haystacks.make_line_haystack(iter_lines)

    def _make_question(self, queried_keys: list[_Key]) -> str:
        if len(queried_keys) == 1:
            return queried_keys[0].question
        if self.settings.small:
            return " ".join(key.question for key in queried_keys)
        names = ", ".join(key.name for key in queried_keys[:-1]) + f" and {queried_keys[-1].name}"
        kind = self.needle_config.value_kind
        return f"What are all the special magic {kind}s for {names} mentioned in the provided text?"


def make_needle_task(name: str, settings: TaskSettings) -> NeedleTask:
    """Return the task of one of `NEEDLE_CONFIGS`."""
    config, answer_tokens = NEEDLE_CONFIGS[name], _ANSWER_TOKENS
    if settings.small:
        answer_tokens = SMALL_ANSWER_TOKENS
        queried_count = min(config.queried_count, _MAX_SMALL_COUNT)
        config = replace(
            config,
            key_count=queried_count if config.queried_count > 1 else config.key_count,
            value_count=min(config.value_count, _MAX_SMALL_COUNT),
            queried_count=queried_count,
        )
    return NeedleTask(name=name, settings=settings, answer_tokens=answer_tokens, needle_config=config)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariablesTask(GeneratedTask):
    """Variable tracking.

    Attributes:
        hops: the number of times that the value is passed on.
        name_length: the number of letters of a variable's name.
    """

    hops: int = 4
    name_length: int = 5

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length. Raises EvaluationError where the length is too small."""
        rng = self.make_sample_rng(length, index)
        names, value, statements = self._make_chain(rng)
        depths = sorted(rng.sample(DEPTHS, len(names)))
        chain = [
            Insertion(statement, depth, name) for name, statement, depth in zip(names, statements, depths, strict=True)
        ]
        if not self.settings.small:
            # At the very beginning, because insertions of the same depth keep their order.
            example = self._make_example(length, self.make_sample_rng(length, index, "example"), {*names, value})
            chain.insert(0, Insertion(example, 0.0))
        question = (
            f"Which variables have the value {value} in the provided text, be it assigned or taken over from "
            "another variable? Name all of them."
        )
        return self.lay_out_sample(length, index, question, tuple(names), haystacks.make_noise_haystack(), chain)

    def _make_chain(self, rng: random.Random, used_texts: Container[str] = ()) -> tuple[list[str], str, list[str]]:
        """Return variables, their value, and the sentences that state it; names and value are not in `used_texts`."""
        names: list[str] = []
        while len(names) <= self.hops:
            name = "".join(rng.choices(string.ascii_uppercase, k=self.name_length))
            if name not in names and name not in used_texts:
                names.append(name)
        while (value := str(rng.randrange(10_000, 100_000))) in used_texts:
            pass
        right_sides = [value, *(f"VAR {name}" for name in names)]
        statements = [f"VAR {name} = {right_side}" for name, right_side in zip(names, right_sides, strict=False)]
        return names, value, statements

    def _make_example(self, length: int, rng: random.Random, used_texts: Container[str]) -> str:
        names, value, statements = self._make_chain(rng, used_texts)
        noise_count = _EXAMPLE_NOISE_SENTENCES[length >= _SHORT_LENGTH]
        lines = list(itertools.islice(haystacks.make_noise_haystack().iter_units(), noise_count))
        for position, statement in zip(
            sorted(rng.sample(range(noise_count), len(names)))[::-1], statements[::-1], strict=True
        ):
            lines.insert(position, statement)
        example = "\n".join(lines)
        return (
            f"An example of a text:\n{example}\nThe variables that have the value {value} in the example are: "
            f"{', '.join(names)}.\n\nThe text in question:"
        )


def make_variables_task(name: str, settings: TaskSettings) -> VariablesTask:
    """Return the task "vt"."""
    if settings.small:
        return VariablesTask(
            name=name, settings=settings, answer_tokens=_VARIABLES_ANSWER_TOKENS, hops=2, name_length=3
        )
    return VariablesTask(name=name, settings=settings, answer_tokens=_VARIABLES_ANSWER_TOKENS)


def draw_word_pair(rng: random.Random) -> str:
    """Draw an adjective and a noun, and return them as one word, such as "quiet-falcon".

    Raises:
        MissingExtraError: the word lists are not installed.
    """
    return f"{rng.choice(list_words('adjective'))}-{rng.choice(list_words('noun'))}"


def list_all_words() -> tuple[str, ...]:
    """Return all adjectives, nouns and verbs in alphabetical order."""
    return tuple(sorted({*list_words("adjective"), *list_words("noun"), *list_words("verb")}))


@functools.cache
def list_words(part_of_speech: str) -> tuple[str, ...]:
    """Return the plain words of a part of speech, in alphabetical order.

    Raises:
        MissingExtraError: the word lists are not installed.
    """
    wonderwords = load_extra("wonderwords", "eval", "RULER's word keys and word lists")
    choices = wonderwords.RandomWord().filter(include_categories=[part_of_speech])
    return tuple(sorted({word for word in choices if _PLAIN_WORD.fullmatch(word)}))
