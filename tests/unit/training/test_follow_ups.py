"""What the policy learns to do after a read: ask for what is missing, and add what was found."""

from __future__ import annotations

import random
import re

import pytest

from memagent_evaluation.english_facts import EnglishFacts
from recipes.language.follow_ups import follow_up
from recipes.language.real_questions import real_questions
from recipes.language.turns import NOT_STATED, LessonTurn

REAL = real_questions("If the file is missing, the daemon writes a new one. Every worker has a queue of its own.")


@pytest.fixture(scope="module")
def follow_ups() -> list[LessonTurn]:
    chance = random.Random(3)
    return [follow_up(chance, EnglishFacts(chance, held_out=False), REAL) for _ in range(600)]


def test_a_sub_question_is_asked_about_somebody_in_memory_and_often_enough_to_be_learned(
    follow_ups: list[LessonTurn],
) -> None:
    decisions = [turn for turn in follow_ups if turn.role == "decompose"]
    asked = [turn for turn in decisions if turn.reply != "ANSWER"]
    assert 0.3 < len(asked) / len(decisions) < 0.8
    for turn in asked:
        question = turn.reply.removeprefix("ASK\n")
        names = [name for name in _names(question) if name in turn.fields["memory"]]
        assert names, turn
        assert not any(name in turn.question for name in names)


def test_what_was_found_is_added_to_memory_and_nothing_is_lost(follow_ups: list[LessonTurn]) -> None:
    joined = [turn for turn in follow_ups if turn.role in {"integrate", "recall_last"}]
    assert {turn.writes for turn in joined} == {True, False}
    for turn in joined:
        memory, found = turn.fields["memory"], turn.fields.get("chunk", turn.fields.get("recalled", ""))
        memory = "" if memory == "none" else memory
        if not (memory or turn.writes):
            assert turn.reply == "none"
            continue
        assert turn.reply.startswith(memory)
        added = turn.reply.removeprefix(memory).strip()
        assert bool(added) == turn.writes
        assert added in found


def test_with_nothing_in_memory_no_sub_question_is_known(follow_ups: list[LessonTurn]) -> None:
    empty = [turn for turn in follow_ups if turn.role == "decompose" and turn.fields["memory"] in {"", "none"}]
    assert empty
    assert {turn.reply for turn in empty} == {"ANSWER"}


def test_a_memory_that_lacks_a_part_does_not_answer(follow_ups: list[LessonTurn]) -> None:
    answers = [turn for turn in follow_ups if turn.role == "answer"]
    assert {turn.writes for turn in answers} == {True, False}
    assert all((turn.reply != f"\\boxed{{{NOT_STATED}}}") == turn.writes for turn in answers)


def _names(question: str) -> list[str]:
    """Names of two words in a question."""
    return re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", question)
