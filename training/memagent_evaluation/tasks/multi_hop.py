"""Multi-hop questions over an entity graph of invented names: "In which town does the owner of the punt live?"

A fact relates one entity (a person, town, company or thing) to another one, and there is at most one for each relation.
A chain of facts, each about the entity that the previous one led to, is planted in prose together with distractors. The
question names the chain's beginning and the relations, but not the entities between; the answer is the chain's end.
Half of the distractors are chains of the same relations, from an entity similar to the asked one; the others are other
facts about the entities of the chain.

The order of the facts is part of the name. Forward: in the order of the chain. Backward: the last one first, so that
only a later fact shows why an earlier one matters; a reader that overwrites its memory and reads once can keep it only
by chance, or by keeping everything. Shuffled: in any order. Small variants have 4 distractors in place of 16.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import ClassVar, Final

from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.tasks import haystacks
from memagent_evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_evaluation.tasks.invented_names import Entity, Kind, Names
from memagent_evaluation.tasks.placements import Insertion
from memagent_graph.errors import EvaluationError


class HopOrder(StrEnum):
    """The order of a chain's facts in the document."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SHUFFLED = "shuffled"


@dataclass(frozen=True, slots=True)
class HopRelation:
    """A relation between two entities, and its wordings."""

    of: Kind
    to: Kind
    statements: tuple[str, ...]
    """Sentences about {s}, the one, and {o}, the other."""
    phrase: str
    """What the other one is called, without its name, with {s} for the one."""
    question: str
    """What asks for it."""


RELATIONS: Final = {
    "owner": HopRelation(
        Kind.THING, Kind.PERSON, ("The owner of {s} is {o}.", "{s} belongs to {o}."),
        "the owner of {s}", "Who owns {s}?",
    ),
    "maker": HopRelation(
        Kind.THING, Kind.COMPANY, ("{s} was made by {o}.", "The maker of {s} is {o}."),
        "the maker of {s}", "Which company made {s}?",
    ),
    "home": HopRelation(
        Kind.PERSON, Kind.TOWN, ("{s} lives in {o}.", "{s} has a house in {o} and lives there."),
        "the town where {s} lives", "In which town does {s} live?",
    ),
    "employer": HopRelation(
        Kind.PERSON, Kind.COMPANY, ("{s} works for {o}.", "{s} is employed by {o}."),
        "the company that employs {s}", "Which company employs {s}?",
    ),
    "teacher": HopRelation(
        Kind.PERSON, Kind.PERSON, ("The sailing teacher of {s} was {o}.", "{s} was taught to sail by {o}."),
        "the sailing teacher of {s}", "Who was the sailing teacher of {s}?",
    ),
    "office": HopRelation(
        Kind.COMPANY, Kind.TOWN, ("{s} has its head office in {o}.", "The head office of {s} is in {o}."),
        "the town where {s} has its head office", "In which town is the head office of {s}?",
    ),
    "director": HopRelation(
        Kind.COMPANY, Kind.PERSON, ("The director of {s} is {o}.", "{s} is run by its director, {o}."),
        "the director of {s}", "Who is the director of {s}?",
    ),
    "mayor": HopRelation(
        Kind.TOWN, Kind.PERSON, ("The mayor of {s} is {o}.", "{o} is the mayor of {s}."),
        "the mayor of {s}", "Who is the mayor of {s}?",
    ),
    "builder": HopRelation(
        Kind.TOWN, Kind.COMPANY, ("The town hall of {s} was built by {o}.", "{o} built the town hall of {s}."),
        "the company that built the town hall of {s}", "Which company built the town hall of {s}?",
    ),
}  # fmt: skip
"""Each has one answer at most for one entity."""

_SUGGESTIVE: Final = frozenset({("mayor", "home"), ("director", "employer"), ("director", "home")})
"""Pairs that could be guessed: a mayor lives in the town, a director works for the company."""

MULTI_HOP: Final = {
    f"multi_hop_{hops}" + ("" if order is HopOrder.FORWARD else f"_{order}"): (hops, order)
    for hops in (2, 3, 4)
    for order in HopOrder
}
_ANSWER_TOKENS: Final = 64
_DISTRACTORS, _SMALL_DISTRACTORS = 16, 4


