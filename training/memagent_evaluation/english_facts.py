"""Draws facts in plain English to plant in documents: who, where, when, what, which colour, how many, why.

A fact says that a relation holds between a subject and a value ("Mira Solberg lives in Arden."). Relations, wordings
and words are in `english_facts.toml`. Policies are trained on one split and measured on the other, the held-out one.
The splits share no person and no town; relations that are marked as held out, and the last wording of each list, are
in the held-out split only.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from memagent_evaluation.planted_facts import ADJECTIVES, NOUNS, capitalise, is_held_out

_MACHINES: Final = ("clock", "lamp", "pump", "drill", "plough", "loom", "brush", "whistle", "scale", "heater", "kite")
_NUMBER_RANGES: Final = {"year": (1640, 1999), "count": (12, 990), "metres": (4, 180), "crowns": (15, 9000)}
_SPLIT_KINDS: Final = frozenset({"first_names", "family_names", "towns"})
"""The lists that are split. Other lists, such as colours and months, are short, and both splits use all their words."""
_HELD_OUT_SHARE: Final = 0.25
_FRAMED_SHARE: Final = 0.2
_FRAMES: Final = (
    "As the town records show, {inside}.",
    "{text}, as the neighbours never tire of saying.",
    "It is well known that {inside}.",
    "In the same week it was reported that {inside}.",
    "{text}, and nobody has ever doubted it.",
    "Strange as it sounds, {inside}.",
    "A visitor soon learns that {inside}.",
    "{text}, although few people remember why.",
    "Note also that {inside}.",
    "Among other things the letter said that {inside}.",
    "{text}, if the newspaper is to be believed.",
)
"""Sentences that a statement may be part of; the last two are held out."""
_LOWERED_FIRST_WORDS: Final = frozenset(
    {"The", "A", "It", "In", "For", "At", "By", "On", "Because", "Every", "Many", "Nothing", "You", "Someone"}
)


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of statement about a subject, in several wordings; `english_facts.toml` explains the fields."""

    name: str
    subject: str
    value: str
    ask: str
    statements: tuple[str, ...]
    questions: tuple[str, ...] = ()
    subject_questions: tuple[str, ...] = ()
    plural_questions: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    of_whom: tuple[str, ...] = ()
    """Names the subject by the value: "the owner of {v}"."""
    of_subject: tuple[str, ...] = ()
    """Names the value by the subject: "the sister of {s}"."""
    plural: bool = False
    held_out: bool = False
    all_wordings: bool = False
    """Whether training may use the last wordings too."""

    def select_wordings(self, wordings: Sequence[str], *, held_out: bool) -> Sequence[str]:
        """Return the wordings that a split may use: the held-out split the last one, the training split all others."""
        if self.held_out or self.all_wordings or len(wordings) < 3:
            return wordings
        return wordings[-1:] if held_out else wordings[:-1]


@dataclass(frozen=True, slots=True)
class EnglishFact:
    """A relation between two things, in words."""

    relation: Relation
    subject: str
    value: str
    statement: str


class _FactsFile(msgspec.Struct):
    words: dict[str, str]
    relations: tuple[Relation, ...]
    numbers: dict[str, tuple[int, int]] = {}
    frames: tuple[str, ...] = ()


def _parse_facts(text: str) -> _FactsFile:
    return msgspec.convert(tomllib.loads(text), _FactsFile)


