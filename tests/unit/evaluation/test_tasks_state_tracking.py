"""State tracking: a reader of plain code that follows all sentences comes to the answer, and so does the evidence."""

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
    STATES,
    THINGS,
    WALK_SENTENCES,
)
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")
BABI = {
    "mary", "john", "daniel", "sandra", "bathroom", "bedroom", "kitchen", "hallway", "garden", "office", "football",
    "milk", "apple", "moved", "went", "journeyed", "travelled", "back", "took", "grabbed", "got", "picked", "dropped",
    "discarded", "left", "put", "down",
}  # fmt: skip


def compile_patterns(patterns, what):
    who, things = "|".join(PEOPLE), "|".join(what)
    escaped = (
        re.escape(pattern).replace(r"\{person\}", f"({who})").replace(r"\{object\}", f"({things})")
        for pattern in patterns
    )
    return [re.compile(pattern_text) for pattern_text in escaped]


SENTENCES = [
    *(("walk", pattern) for pattern in compile_patterns(WALK_SENTENCES, ROOMS)),
    *(("find", pattern) for pattern in compile_patterns(PICK_UP_SENTENCES, THINGS)),
    *(("part", pattern) for pattern in compile_patterns(PUT_DOWN_SENTENCES, THINGS)),
]


def events(text):
    """What happens in a text, in order."""
    matches = [
        (match.start(), what, *match.groups()) for what, pattern in SENTENCES for match in pattern.finditer(text)
    ]
    return [event[1:] for event in sorted(matches)]


def answer(text, question):
    """What follows from the sentences of a text alone; None where that is nothing."""
    at, carries, been = {}, {}, {}
    for what, who, whom in events(text):
        if what == "walk":
            at[who] = whom
            for thing in (thing for thing, carrier in carries.items() if carrier == who):
                been.setdefault(thing, []).append(whom)
        elif what == "find":
            carries[whom] = who
        else:
            carries.pop(whom, None)
        if what != "walk" and who in at and been.get(whom, [None])[-1] != at[who]:
            been.setdefault(whom, []).append(at[who])
    terms = re.fullmatch(
        r"According to the text, where (?:is|was) (?:the )?(\w+) (?:in the end|before .* (\w+))\?", question
    )
    if terms[1] in PEOPLE:
        return at.get(terms[1])
    places = been.get(terms[1], [])
    if terms[2] is None:
        return places[-1] if places else None
    befores = [before for before, place in pairwise(places) if place == terms[2]]
    return befores[0] if len(befores) == 1 else None


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_the_sentences_have_the_answer_and_so_has_the_evidence_by_itself(name, small):
    task = load_task(name, TaskSettings(TOKENIZER, small=small))
    numbers = set()
    for index in range(8):
        sample = task.sample(1500, index)
        text = "".join(sample.text())
        (gold,) = sample.gold
        assert len(events(text)) == task.facts == (8 if small else 20)
        assert answer(text, sample.question) == gold
        assert answer(" ".join(needle.text for needle in sample.needles), sample.question) == gold
        assert gold in {needle.gold for needle in sample.needles}
        assert gold not in sample.question
        assert all(needle.gold in needle.text for needle in sample.needles)
        assert TOKENIZER.count(sample.question) <= 96
        numbers.add(len(sample.needles))
    assert numbers <= {"state_1": {1}, "state_2": {2}, "state_3": {3, 4}}[name]
    if name != "state_1":
        assert answer(sample.needles[0].text, sample.question) != gold, "one sentence is not enough"


def test_facts_people_and_things_can_be_chosen():
    sample = load_task("state_2:facts=50:people=3:things=5", TaskSettings(TOKENIZER)).sample(2500, 0)
    assert sample.id == "state_2:facts=50:people=3:things=5/2500/0"
    story = events("".join(sample.text()))
    assert len(story) == 50
    assert len({who for _, who, _ in story}) == 3
    assert len({whom for what, _, whom in story if what != "walk"}) <= 5


def test_the_words_are_neither_babis_nor_those_that_other_tasks_plant():
    vocabulary = {
        word.strip(".")
        for sentence in (*WALK_SENTENCES, *PICK_UP_SENTENCES, *PUT_DOWN_SENTENCES)
        for word in sentence.split()
    }
    assert not {*vocabulary, *ROOMS, *THINGS} & (BABI | {*ADJECTIVES, *NOUNS})
    assert not any(one != other and one in other for one in ROOMS for other in ROOMS)
