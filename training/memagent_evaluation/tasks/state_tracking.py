"""Where someone or something is: sentences about people who move and carry things, distributed in prose in order.

In the manner of bAbI's tasks 1 to 3 (Weston et al., arXiv 1502.05698) and of BABILong, which hides these in prose
(arXiv 2406.10149), with people, places, things and verbs of our own. `state_1` asks where a person is at the end,
`state_2` where a thing is (where its carrier went or put it), and `state_3` where it was before a certain place. The
evidence is one sentence, two, and three or four. Things that nobody has touched may be anywhere: when someone finds
one, that shows where it was.

Small variants have 8 sentences, 2 people and 2 things, instead of 20, 4 and 4. If several questions share a document,
there are at least as many people and things as questions, and 8 sentences for each question.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import ClassVar, Final

from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.tasks import haystacks
from memagent_evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_evaluation.tasks.invented_names import FIRST_NAMES, WORDS
from memagent_evaluation.tasks.placements import Haystack, Insertion
from memagent_graph.errors import EvaluationError

PLACES, THINGS = WORDS["places"], WORDS["small_things"]
WALKS: Final = tuple(
    f"{{who}} {verb} into the {{what}}." for verb in ("walked", "hurried", "strolled", "stepped", "wandered")
)
FINDS: Final = (
    "{who} pocketed the {what}.",
    "{who} found the {what} and kept it.",
    "{who} came upon the {what} and packed it.",
    "{who} collected the {what}.",
)
PARTS: Final = (
    "{who} laid the {what} aside.",
    "{who} parted with the {what}.",
    "{who} let go of the {what}.",
    "{who} set the {what} on the floor.",
)

STATES: Final = ("state_1", "state_2", "state_3")
_ANSWER_TOKENS: Final = 32
_FACTS, _SMALL_FACTS, _OF_EACH, _SMALL_OF_EACH = 20, 8, 4, 2
_FACTS_PER_QUESTION: Final = 8
_STORIES: Final = 500
"""The number of attempts to make a story with enough questions."""
_QUESTION_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Event:
    """One sentence of a story."""

    text: str
    told: str
    """Its gold string: the place that is entered, or the person with a thing."""


@dataclass(frozen=True, slots=True)
class StoryQuestion:
    """A question on a story, its answer, and the events that show it."""

    subject: str
    """The person or thing that it is about."""
    question: str
    gold: str
    evidence: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Stay:
    """The place of a person or thing, and the events that show it."""

    place: str
    shown: frozenset[int]


class Story:
    """Events one after the other, and the possible questions after them.

    Args:
        chance: the source of random numbers.
        people: the persons.
        things: what they can find.
    """

    def __init__(self, chance: random.Random, people: Sequence[str], things: Sequence[str]) -> None:
        self._chance = chance
        self._people = people
        self._things = things
        self._used: set[str] = set()
        self._at: dict[str, _Stay] = {}
        self._carried: dict[str, tuple[str, int]] = {}
        """Who carries each thing, since which event."""
        self._been: dict[str, list[_Stay]] = {}
        """The places of each thing that somebody has touched."""
        self._last: dict[str, _Stay] = {}
        """The place of each of these, with the last events that show it."""
        self.events: list[Event] = []

    def tell(self) -> Iterator[Event]:
        """Yield an endless stream of events."""
        chance = self._chance
        while True:
            within_reach = self._within_reach()
            if self._carried and chance.random() < 1 / 5:
                self._part(chance.choice(list(self._carried)))
            elif within_reach and chance.random() < 1 / 2:
                self._find(*chance.choice(within_reach))
            else:
                who = chance.choice(self._people)
                here = self._at.get(who)
                self._walk(who, chance.choice([place for place in PLACES if here is None or place != here.place]))
            yield self.events[-1]

    def questions(self, kind: str) -> list[StoryQuestion]:
        """Return all questions of one of `STATES` that the events answer."""
        if kind == "state_1":
            return [StoryQuestion(who, _in_the_end(who), stay.place, stay.shown) for who, stay in self._at.items()]
        if kind == "state_2":
            return [
                StoryQuestion(thing, _in_the_end(f"the {thing}"), stay.place, stay.shown)
                for thing, stay in self._last.items()
            ]
        return [
            StoryQuestion(
                thing,
                f"According to the text, where was the {thing} before it came to the {stay.place}?",
                before.place,
                before.shown | stay.shown,
            )
            for thing, stays in self._been.items()
            for before, stay in pairwise(stays)
            if [stay.place for stay in stays].count(stay.place) == 1
        ]

    def _within_reach(self) -> list[tuple[str, str]]:
        """Who could find what: a thing is where it was put, or anywhere if nobody has touched it."""
        return [
            (who, thing)
            for thing in self._things
            if thing not in self._carried
            for who, stay in self._at.items()
            if thing not in self._last or self._last[thing].place == stay.place
        ]

    def _walk(self, who: str, place: str) -> None:
        walked = self._add(WALKS, who, place, place)
        self._at[who] = _Stay(place, frozenset({walked}))
        for thing, (carrier, since) in self._carried.items():
            if carrier == who:
                self._last[thing] = _Stay(place, frozenset({since, walked}))
                self._been[thing].append(self._last[thing])

    def _find(self, who: str, thing: str) -> None:
        event = self._add(FINDS, who, thing, who)
        self._carried[thing] = who, event
        self._last[thing] = _Stay(self._at[who].place, self._at[who].shown | {event})
        self._been.setdefault(thing, [self._last[thing]])

    def _part(self, thing: str) -> None:
        who, _ = self._carried.pop(thing)
        parted = self._add(PARTS, who, thing, who)
        self._last[thing] = _Stay(self._at[who].place, self._at[who].shown | {parted})

    def _add(self, patterns: Sequence[str], who: str, what: str, gold: str) -> int:
        """Add an event, in a wording that was not used for the same before if possible; return its number."""
        texts = [pattern.format(who=who, what=what) for pattern in patterns]
        text = self._chance.choice([text for text in texts if text not in self._used] or texts)
        self._used.add(text)
        self.events.append(Event(text, gold))
        return len(self.events) - 1


def _in_the_end(whom: str) -> str:
    return f"According to the text, where is {whom} in the end?"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTask(GeneratedTask):
    """Questions on the place of a person or a thing.

    Attributes:
        kind: one of `STATES`.
        facts: how many sentences the story has; 0: as many as leave `prose_share` of the document for prose.
        people: how many people it is about.
        things: how many things they can carry; none in `state_1`.
        prose_share: the share of the document that is prose, 0 to 1, if `facts` is 0.
    """

    shares_documents: ClassVar[bool] = True
    dials: ClassVar[tuple[str, ...]] = ("facts", "people", "things", "prose_share")
    margin: ClassVar[float] = 1.3

    kind: str
    facts: int
    people: int
    things: int
    prose_share: float = 0.5

    def __post_init__(self) -> None:
        least, most = (0, 0) if self.kind == "state_1" else (1, len(THINGS))
        if not (1 <= self.people <= len(FIRST_NAMES) and least <= self.things <= most):
            raise EvaluationError(
                f"{self.name} cannot have {self.people} people and {self.things} things",
                hint=f"Take 1 to {len(FIRST_NAMES)} people and {least} to {most} things; each question on a document "
                "has one of its own unless you name a number.",
            )
        if self.facts < 0 or not 0 <= self.prose_share < 1:
            raise EvaluationError(
                f"{self.name} cannot have {self.facts} facts and a share of {self.prose_share} of prose",
                hint="Take facts from 0 on, and prose_share from 0 to less than 1.",
            )

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for the sentences, or they answer too few questions.
        """
        number, member = self.shared(index)
        chance = self.chance(length, number)
        haystack = haystacks.prose(self.settings.haystack, self.chance(length, number, "prose"))
        story, questions = self._story(chance, length, haystack)
        question = questions[member]
        depths = sorted(chance.random() for _ in story.events)
        insertions = [
            Insertion(event.text, depth, event.told if place in question.evidence else None)
            for place, (event, depth) in enumerate(zip(story.events, depths, strict=True))
        ]
        beside = [other.question for other in questions]
        return self.planned(length, index, question.question, (question.gold,), haystack, insertions, beside)

    def _story(self, chance: random.Random, length: int, haystack: Haystack) -> tuple[Story, list[StoryQuestion]]:
        """Return a story, and the questions on it that share the document."""
        number = self.settings.questions_per_document
        for _ in range(_STORIES):
            story = Story(chance, chance.sample(FIRST_NAMES, self.people), chance.sample(THINGS, self.things))
            self._tell(story, length, haystack)
            questions = story.questions(self.kind)
            if len(questions) >= number:
                return story, chance.sample(questions, number)
        if self.facts == 0:
            raise self.too_short(length, length)
        raise EvaluationError(
            f"{self.facts} facts of {self.name} hardly ever answer {number} questions",
            hint="Ask for more facts, people or things, or for fewer questions on a document.",
        )

    def _tell(self, story: Story, length: int, haystack: Haystack) -> None:
        """Add the requested number of events, or as many as fit."""
        if self.facts:
            for _ in islice(story.tell(), self.facts):
                pass
            return
        room = (1 - self.prose_share) * (length - self.answer_tokens - _QUESTION_TOKENS)
        for event in story.tell():
            room -= self.settings.tokenizer.count(haystack.piece(0, event.text))
            if room <= 0:
                return


def state_task(name: str, settings: TaskSettings) -> StateTask:
    """One of `STATES`."""
    facts, of_each = (_SMALL_FACTS, _SMALL_OF_EACH) if settings.small else (_FACTS, _OF_EACH)
    if settings.questions_per_document > 1:
        facts = max(facts, _FACTS_PER_QUESTION * settings.questions_per_document)
        of_each = max(of_each, settings.questions_per_document)
    return StateTask(
        name=name,
        settings=settings,
        answer_tokens=SMALL_ANSWER_TOKENS if settings.small else _ANSWER_TOKENS,
        kind=name,
        facts=facts,
        people=of_each,
        things=0 if name == "state_1" else of_each,
    )