@cache
def _load_shipped_facts() -> _FactsFile:
    return _parse_facts(files(__package__).joinpath("english_facts.toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class AdditionalFacts:
    """Relations, words, numbers and frames for training, in addition to those of this package."""

    relations: tuple[Relation, ...]
    words: dict[str, tuple[str, ...]]
    numbers: dict[str, tuple[int, int]]
    """The smallest and largest number of each kind."""
    frames: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> AdditionalFacts:
        """Read a file in the format of `english_facts.toml`."""
        facts = _parse_facts(path.read_text("utf-8"))
        return cls(
            tuple(replace(relation, all_wordings=True) for relation in facts.relations),
            {kind: _split_list(text) for kind, text in facts.words.items()},
            facts.numbers,
            facts.frames,
        )


def list_relations() -> tuple[Relation, ...]:
    """Return all relations, in the file's order."""
    return _load_shipped_facts().relations


@cache
def list_words(kind: str, *, held_out: bool) -> tuple[str, ...]:
    """Return the words of a kind that belong to a split."""
    return tuple(
        word
        for word in _split_list(_load_shipped_facts().words.get(kind, ""))
        if kind not in _SPLIT_KINDS or is_held_out(word, _HELD_OUT_SHARE) == held_out
    )


def _split_list(text: str) -> tuple[str, ...]:
    """Return the items of a list in the file: phrases between bars, or single words between spaces."""
    items = (" ".join(phrase.split()) for phrase in text.split("|")) if "|" in text else text.split()
    return tuple(filter(None, items))


def make_distinctness_check(facts: Iterable[EnglishFact]) -> Callable[[EnglishFact], bool]:
    """Return a predicate for facts that answer no question about `facts`: in a relation that one of those has, they
    have another subject and another value.
    """
    used_sides = {(fact.relation.name, side) for fact in facts for side in (fact.subject, fact.value)}
    return lambda fact: not {(fact.relation.name, fact.subject), (fact.relation.name, fact.value)} & used_sides


class EnglishFacts:
    """A seeded stream of facts from one split.

    A stream draws a subject or a value only once for a relation, as long as there are unused ones. In a relation
    between persons, it draws a person only once, as subject or as value.
    """

    def __init__(
        self,
        seed: int | random.Random,
        *,
        held_out: bool = False,
        held_out_relations: bool = False,
        additional: AdditionalFacts | None = None,
    ) -> None:
        self.random = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.held_out = held_out
        self._additional = additional or AdditionalFacts((), {}, {}, ())
        self.relations = [relation for relation in list_relations() if relation.held_out == held_out_relations]
        self.relations += self._additional.relations
        self._frames = _FRAMES[-2:] if held_out else _FRAMES[:-2] + self._additional.frames
        self._used: set[tuple[str, str]] = set()

    def draw_relation(self, *, plural: bool = False, changes: bool = False) -> Relation:
        """Return a random relation: with several values (`plural`), or with values that can change (`changes`)."""
        matching_relations = [
            relation
            for relation in self.relations
            if (relation.plural or not plural) and (relation.changes or not changes)
        ]
        return self.random.choice(matching_relations)

    def draw_fact(self, relation: Relation | None = None, *, subject: str | None = None) -> EnglishFact:
        """Return a new fact; its subject is new if it is not given."""
        relation = relation or self.draw_relation()
        subject = subject or self._draw_new(relation.name + " s", relation.subject)
        self._mark_used(relation, subject)
        value = self._draw_new(relation.name + " v", relation.value)
        if relation.value == relation.subject:
            self._mark_used(relation, value)
        return EnglishFact(relation, subject, value, self.draw_statement(relation, subject, value))

    def draw_near_miss(self, fact: EnglishFact) -> EnglishFact:
        """Return a fact that is easily confused with another: of the same relation, or about the same subject."""
        if self.random.random() < 0.6:
            return self.draw_fact(fact.relation)
        unused_relations = [
            relation
            for relation in self.relations
            if relation.subject == fact.relation.subject
            and relation.name != fact.relation.name
            and self._is_unused(relation, fact.subject)
        ]
        if not unused_relations:
            return self.draw_fact(fact.relation)
        return self.draw_fact(self.random.choice(unused_relations), subject=fact.subject)

    def draw_change(self, fact: EnglishFact) -> EnglishFact:
        """Return the fact that replaces another one: a new value for its subject, or a new owner for its value."""
        if fact.relation.subject == "person" and fact.relation.of_whom:
            subject, value = self._draw_new(fact.relation.name + " s", fact.relation.subject), fact.value
        else:
            subject, value = fact.subject, self._draw_new(fact.relation.name + " v", fact.relation.value)
        text = self._choose(fact.relation, fact.relation.changes)
        return EnglishFact(fact.relation, subject, value, _fill(text, subject, value))

    def draw_statement(self, relation: Relation, subject: str, value: str) -> str:
        """Return a statement in one of the split's wordings, sometimes as part of a longer sentence."""
        text = _fill(self._choose(relation, relation.statements), subject, value)
        if self.random.random() >= _FRAMED_SHARE:
            return text
        frame = self.random.choice(self._frames)
        return frame.format(text=text.rstrip("."), inside=_make_clause(text.rstrip(".")))

    def draw_question(self, fact: EnglishFact) -> tuple[str, str]:
        """Return a question about a fact, and its answer: the value, or the subject."""
        relation = fact.relation
        asks_for_subject = bool(relation.subject_questions) and (
            not relation.questions or relation.ask == "who" or self.random.random() < 0.3
        )
        if relation.changes and relation.ask != "who":
            asks_for_subject = False  # several subjects may have had the value, one after the other
        wordings = relation.subject_questions if asks_for_subject else relation.questions
        return _fill(
            self._choose(relation, wordings), fact.subject, fact.value
        ), fact.subject if asks_for_subject else fact.value

    def draw_question_about(self, relation: Relation, subject: str) -> str:
        """Return a question about the value of a subject in a relation."""
        return self._choose(relation, relation.questions).replace("{s}", subject)

    def draw_chain(self, hops: int) -> tuple[list[EnglishFact], str]:
        """Return facts that lead from one to the next, and the question that needs all of them.

        The first fact names a person, each of the next leads to another person, and the last is about the last person.
        No relation occurs twice.
        """
        person_relations = [relation for relation in self.relations if relation.subject == "person"]
        linking_relations = [relation for relation in person_relations if relation.of_subject]
        final_relations = [
            relation
            for relation in person_relations
            if relation.questions and relation.ask != "who" and not relation.plural
        ]
        first_relations = [relation for relation in person_relations if relation.of_whom or relation.of_subject]
        chain = [self.draw_fact(self.random.choice(first_relations))]
        person, description = self._draw_description(chain[0], chain[0].subject)
        for _ in range(hops - 2):
            chain.append(self.draw_fact(self._choose_relation(linking_relations, chain, person), subject=person))
            person, description = self._draw_description(chain[-1], description)
        chain.append(self.draw_fact(self._choose_relation(final_relations, chain, person), subject=person))
        return chain, self.draw_question_about(chain[-1].relation, description)

    def _choose_relation(self, relations: Sequence[Relation], chain: Sequence[EnglishFact], person: str) -> Relation:
        """Return a relation that the chain does not have, and in which there is no fact about its last person yet."""
        chain_relations = {fact.relation.name for fact in chain}
        unused_relations = [
            relation
            for relation in relations
            if relation.name not in chain_relations and self._is_unused(relation, person)
        ]
        return self.random.choice(unused_relations or relations)

    def _draw_description(self, fact: EnglishFact, subject: str) -> tuple[str, str]:
        """Return the person that a fact leads to, and a description of this person without the name."""
        relation = fact.relation
        if relation.of_whom:
            return fact.subject, self.random.choice(relation.of_whom).replace("{v}", fact.value)
        return fact.value, self.random.choice(relation.of_subject).replace("{s}", subject)

    def _choose(self, relation: Relation, wordings: Sequence[str]) -> str:
        return self.random.choice(relation.select_wordings(wordings, held_out=self.held_out))

    def _draw_new(self, side: str, kind: str) -> str:
        for _ in range(1000):
            word = self.draw(kind)
            if (side, word) not in self._used:
                break
        self._used.add((side, word))
        return word

    def _is_unused(self, relation: Relation, subject: str) -> bool:
        return (relation.name + " s", subject) not in self._used

    def _mark_used(self, relation: Relation, subject: str) -> None:
        """Prevent other facts about a subject in a relation; if values are of the same kind, also as their value."""
        self._used.add((relation.name + " s", subject))
        if relation.value == relation.subject:
            self._used.add((relation.name + " v", subject))

    def draw(self, kind: str) -> str:
        """Return a random word, number or name of a kind."""
        if kind == "person":
            return f"{self._draw_word('first_names')} {self._draw_word('family_names')}"
        if limits := _NUMBER_RANGES.get(kind) or self._additional.numbers.get(kind):
            return str(self.random.randint(*limits))
        if kind == "invention":
            return f"the {self.random.choice(ADJECTIVES)} {self.random.choice(_MACHINES)}"
        if kind == "title":
            return f"The {self.random.choice(ADJECTIVES).capitalize()} {self.random.choice(NOUNS).capitalize()}"
        return self._draw_word(kind)

    def _draw_word(self, kind: str) -> str:
        return self.random.choice(list_words(kind, held_out=self.held_out) + self._additional.words.get(kind, ()))


def _make_clause(text: str) -> str:
    """Return a sentence as a clause of a longer one: in lower case, unless it begins with a name."""
    first_word = text.split(" ", 1)[0]
    return text[:1].lower() + text[1:] if first_word in _LOWERED_FIRST_WORDS else text


def _fill(text: str, subject: str, value: str) -> str:
    return capitalise(text.replace("{s}", subject).replace("{v}", value))