@dataclass(frozen=True, slots=True)
class HopFact:
    """A relation between two given entities."""

    relation: str
    subject: Entity
    object: Entity
    text: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Facts that lead from the first one's subject to the last one's object, and similar distractors."""

    facts: tuple[HopFact, ...]
    distractors: tuple[HopFact, ...]

    @property
    def question(self) -> str:
        """The question for the end, from the beginning."""
        phrase = self.facts[0].subject.name
        for fact in self.facts[:-1]:
            phrase = RELATIONS[fact.relation].phrase.format(s=phrase)
        return RELATIONS[self.facts[-1].relation].question.format(s=phrase)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiHopTask(GeneratedTask):
    """Questions whose answer needs several facts, each of which makes sense only with the previous one.

    Attributes:
        hops: how many facts there are in a chain.
        order: their order in the document.
        gap: the distance between neighbouring ones, as a share of the document; 0 means random.
        distractors: how many other facts there are for each question.
    """

    shares_documents: ClassVar[bool] = True
    dials: ClassVar[tuple[str, ...]] = ("gap", "distractors")
    margin: ClassVar[float] = 1.3

    hops: int
    order: HopOrder
    gap: float = 0.0
    distractors: int = _DISTRACTORS

    def __post_init__(self) -> None:
        if not 0 <= self.gap * (self.hops - 1) < 1 or self.gap < 0:
            raise EvaluationError(
                f"{self.hops} facts with gaps of {self.gap} of a document do not fit into it",
                hint=f"Take a gap from 0, which leaves it to chance, to less than {1 / (self.hops - 1):.2f}.",
            )
        if self.distractors < 0:
            raise EvaluationError(
                f"{self.name} cannot have {self.distractors} distractors", hint="Take 0, or any larger number."
            )

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for the facts, or there are not enough names for them.
        """
        number, member = self.shared(index)
        chance = self.chance(length, number)
        names = Names(chance)
        chains = [
            draw_chain(chance, names, self.hops, self.distractors) for _ in range(self.settings.questions_per_document)
        ]
        insertions = []
        for place, chain in enumerate(chains):
            for fact, depth in zip(chain.facts, self._depths(chance), strict=True):
                insertions.append(Insertion(fact.text, depth, fact.object.bare if place == member else None))
            insertions += [Insertion(fact.text, chance.random()) for fact in chain.distractors]
        questions = [chain.question for chain in chains]
        gold = (chains[member].facts[-1].object.bare,)
        haystack = haystacks.prose(self.settings.haystack, self.chance(length, number, "prose"))
        return self.planned(length, index, questions[member], gold, haystack, insertions, questions)

    def _depths(self, chance: random.Random) -> list[float]:
        """Return the places of a chain's facts, in the order of the chain."""
        if self.gap:
            first = chance.uniform(0, 1 - self.gap * (self.hops - 1))
            depths = [first + self.gap * hop for hop in range(self.hops)]
        else:
            depths = sorted(chance.random() for _ in range(self.hops))
        if self.order is HopOrder.BACKWARD:
            depths.reverse()
        elif self.order is HopOrder.SHUFFLED:
            chance.shuffle(depths)
        return depths


def draw_chain(chance: random.Random, names: Names, hops: int, distractors: int) -> Chain:
    """Return a new chain of facts, and its distractors."""
    relations = _relations(chance, hops)
    facts = _follow(chance, names, names.new(RELATIONS[relations[0]].of), relations)
    other = _others(chance, names, facts)
    return Chain(facts, tuple(fact for _, fact in zip(range(distractors), other, strict=False)))


def _relations(chance: random.Random, hops: int) -> tuple[str, ...]:
    """Relations that can be followed one after the other, none of them twice, and none that could be guessed."""
    while True:
        names = [chance.choice(list(RELATIONS))]
        while len(names) < hops:
            following = [
                name
                for name, relation in RELATIONS.items()
                if relation.of is RELATIONS[names[-1]].to and name not in names and (names[-1], name) not in _SUGGESTIVE
            ]
            if not following:
                break
            names.append(chance.choice(following))
        else:
            return tuple(names)


def _follow(chance: random.Random, names: Names, start: Entity, relations: tuple[str, ...]) -> tuple[HopFact, ...]:
    """Return a chain of facts from an entity to new ones."""
    facts = []
    for relation in relations:
        facts.append(_fact(chance, relation, start, names.new(RELATIONS[relation].to)))
        start = facts[-1].object
    return tuple(facts)


def _fact(chance: random.Random, relation: str, subject: Entity, to: Entity) -> HopFact:
    text = chance.choice(RELATIONS[relation].statements).format(s=subject.name, o=to.name)
    return HopFact(relation, subject, to, text[0].upper() + text[1:])


def _others(chance: random.Random, names: Names, chain: tuple[HopFact, ...]) -> Iterator[HopFact]:
    """Yield an endless stream of a chain's distractors: no entity has two facts of one relation."""
    relations = tuple(fact.relation for fact in chain)
    besides = [
        (relation, fact.subject)
        for fact in chain
        for relation, other in RELATIONS.items()
        if other.of is fact.subject.kind and relation != fact.relation
    ]
    chance.shuffle(besides)
    for place in count():
        start = names.resembling(chain[0].subject)
        # The last fact first: if only some are used, they are those that compete with the asked chain's end.
        yield from reversed(_follow(chance, names, start, relations))
        for relation, subject in besides[place * len(chain) : (place + 1) * len(chain)]:
            yield _fact(chance, relation, subject, names.new(RELATIONS[relation].to))


def multi_hop_task(name: str, settings: TaskSettings) -> MultiHopTask:
    """One of `MULTI_HOP`."""
    hops, order = MULTI_HOP[name]
    return MultiHopTask(
        name=name,
        settings=settings,
        answer_tokens=SMALL_ANSWER_TOKENS if settings.small else _ANSWER_TOKENS,
        hops=hops,
        order=order,
        distractors=_SMALL_DISTRACTORS if settings.small else _DISTRACTORS,
    )
