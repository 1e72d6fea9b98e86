"""Makes facts in plain English to plant in a document: who, where, when, what, which colour, how many, why.

A fact says that a relation holds between a subject and a value ("Mira Solberg lives in Arden."). Relations, wordings
and words are in `english_facts.toml`. The held-out split shares no person, no town, no relation that is marked as held
out, and no last wording of a list with the other split: a policy trained on one is measured on the other.
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

from memagent_evaluation.planted_facts import ADJECTIVES, NOUNS, is_held_out

_MACHINES: Final = ("clock", "lamp", "pump", "drill", "plough", "loom", "brush", "whistle", "scale", "heater", "kite")
_NUMBERS: Final = {"year": (1640, 1999), "count": (12, 990), "metres": (4, 180), "crowns": (15, 9000)}
_SPLIT_WORDS: Final = frozenset({"first_names", "family_names", "towns"})
"""Only these lists have held-out words; there are few colours and months, and all may be asked for."""
_SPLIT_SHARE: Final = 0.25
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
_LOWER_INSIDE: Final = frozenset(
    {"The", "A", "It", "In", "For", "At", "By", "On", "Because", "Every", "Many", "Nothing", "You", "Someone"}
)


@dataclass(frozen=True, slots=True)
class Relation:
    """A statement about a subject, in several wordings; see the beginning of `english_facts.toml`."""

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
    """Whether the last wording of a list is used like the others."""

    def worded(self, texts: Sequence[str], *, held_out: bool) -> Sequence[str]:
        """Return the wordings of a list that a split may use: the last one if held out, in training all others."""
        if self.held_out or self.all_wordings or len(texts) < 3:
            return texts
        return texts[-1:] if held_out else texts[:-1]


@dataclass(frozen=True, slots=True)
class EnglishFact:
    """A relation between two things, in words."""

    relation: Relation
    subject: str
    value: str
    statement: str


class _File(msgspec.Struct):
    words: dict[str, str]
    relations: tuple[Relation, ...]
    numbers: dict[str, tuple[int, int]] = {}
    frames: tuple[str, ...] = ()


def _parse(text: str) -> _File:
    return msgspec.convert(tomllib.loads(text), _File)


@cache
def _load_file() -> _File:
    return _parse(files(__package__).joinpath("english_facts.toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class MoreFacts:
    """Relations, words, numbers and frames beside those of this package, all of them to be trained on."""

    relations: tuple[Relation, ...]
    words: dict[str, tuple[str, ...]]
    numbers: dict[str, tuple[int, int]]
    """The smallest and largest number of each kind."""
    frames: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> MoreFacts:
        """Read a file in the format of `english_facts.toml`."""
        facts = _parse(path.read_text("utf-8"))
        return cls(
            tuple(replace(relation, all_wordings=True) for relation in facts.relations),
            {kind: _split_list(text) for kind, text in facts.words.items()},
            facts.numbers,
            facts.frames,
        )


def relations() -> tuple[Relation, ...]:
    """Return all relations, in the file's order."""
    return _load_file().relations


@cache
def words(kind: str, *, held_out: bool) -> tuple[str, ...]:
    """Return a list of words of one split; phrases stand between bars, single words between spaces."""
    return tuple(
        word
        for word in _split_list(_load_file().words.get(kind, ""))
        if kind not in _SPLIT_WORDS or is_held_out(word, _SPLIT_SHARE) == held_out
    )


def _split_list(text: str) -> tuple[str, ...]:
    words = (" ".join(part.split()) for part in text.split("|")) if "|" in text else text.split()
    return tuple(filter(None, words))


