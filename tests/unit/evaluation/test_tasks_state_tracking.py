"""State tracking: a program that follows all sentences finds the answer, in the text and in the evidence alone."""

import re
from itertools import pairwise

import pytest

from memagent_evaluation.planted_facts import ADJECTIVES, NOUNS
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.state_tracking import (
    PEOPLE,
    PICK_UP_SENTENCES,
    PUT_DOWN_SENTENCES,
    ROOMS,
    STATE_TASK_NAMES,
    THINGS,
    WALK_SENTENCES,
)
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")
BABI_WORDS = {
    "mary", "john", "daniel", "sandra", "bathroom", "bedroom", "kitchen", "hallway", "garden", "office", "football",
    "milk", "apple", "moved", "went", "journeyed", "travelled", "back", "took", "grabbed", "got", "picked", "dropped",
    "discarded", "left", "put", "down",
}  # fmt: skip


def compile_patterns(patterns, targets):
    people_pattern, targets_pattern = "|".join(PEOPLE), "|".join(targets)
    pattern_texts = (
        re.escape(pattern).replace(r"\{person\}", f"({people_pattern})").replace(r"\{object\}", f"({targets_pattern})")
        for pattern in patterns
    )
    return [re.compile(pattern_text) for pattern_text in pattern_texts]


SENTENCE_PATTERNS = [
    *(("walk", pattern) for pattern in compile_patterns(WALK_SENTENCES, ROOMS)),
    *(("find", pattern) for pattern in compile_patterns(PICK_UP_SENTENCES, THINGS)),
    *(("part", pattern) for pattern in compile_patterns(PUT_DOWN_SENTENCES, THINGS)),
]


def find_events(text):
    """Return the events of a text in order: their kind, the person, and the room or object."""
    matches = [
        (match.start(), kind, *match.groups()) for kind, regex in SENTENCE_PATTERNS for match in regex.finditer(text)
    ]
    return [event[1:] for event in sorted(matches)]


def derive_answer(text, question):
    """Return the answer that follows from the sentences of a text, or None."""
    room_of, carriers, thing_rooms = {}, {}, {}
    for kind, person, target in find_events(text):
        if kind == "walk":
            room_of[person] = target
            for thing in (thing for thing, carrier in carriers.items() if carrier == person):
                thing_rooms.setdefault(thing, []).append(target)
        elif kind == "find":
            carriers[target] = person
        else:
            carriers.pop(target, None)
        if kind != "walk" and person in room_of and thing_rooms.get(target, [None])[-1] != room_of[person]:
            thing_rooms.setdefault(target, []).append(room_of[person])
    terms = re.fullmatch(
        r"According to the text, where (?:is|was) (?:the )?(\w+) (?:in the end|before .* (\w+))\?", question
    )
    if terms[1] in PEOPLE:
        return room_of.get(terms[1])
    rooms = thing_rooms.get(terms[1], [])
    if terms[2] is None:
        return rooms[-1] if rooms else None
    previous_rooms = [previous_room for previous_room, room in pairwise(rooms) if room == terms[2]]
    return previous_rooms[0] if len(previous_rooms) == 1 else None


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", STATE_TASK_NAMES)
def test_answer_follows_from_the_text_and_from_the_evidence_alone(name, small):
    task = load_task(name, TaskSettings(TOKENIZER, small=small))
    needle_counts = set()
    for index in range(8):
        sample = task.sample(1500, index)
        text = "".join(sample.text())
        (gold,) = sample.gold
        assert len(find_events(text)) == task.facts == (8 if small else 20)
        assert derive_answer(text, sample.question) == gold
        assert derive_answer(" ".join(needle.text for needle in sample.needles), sample.question) == gold
        assert gold in {needle.gold for needle in sample.needles}
        assert gold not in sample.question
        assert all(needle.gold in needle.text for needle in sample.needles)
        assert TOKENIZER.count(sample.question) <= 96
        needle_counts.add(len(sample.needles))
    assert needle_counts <= {"state_1": {1}, "state_2": {2}, "state_3": {3, 4}}[name]
    if name != "state_1":
        assert derive_answer(sample.needles[0].text, sample.question) != gold, "one sentence is not enough"


def test_options_set_the_number_of_facts_people_and_things():
    sample = load_task("state_2:facts=50:people=3:things=5", TaskSettings(TOKENIZER)).sample(2500, 0)
    assert sample.id == "state_2:facts=50:people=3:things=5/2500/0"
    story_events = find_events("".join(sample.text()))
    assert len(story_events) == 50
    assert len({person for _, person, _ in story_events}) == 3
    assert len({thing for kind, _, thing in story_events if kind != "walk"}) <= 5


def test_words_differ_from_babi_and_from_other_tasks():
    vocabulary = {
        word.strip(".")
        for sentence in (*WALK_SENTENCES, *PICK_UP_SENTENCES, *PUT_DOWN_SENTENCES)
        for word in sentence.split()
    }
    assert not {*vocabulary, *ROOMS, *THINGS} & (BABI_WORDS | {*ADJECTIVES, *NOUNS})
    assert not any(room != other_room and room in other_room for room in ROOMS for other_room in ROOMS)
