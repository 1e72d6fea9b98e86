"""Draws facts to plant in documents and to ask for: seeded, in many wordings, with a held-out split.

A fact says that an attribute of an entity has a value ("The access code of the quiet falcon is 48213."). Entities are
adjective-noun pairs and proper names; values are mostly numbers, also words, pairs and names. `draw_near_miss` draws a
foreign fact that is easily confused with another: same attribute and an entity that shares a word, or same entity and
another attribute. The shape of RULER's needle task ("One of the special magic numbers for K is: V.") is one wording.

The held-out split shares no entity word and no value with the other split: policies are trained on one and measured on
the other.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Final
from zlib import crc32


@dataclass(frozen=True)
class Fact:
    """One attribute of one entity: the sentence that states it and a question that asks for it."""

    attribute: str
    entity: str
    value: str
    statement: str
    question: str


_WORD_LISTS: Final[dict[str, tuple[str, ...]]] = {
    name: tuple(words.split() if isinstance(words, str) else words)
    for name, words in tomllib.loads(files(__package__).joinpath("planted_facts.toml").read_text("utf-8")).items()
}
ADJECTIVES, NOUNS = _WORD_LISTS["adjectives"], _WORD_LISTS["nouns"]
NAME_STARTS, NAME_MIDDLES, NAME_ENDS = _WORD_LISTS["name_starts"], _WORD_LISTS["name_middles"], _WORD_LISTS["name_ends"]
NAME_TITLES = _WORD_LISTS["name_titles"]
NUMBER_ATTRIBUTES, WORD_ATTRIBUTES = _WORD_LISTS["number_attributes"], _WORD_LISTS["word_attributes"]

STATEMENTS = (
    (8, "The {attribute} of {entity} is {value}."),
    (6, "The {attribute} for {entity} is {value}."),
    (2, "Note that the {attribute} of {entity} is {value}."),
    (2, "Remember that the {attribute} for {entity} is {value}."),
)

QUESTIONS = (
    (8, "What is the {attribute} of {entity}?"),
    (6, "What is the {attribute} for {entity}?"),
    (2, "What is the {attribute} for {entity} mentioned in the provided text?"),
)

MAGIC_STATEMENT = "One of the special magic {plural} for {entity} is: {value}."
MAGIC_QUESTIONS = (
    "What is the special magic {singular} for {entity} mentioned in the provided text?",
    "What is the special magic {singular} for {entity}?",
)
MAGIC = "special magic "


def is_held_out(text: str, fraction: float = 0.15) -> bool:
    """Return whether a word or value belongs to the held-out split. It depends on the text alone."""
    return crc32(text.lower().encode()) / 2**32 < fraction


class PlantedFacts:
    """A seeded stream of facts from one split.

    `words` adds to the vocabulary of entities and attributes, for example words of a training corpus; only those of the
    split are used. `number_fraction` is the fraction of attributes with numbers as values.
    """

    def __init__(
        self,
        seed: int | random.Random,
        *,
        held_out: bool = False,
        words: Sequence[str] = (),
        number_fraction: float = 0.8,
    ) -> None:
        self.random = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.held_out = held_out
        self.number_fraction = number_fraction
        self._adjectives = self._select_split(ADJECTIVES)
        self._nouns = self._select_split(NOUNS)
        self._words = self._select_split(words)

    def _select_split(self, words: Sequence[str]) -> list[str]:
        return [word for word in words if is_held_out(word) == self.held_out]

    def draw_fact(self, *, exclude: frozenset[str] = frozenset()) -> Fact:
        """Return a new fact whose entity is not in `exclude` (names in lower case)."""
        attribute = self.draw_attribute(numeric=self.random.random() < self.number_fraction)
        while True:
            entity = self.draw_entity(bare=attribute.startswith(MAGIC))
            if entity.lower() not in exclude:
                return self.make_fact(attribute, entity, self.draw_value(attribute))

    def draw_near_miss(self, fact: Fact) -> Fact:
        """Return a foreign fact that resembles this one: a similar entity, or another attribute of the same entity."""
        value = fact.value
        if self.random.random() < 0.4:
            attribute = fact.attribute
            while attribute == fact.attribute:
                attribute = self.draw_similar_attribute(fact.attribute)
            entity = fact.entity
        else:
            attribute, entity = fact.attribute, fact.entity
            while entity.lower() == fact.entity.lower():
                entity = self.draw_similar_entity(fact.entity)
        while value == fact.value:
            value = self.draw_value(attribute)
        return self.make_fact(attribute, entity, value)

    def make_fact(self, attribute: str, entity: str, value: str) -> Fact:
        """Return a fact with a statement and a question in random wordings."""
        return Fact(
            attribute,
            entity,
            value,
            self.draw_statement(attribute, entity, value),
            self.draw_question(attribute, entity),
        )

    def draw_statement(self, attribute: str, entity: str, value: str) -> str:
        """Return a sentence that states the fact."""
        if attribute.startswith(MAGIC) and self.random.random() < 0.7:
            return MAGIC_STATEMENT.format(plural=attribute.removeprefix(MAGIC) + "s", entity=entity, value=value)
        pattern = self._choose_weighted(STATEMENTS)
        return capitalise(pattern.format(attribute=attribute, entity=entity, value=value))

    def draw_question(self, attribute: str, entity: str) -> str:
        """Return a question that asks for the value."""
        if attribute.startswith(MAGIC):
            kind = attribute.removeprefix(MAGIC)
            return self.random.choice(MAGIC_QUESTIONS).format(singular=kind, entity=entity)
        return self._choose_weighted(QUESTIONS).format(attribute=attribute, entity=entity)

    def draw_attribute(self, *, numeric: bool) -> str:
        """Return the name of an attribute with numeric or with textual values."""
        draw = self.random.random()
        if not numeric:
            return self.random.choice(WORD_ATTRIBUTES) if draw > 0.05 else MAGIC + "word"
        if draw < 0.2:
            return MAGIC + "number"
        if self._words and draw < 0.35:
            head = self.random.choice(
                ("number", "code", "count", "size", "score", "rate", "total", "value", "level", "id")
            )
            return f"{self.random.choice(self._words)} {head}"
        return self.random.choice(NUMBER_ATTRIBUTES)

    def draw_similar_attribute(self, attribute: str) -> str:
        """Return an attribute of the same kind of value, half of the time with the same last word."""
        is_numeric = attribute not in WORD_ATTRIBUTES and attribute != MAGIC + "word"
        if attribute.startswith(MAGIC):
            return self.random.choice(NUMBER_ATTRIBUTES if is_numeric else WORD_ATTRIBUTES)
        last_word = attribute.rsplit(maxsplit=1)[-1]
        attributes = NUMBER_ATTRIBUTES if is_numeric else WORD_ATTRIBUTES
        related_attributes = [name for name in attributes if name.split()[-1] == last_word and name != attribute]
        if related_attributes and self.random.random() < 0.5:
            return self.random.choice(related_attributes)
        return self.random.choice(attributes)

    def draw_entity(self, *, bare: bool = False) -> str:
        """Return the name of an entity; a bare one has no "the", as in RULER."""
        draw = self.random.random()
        if bare:
            return (
                f"{self._draw_adjective()}-{self._draw_noun()}"
                if draw < 0.6
                else f"{self._draw_adjective()} {self._draw_noun()}"
            )
        if draw < 0.78:
            return f"the {self._draw_adjective()} {self._draw_noun()}"
        return f"the {self._draw_noun()} {self._draw_noun()}" if draw < 0.85 else self.draw_name()

    def draw_similar_entity(self, entity: str) -> str:
        """Return another entity that shares a word with this one, if it has several."""
        separator = "-" if "-" in entity and " " not in entity else " "
        words = entity.split(separator)
        index = len(words) - 1 if self.random.random() < 0.5 else len(words) - 2
        if words[index][0].isupper():
            words[index] = self._draw_name_word()
        else:
            words[index] = self._draw_noun() if index == len(words) - 1 else self._draw_adjective()
        return separator.join(words)

    def draw_value(self, attribute: str) -> str:
        """Return a value that fits the attribute: a number of four to seven digits, or a word, pair, or name."""
        if attribute not in WORD_ATTRIBUTES and attribute != MAGIC + "word":
            while True:
                digits = self.random.choice((4, 5, 5, 6, 6, 7, 7))
                number = str(self.random.randrange(10 ** (digits - 1), 10**digits))
                if is_held_out(number) == self.held_out:
                    return number
        draw = self.random.random()
        if draw < 0.4:
            return self._draw_noun()
        return f"{self._draw_adjective()} {self._draw_noun()}" if draw < 0.7 else self.draw_name()

    def draw_name(self) -> str:
        """Return a proper name of two words, or of a title and a word."""
        if self.random.random() < 0.3:
            return f"{self.random.choice(NAME_TITLES)} {self._draw_name_word()}"
        return f"{self._draw_name_word()} {self._draw_name_word()}"

    def _draw_name_word(self) -> str:
        while True:
            middle = self.random.choice(NAME_MIDDLES) if self.random.random() < 0.5 else ""
            word = self.random.choice(NAME_STARTS) + middle + self.random.choice(NAME_ENDS)
            if is_held_out(word) == self.held_out:
                return word

    def _draw_adjective(self) -> str:
        if self._words and self.random.random() < 0.4:
            return self.random.choice(self._words)
        return self.random.choice(self._adjectives)

    def _draw_noun(self) -> str:
        if self._words and self.random.random() < 0.4:
            return self.random.choice(self._words)
        return self.random.choice(self._nouns)

    def _choose_weighted(self, patterns: Sequence[tuple[int, str]]) -> str:
        return self.random.choices([pattern for _, pattern in patterns], [weight for weight, _ in patterns])[0]


def redraw_question(facts: PlantedFacts, fact: Fact) -> Fact:
    """Return the same fact with another question."""
    return replace(fact, question=facts.draw_question(fact.attribute, fact.entity))


def capitalise(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]