def sentence(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def make_distinctness_check(facts: Iterable[EnglishFact]) -> Callable[[EnglishFact], bool]:
    """Return a predicate: whether a fact answers no question about these facts, since it shares no subject or value of
    the same relation with them.
    """
    used = {(fact.relation.name, side) for fact in facts for side in (fact.subject, fact.value)}
    return lambda fact: not {(fact.relation.name, fact.subject), (fact.relation.name, fact.value)} & used


class EnglishFacts:
    """A seeded stream of facts from one split. In one stream a subject or a value is drawn once for a relation, as long
    as there are new ones; a person in a relation between persons is drawn only once, on either side.
    """

    def __init__(
        self,
        seed: int | random.Random,
        *,
        held_out: bool = False,
        held_out_relations: bool = False,
        more: MoreFacts | None = None,
    ) -> None:
        self.random = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.held_out = held_out
        self._more = more or MoreFacts((), {}, {}, ())
        self.relations = [relation for relation in relations() if relation.held_out == held_out_relations]
        self.relations += self._more.relations
        self._frames = _FRAMES[-2:] if held_out else _FRAMES[:-2] + self._more.frames
        self._taken: set[tuple[str, str]] = set()

    def relation(self, *, plural: bool = False, changes: bool = False) -> Relation:
        """Return some relation, of the kind asked for."""
        fitting = [
            relation
            for relation in self.relations
            if (relation.plural or not plural) and (relation.changes or not changes)
        ]
        return self.random.choice(fitting)

    def fact(
        self, relation: Relation | None = None, *, subject: str | None = None, value: str | None = None
    ) -> EnglishFact:
        """Return a new fact; subject and value are new if they are not given."""
        relation = relation or self.relation()
        subject = subject or self._draw_new(relation.name + " s", relation.subject)
        self._take(relation, subject)
        value = value or self._draw_new(relation.name + " v", relation.value)
        if relation.value == relation.subject:
            self._take(relation, value)
        return EnglishFact(relation, subject, value, self.state(relation, subject, value))

    def near_miss(self, fact: EnglishFact) -> EnglishFact:
        """Return a fact that is easily confused with another: of the same relation, or about the same subject."""
        if self.random.random() < 0.6:
            return self.fact(fact.relation)
        same_kind = [relation for relation in self.relations if relation.subject == fact.relation.subject]
        others = [
            relation
            for relation in same_kind
            if relation.name != fact.relation.name and self._is_new(relation, fact.subject)
        ]
        if not others:
            return self.fact(fact.relation)
        return self.fact(self.random.choice(others), subject=fact.subject)

    def change(self, fact: EnglishFact) -> EnglishFact:
        """Return what is true of the subject from now on."""
        if fact.relation.subject == "person" and fact.relation.of_whom:  # someone else owns it now
            subject, value = self._draw_new(fact.relation.name + " s", fact.relation.subject), fact.value
        else:
            subject, value = fact.subject, self._draw_new(fact.relation.name + " v", fact.relation.value)
        text = self._choose(fact.relation, fact.relation.changes)
        return EnglishFact(fact.relation, subject, value, _fill(text, subject, value))

    def state(self, relation: Relation, subject: str, value: str) -> str:
        """Return a statement in one of the split's wordings, sometimes as part of a longer sentence."""
        text = _fill(self._choose(relation, relation.statements), subject, value)
        if self.random.random() >= _FRAMED_SHARE:
            return text
        frame = self.random.choice(self._frames)
        return frame.format(text=text.rstrip("."), inside=_adapt_sentence(text.rstrip(".")))

    def question(self, fact: EnglishFact) -> tuple[str, str]:
        """Return a question about a fact, and its answer: the value, or the subject."""
        relation = fact.relation
        of_subject = bool(relation.subject_questions) and (
            not relation.questions or relation.ask == "who" or self.random.random() < 0.3
        )
        if relation.changes and relation.ask != "who":
            of_subject = False  # several may have had the value one after the other
        texts = relation.subject_questions if of_subject else relation.questions
        return _fill(
            self._choose(relation, texts), fact.subject, fact.value
        ), fact.subject if of_subject else fact.value

    def about(self, relation: Relation, subject: str) -> str:
        """Return a question for the value of a relation of a subject."""
        return self._choose(relation, relation.questions).replace("{s}", subject)

    def chain(self, hops: int) -> tuple[list[EnglishFact], str]:
        """Return facts that lead from one to the next, and the question that needs all of them.

        The first names a person, each next one leads to another, and the last one is about the last person. No relation
        occurs twice.
        """
        of_persons = [relation for relation in self.relations if relation.subject == "person"]
        leading = [relation for relation in of_persons if relation.of_subject]
        about = [
            relation for relation in of_persons if relation.questions and relation.ask != "who" and not relation.plural
        ]
        chain = [
            self.fact(
                self.random.choice([relation for relation in of_persons if relation.of_whom or relation.of_subject])
            )
        ]
        who, name = self._draw_named(chain[0], chain[0].subject)
        for _ in range(hops - 2):
            chain.append(self.fact(self._choose_following(leading, chain, who), subject=who))
            who, name = self._draw_named(chain[-1], name)
        chain.append(self.fact(self._choose_following(about, chain, who), subject=who))
        return chain, self.about(chain[-1].relation, name)

    def _choose_following(self, relations: Sequence[Relation], chain: Sequence[EnglishFact], who: str) -> Relation:
        """Return a relation that is not in the chain, and in which nothing was said about its last person."""
        used = {fact.relation.name for fact in chain}
        fitting = [relation for relation in relations if relation.name not in used and self._is_new(relation, who)]
        return self.random.choice(fitting or relations)

    def _draw_named(self, fact: EnglishFact, subject: str) -> tuple[str, str]:
        """Return the person that a fact leads to, and a description without the name."""
        relation = fact.relation
        if relation.of_whom:
            return fact.subject, self.random.choice(relation.of_whom).replace("{v}", fact.value)
        return fact.value, self.random.choice(relation.of_subject).replace("{s}", subject)

    def _choose(self, relation: Relation, texts: Sequence[str]) -> str:
        return self.random.choice(relation.worded(texts, held_out=self.held_out))

    def _draw_new(self, purpose: str, kind: str) -> str:
        for _ in range(1000):
            drawn = self.draw(kind)
            if (purpose, drawn) not in self._taken:
                break
        self._taken.add((purpose, drawn))
        return drawn

    def _is_new(self, relation: Relation, subject: str) -> bool:
        return (relation.name + " s", subject) not in self._taken

    def _take(self, relation: Relation, subject: str) -> None:
        """Prevent other facts about a subject in a relation; and, if its kind is the value's, facts with it as
        value.
        """
        self._taken.add((relation.name + " s", subject))
        if relation.value == relation.subject:
            self._taken.add((relation.name + " v", subject))

    def draw(self, kind: str) -> str:
        """Return some word of a kind."""
        if kind == "person":
            return f"{self._word('first_names')} {self._word('family_names')}"
        if limits := _NUMBERS.get(kind) or self._more.numbers.get(kind):
            return str(self.random.randint(*limits))
        if kind == "invention":
            return f"the {self.random.choice(ADJECTIVES)} {self.random.choice(_MACHINES)}"
        if kind == "title":
            return f"The {self.random.choice(ADJECTIVES).capitalize()} {self.random.choice(NOUNS).capitalize()}"
        return self._word(kind)

    def _word(self, kind: str) -> str:
        return self.random.choice(words(kind, held_out=self.held_out) + self._more.words.get(kind, ()))


def _adapt_sentence(text: str) -> str:
    """Return a sentence, adapted for use inside a longer one."""
    first = text.split(" ", 1)[0]
    return text[:1].lower() + text[1:] if first in _LOWER_INSIDE else text


def _fill(text: str, subject: str, value: str) -> str:
    return sentence(text.replace("{s}", subject).replace("{v}", value))
