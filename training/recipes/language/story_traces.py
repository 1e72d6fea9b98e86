"""A scripted reader's turns on stories about people who move and carry things (the tasks `state_1` to `state_3`).

Memory is a list of who is where. For a person it is their place ("Ann: attic."). For a thing it also has everybody's
place, because anyone may pick the thing up later: "Ann: attic. Bob: cellar. coin: Bob." is enough to say where it is;
to say where it was before, the list has its places in order, and who has it: "coin: attic, cellar; Bob." It has only
words that the text has, so a reader can check that none is invented.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from typing import Final

from memagent_evaluation.tasks.invented_names import FIRST_NAMES
from memagent_evaluation.tasks.state_tracking import STATES, THINGS, Situation, Story, StoryQuestion
from recipes.embedded.training_examples import Prose, plant
from recipes.language.turns import LessonTurn

_EVENTS: Final = (4, 32)
"""The least and most events of a story."""
_NONE_HERE: Final = 0.25
"""The share of sections in which nothing happens: in a long document they are the most."""
_MOST_HERE: Final = 10
"""The most events of a section."""
_ROOM: Final = 40
"""Characters of prose for each event, at least."""
_ON_SECTION: Final = 0.7
"""The share of turns that see the section; the others answer from memory."""


@dataclass(frozen=True, slots=True)
class _Quest:
    """A question of one of `STATES`, and the notes for it."""

    asked: StoryQuestion
    kind: str

    def notes(self, known: Situation) -> str:
        """Return the memory of a reader who knows a situation."""
        subject = self.asked.subject
        if self.kind == "state_1":
            return f"{subject}: {known.people[subject]}." if subject in known.people else ""
        people = [f"{who}: {place}." for who, place in known.people.items()]
        if subject not in known.things:
            return " ".join(people)
        places, carrier = known.things[subject], known.carriers.get(subject)
        if self.kind == "state_2":
            return " ".join([*people, f"{subject}: {carrier or places[-1]}."])
        visited = ", ".join(places) + (f"; {carrier}" if carrier else "")
        return " ".join([*people, f"{subject}: {visited}."])


def turns_on_story(rng: random.Random, prose: Prose, characters: int, count: int) -> list[LessonTurn]:
    """Different turns, at most `count`: updates on one section of about so many characters, and answers."""
    people = rng.sample(FIRST_NAMES, rng.randint(2, 5))
    story = Story(rng, people, rng.sample(THINGS, rng.randint(2, 5)))
    situations = [story.situation()]
    for _ in islice(story.tell(), rng.randint(*_EVENTS)):
        situations.append(story.situation())
    first, last = _part(rng, len(story.events), characters)
    text = prose.stretch(rng, characters).partition(" ")[2]
    text = plant(rng, text, [event.text for event in story.events[first:last]], in_order=True)
    quests = [_Quest(asked, kind) for kind in STATES for asked in story.questions(kind)]
    kinds = sorted({quest.kind for quest in quests})
    found: dict[tuple[str, str], LessonTurn] = {}
    for _ in range(count):
        kind = rng.choice(kinds)
        quest = rng.choice([each for each in quests if each.kind == kind])
        question = quest.asked.question
        if rng.random() < _ON_SECTION:
            before, after = quest.notes(situations[first]), quest.notes(situations[last])
            fields = {"chunk": text, "memory": before or rng.choice(("", "none"))}
            turn = LessonTurn("update", question, fields, after or "none", writes=before != after)
        else:
            memory = {"memory": quest.notes(situations[-1])}
            turn = LessonTurn("answer", question, memory, f"\\boxed{{{quest.asked.gold}}}", writes=True)
        found.setdefault((turn.role, question), turn)
    return list(found.values())


def _part(rng: random.Random, events: int, characters: int) -> tuple[int, int]:
    """Return the first event of a section, and the one after its last."""
    first = rng.randint(0, events)
    if rng.random() < _NONE_HERE:
        return first, first
    return first, min(events, first + rng.randint(1, max(1, min(_MOST_HERE, characters // _ROOM))))
