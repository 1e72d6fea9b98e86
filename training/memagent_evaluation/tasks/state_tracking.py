"""State tracking: stories about people who walk between rooms and carry things, with their sentences spread in prose.

The tasks follow bAbI's tasks 1 to 3 (Weston et al., arXiv 1502.05698) and BABILong, which hides those in prose (arXiv
2406.10149), with other people, rooms, things and verbs. `state_1` asks where a person is at the end, `state_2` where a
thing is (where its carrier last went with it or left it), and `state_3` where it was before a given room. The evidence
is one sentence in `state_1`, two in `state_2`, and three or four in `state_3`. A thing can be anywhere until a person
picks it up.

Small variants have 8 sentences, 2 people and 2 things instead of 20, 4 and 4. If several questions share a document,
there are at least as many people and things as questions, and 8 sentences for each question.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from typing import ClassVar, Final

from memagent_evaluation.samples import Sample, TaskSettings
from memagent_evaluation.tasks import haystacks
from memagent_evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask
from memagent_evaluation.tasks.placements import Insertion
from memagent_graph.errors import EvaluationError

_WORDS: Final = tomllib.loads(files(__package__).joinpath("state_tracking.toml").read_text("utf-8"))
PEOPLE, ROOMS, THINGS = (tuple(_WORDS[name].split()) for name in ("people", "places", "things"))
WALK_SENTENCES: Final = tuple(
    f"{{person}} {verb} into the {{object}}." for verb in ("walked", "hurried", "strolled", "stepped", "wandered")
)
PICK_UP_SENTENCES: Final = (
    "{person} pocketed the {object}.",
    "{person} found the {object} and kept it.",
    "{person} came upon the {object} and packed it.",
    "{person} collected the {object}.",
)
PUT_DOWN_SENTENCES: Final = (
    "{person} laid the {object} aside.",
    "{person} parted with the {object}.",
    "{person} let go of the {object}.",
    "{person} set the {object} on the floor.",
)

STATE_TASK_NAMES: Final = ("state_1", "state_2", "state_3")
_ANSWER_TOKENS: Final = 32
_FACTS, _SMALL_FACTS = 20, 8
_ENTITIES, _SMALL_ENTITIES = 4, 2
"""The number of people, and of things."""
_FACTS_PER_QUESTION: Final = 8
_MAX_STORY_DRAWS: Final = 500
"""The number of attempts to draw a story that answers enough questions."""


@dataclass(frozen=True, slots=True)
class Event:
    """One sentence of a story."""

    sentence: str
    gold: str
    """The gold string of the event as evidence: the room that is entered, or the person who holds a thing."""


@dataclass(frozen=True, slots=True)
class StoryQuestion:
    """A question about a story, its answer, and the indices of the events that prove it."""

    question: str
    answer: str
    evidence: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Location:
    """The room that a person or thing is in, and the indices of the events that prove it."""

    room: str
    evidence: frozenset[int]


@dataclass(eq=False)
class Story:
    """A growing list of random events, and the questions that they answer."""

    rng: random.Random
    people: Sequence[str]
    things: Sequence[str]
    """The things that people can carry."""

    def __post_init__(self) -> None:
        self._sentences: set[str] = set()
        self._person_locations: dict[str, _Location] = {}
        self._carriers: dict[str, tuple[str, int]] = {}
        """The person who carries each thing, and the event of picking it up."""
        self._thing_locations: dict[str, _Location] = {}
        """The location of each thing that a person has picked up, proved by the latest events."""
        self._thing_histories: dict[str, list[_Location]] = {}
        """All locations of these things so far, the first one first."""
        self.events: list[Event] = []

    def add_random_event(self) -> None:
        """Add a random event."""
        rng, reachable_things = self.rng, self._find_reachable_things()
        if self._carriers and rng.random() < 1 / 5:
            self._put_down(rng.choice(list(self._carriers)))
        elif reachable_things and rng.random() < 1 / 2:
            self._pick_up(*rng.choice(reachable_things))
        else:
            person = rng.choice(self.people)
            location = self._person_locations.get(person)
            self._walk(person, rng.choice([room for room in ROOMS if location is None or room != location.room]))

    def list_questions(self, kind: str) -> list[StoryQuestion]:
        """Return all questions of one of `STATE_TASK_NAMES` that the events answer."""
        if kind == "state_3":
            return [
                StoryQuestion(
                    f"According to the text, where was the {thing} before it came to the {location.room}?",
                    previous.room,
                    previous.evidence | location.evidence,
                )
                for thing, history in self._thing_histories.items()
                for previous, location in pairwise(history)
                if [visit.room for visit in history].count(location.room) == 1
            ]
        if kind == "state_2":
            locations = {f"the {thing}": location for thing, location in self._thing_locations.items()}
        else:
            locations = self._person_locations
        return [
            StoryQuestion(f"According to the text, where is {name} in the end?", location.room, location.evidence)
            for name, location in locations.items()
        ]

    def _find_reachable_things(self) -> list[tuple[str, str]]:
        """Return pairs of a person and a thing in reach: one in the same room, or one not picked up yet."""
        return [
            (person, thing)
            for thing in self.things
            if thing not in self._carriers
            for person, location in self._person_locations.items()
            if thing not in self._thing_locations or self._thing_locations[thing].room == location.room
        ]

    def _walk(self, person: str, room: str) -> None:
        event = self._add_event(WALK_SENTENCES, person, room, gold=room)
        self._person_locations[person] = _Location(room, frozenset({event}))
        for thing, (carrier, pick_up) in self._carriers.items():
            if carrier == person:
                self._thing_locations[thing] = _Location(room, frozenset({pick_up, event}))
                self._thing_histories[thing].append(self._thing_locations[thing])

    def _pick_up(self, person: str, thing: str) -> None:
        event = self._add_event(PICK_UP_SENTENCES, person, thing, gold=person)
        self._carriers[thing] = person, event
        self._locate_with(person, thing, event)
        self._thing_histories.setdefault(thing, [self._thing_locations[thing]])

    def _put_down(self, thing: str) -> None:
        person, _ = self._carriers.pop(thing)
        self._locate_with(person, thing, self._add_event(PUT_DOWN_SENTENCES, person, thing, gold=person))

    def _locate_with(self, person: str, thing: str, event: int) -> None:
        location = self._person_locations[person]
        self._thing_locations[thing] = _Location(location.room, location.evidence | {event})

    def _add_event(self, sentence_patterns: Sequence[str], person: str, object_name: str, *, gold: str) -> int:
        """Add an event, if possible with a sentence that the story does not have yet; return its index."""
        sentences = [pattern.format(person=person, object=object_name) for pattern in sentence_patterns]
        unused = [sentence for sentence in sentences if sentence not in self._sentences]
        sentence = self.rng.choice(unused or sentences)
        self._sentences.add(sentence)
        self.events.append(Event(sentence, gold))
        return len(self.events) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTask(GeneratedTask):
    """Questions about where a person or a thing is or was.

    Attributes:
        kind: one of `STATE_TASK_NAMES`.
        facts: the number of sentences in the story.
        people: the number of people in the story.
        things: the number of things that they can carry; 0 in `state_1`.
    """

    shares_documents: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ("facts", "people", "things")
    length_margin: ClassVar[float] = 1.3

    kind: str
    facts: int
    people: int
    things: int

    def __post_init__(self) -> None:
        min_things, max_things = (0, 0) if self.kind == "state_1" else (1, len(THINGS))
        if not (1 <= self.people <= len(PEOPLE) and min_things <= self.things <= max_things):
            raise EvaluationError(
                f"{self.name} cannot have {self.people} people and {self.things} things",
                hint=f"Take 1 to {len(PEOPLE)} people and {min_things} to {max_things} things. By default there are "
                "at least as many of both as questions on a document.",
            )
        if self.facts < 1:
            raise EvaluationError(f"{self.name} cannot have {self.facts} facts", hint="Take 1 or more.")

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the length is too small for the sentences, or they answer too few questions.
        """
        document_index, question_index = divmod(index, self.settings.questions_per_document)
        rng = self.make_sample_rng(length, document_index)
        haystack = haystacks.make_prose_haystack(
            self.settings.haystack, self.make_sample_rng(length, document_index, "prose")
        )
        story, questions = self._draw_story(rng)
        question = questions[question_index]
        depths = sorted(rng.random() for _ in story.events)
        insertions = [
            Insertion(event.sentence, depth, event.gold if event_index in question.evidence else None)
            for event_index, (event, depth) in enumerate(zip(story.events, depths, strict=True))
        ]
        all_questions = [other.question for other in questions]
        return self.lay_out_sample(
            length, index, question.question, (question.answer,), haystack, insertions, all_questions
        )

    def _draw_story(self, rng: random.Random) -> tuple[Story, list[StoryQuestion]]:
        """Return a story, and the questions about it that share the document."""
        question_count = self.settings.questions_per_document
        for _ in range(_MAX_STORY_DRAWS):
            story = Story(rng, rng.sample(PEOPLE, self.people), rng.sample(THINGS, self.things))
            for _ in range(self.facts):
                story.add_random_event()
            questions = story.list_questions(self.kind)
            if len(questions) >= question_count:
                return story, rng.sample(questions, question_count)
        raise EvaluationError(
            f"{self.facts} facts of {self.name} rarely answer {question_count} questions",
            hint="Ask for more facts, people or things, or for fewer questions on a document.",
        )


def make_state_task(name: str, settings: TaskSettings) -> StateTask:
    """Return the task of one of `STATE_TASK_NAMES`."""
    facts, entities = (_SMALL_FACTS, _SMALL_ENTITIES) if settings.small else (_FACTS, _ENTITIES)
    if settings.questions_per_document > 1:
        facts = max(facts, _FACTS_PER_QUESTION * settings.questions_per_document)
        entities = max(entities, settings.questions_per_document)
    return StateTask(
        name=name,
        settings=settings,
        answer_tokens=SMALL_ANSWER_TOKENS if settings.small else _ANSWER_TOKENS,
        kind=name,
        facts=facts,
        people=entities,
        things=0 if name == "state_1" else entities,
    )
