"""Makes facts to plant in a document and ask for: seeded, in many wordings, with a held-out split.

A fact says that an attribute of an entity has a value ("The access code of the quiet falcon is 48213."). Entities are
adjective-noun pairs and proper names; values are numbers first, then words, pairs and names. `near_miss` makes a
foreign fact that is easily confused with another: same attribute and an entity that shares a word, or same entity and
another attribute. The shape of RULER's needle task ("One of the special magic numbers for K is: V.") is one wording.

The held-out split shares no entity word and no value with the other split, so a policy trained on one is measured on
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


_LISTS: Final[dict[str, tuple[str, ...]]] = {
    name: tuple(words.split() if isinstance(words, str) else words)
    for name, words in tomllib.loads(files(__package__).joinpath("planted_facts.toml").read_text("utf-8")).items()
}
ADJECTIVES, NOUNS = _LISTS["adjectives"], _LISTS["nouns"]
NAME_STARTS, NAME_MIDDLES, NAME_ENDS = _LISTS["name_starts"], _LISTS["name_middles"], _LISTS["name_ends"]
NAME_TITLES = _LISTS["name_titles"]
NUMBER_ATTRIBUTES, WORD_ATTRIBUTES = _LISTS["number_attributes"], _LISTS["word_attributes"]

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
    """Return whether a word or value belongs to the held-out split; a fixed property of its text."""
    return crc32(text.lower().encode()) / 2**32 < fraction


class PlantedFacts:
    """A seeded stream of facts from one split.

    `words` widens the vocabulary of entities and attributes beyond the lists of this module (for example a training
    corpus's own words); they are filtered by the split like any other. `number_share` is the fraction of numbers.
    """

    def __init__(
        self,
        seed: int | random.Random,
        *,
        held_out: bool = False,
        words: Sequence[str] = (),
        number_share: float = 0.8,
    ) -> None:
        self.random = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.held_out = held_out
        self.number_share = number_share
        self._adjectives = self._split(ADJECTIVES)
        self._nouns = self._split(NOUNS)
        self._words = self._split(words)

    def _split(self, words: Sequence[str]) -> list[str]:
        return [word for word in words if is_held_out(word) == self.held_out]

    def fact(self, *, exclude: frozenset[str] = frozenset()) -> Fact:
        """Return a new fact; its entity is none of `exclude` (lower case)."""
        attribute = self.attribute(numeric=self.random.random() < self.number_share)
        while True:
            entity = self.entity(bare=attribute.startswith(MAGIC))
            if entity.lower() not in exclude:
                return self.express(attribute, entity, self.value(attribute))

    def near_miss(self, fact: Fact) -> Fact:
        """Return a foreign fact that resembles this one: a similar entity, or another attribute of the same entity."""
        value = fact.value
        if self.random.random() < 0.4:
            attribute = fact.attribute
            while attribute == fact.attribute:
                attribute = self.similar_attribute(fact.attribute)
            entity = fact.entity
        else:
            attribute, entity = fact.attribute, fact.entity
            while entity.lower() == fact.entity.lower():
                entity = self.similar_entity(fact.entity)
        while value == fact.value:
            value = self.value(attribute)
        return self.express(attribute, entity, value)

    def express(self, attribute: str, entity: str, value: str) -> Fact:
        """Return a fact with a sentence that states it and a question."""
        return Fact(
            attribute, entity, value, self.statement(attribute, entity, value), self.question(attribute, entity)
        )

    def statement(self, attribute: str, entity: str, value: str) -> str:
        """Return a sentence that states the fact."""
        if attribute.startswith(MAGIC) and self.random.random() < 0.7:
            return MAGIC_STATEMENT.format(plural=attribute.removeprefix(MAGIC) + "s", entity=entity, value=value)
        pattern = self._choose_weighted(STATEMENTS)
        return _capitalise(pattern.format(attribute=attribute, entity=entity, value=value))

    def question(self, attribute: str, entity: str) -> str:
        """Return a question that asks for the value."""
        if attribute.startswith(MAGIC):
            kind = attribute.removeprefix(MAGIC)
            return self.random.choice(MAGIC_QUESTIONS).format(singular=kind, entity=entity)
        pattern = self._choose_weighted(QUESTIONS)
        return _capitalise(pattern.format(attribute=attribute, entity=entity), keep=pattern[0].islower())

    def attribute(self, *, numeric: bool) -> str:
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

    def similar_attribute(self, attribute: str) -> str:
        """Return another attribute of the same kind of value, sharing a word half of the time."""
        is_numeric = attribute not in WORD_ATTRIBUTES and attribute != MAGIC + "word"
        if attribute.startswith(MAGIC):
            return self.random.choice(NUMBER_ATTRIBUTES if is_numeric else WORD_ATTRIBUTES)
        last = attribute.rsplit(maxsplit=1)[-1]
        pool = NUMBER_ATTRIBUTES if is_numeric else WORD_ATTRIBUTES
        alike = [name for name in pool if name.split()[-1] == last and name != attribute]
        if alike and self.random.random() < 0.5:
            return self.random.choice(alike)
        return self.random.choice(pool)

    def entity(self, *, bare: bool = False) -> str:
        """Return the name of an entity; a bare one comes without "the", as in RULER."""
        draw = self.random.random()
        if bare:
            return f"{self._adjective()}-{self._noun()}" if draw < 0.6 else f"{self._adjective()} {self._noun()}"
        if draw < 0.78:
            return f"the {self._adjective()} {self._noun()}"
        return f"the {self._noun()} {self._noun()}" if draw < 0.85 else self.name()

    def similar_entity(self, entity: str) -> str:
        """Return another entity that shares a word with this one, if it has several."""
        joint = "-" if "-" in entity and " " not in entity else " "
        words = entity.split(joint)
        index = len(words) - 1 if self.random.random() < 0.5 else len(words) - 2
        if words[index][0].isupper():
            words[index] = self._name_word()
        else:
            words[index] = self._noun() if index == len(words) - 1 else self._adjective()
        return joint.join(words)

    def value(self, attribute: str) -> str:
        """Return a value that fits the attribute: a number of four to seven digits, or a word, pair, or name."""
        if attribute not in WORD_ATTRIBUTES and attribute != MAGIC + "word":
            while True:
                digits = self.random.choice((4, 5, 5, 6, 6, 7, 7))
                number = str(self.random.randrange(10 ** (digits - 1), 10**digits))
                if is_held_out(number) == self.held_out:
                    return number
        draw = self.random.random()
        if draw < 0.4:
            return self._noun()
        return f"{self._adjective()} {self._noun()}" if draw < 0.7 else self.name()

    def name(self) -> str:
        """Return a proper name of two words, or of a title and a word."""
        if self.random.random() < 0.3:
            return f"{self.random.choice(NAME_TITLES)} {self._name_word()}"
        return f"{self._name_word()} {self._name_word()}"

    def _name_word(self) -> str:
        while True:
            middle = self.random.choice(NAME_MIDDLES) if self.random.random() < 0.5 else ""
            word = self.random.choice(NAME_STARTS) + middle + self.random.choice(NAME_ENDS)
            if is_held_out(word) == self.held_out:
                return word

    def _adjective(self) -> str:
        if self._words and self.random.random() < 0.4:
            return self.random.choice(self._words)
        return self.random.choice(self._adjectives)

    def _noun(self) -> str:
        if self._words and self.random.random() < 0.4:
            return self.random.choice(self._words)
        return self.random.choice(self._nouns)

    def _choose_weighted(self, patterns: Sequence[tuple[int, str]]) -> str:
        return self.random.choices([pattern for _, pattern in patterns], [weight for weight, _ in patterns])[0]


def ask_again(facts: PlantedFacts, fact: Fact) -> Fact:
    """Return the same fact with another question."""
    return replace(fact, question=facts.question(fact.attribute, fact.entity))


def _capitalise(sentence: str, *, keep: bool = False) -> str:
    return sentence if keep else sentence[:1].upper() + sentence[1:]
