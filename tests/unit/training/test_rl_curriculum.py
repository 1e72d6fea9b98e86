"""Questions of a loop depend on where it is and nothing else, none is asked twice, and documents only grow longer."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.evaluation import MadeTask
from support.rl_loops import make_record

from memagent_training.rl.curriculum import HELD_OUT_START, MAX_COLLECTIONS, QUESTIONS_PER_COLLECTION, Curriculum
from memagent_training.rl.loop_journal import CollectionRecord, MeanReward
from memagent_training.training_errors import TrainingError

LENGTHS = (500, 1000, 2000)
COLLECTION = st.integers(0, MAX_COLLECTIONS - 1)
STAGE = st.integers(0, len(LENGTHS) - 1)


TASKS = [MadeTask(name, lambda *_: ("What is it?", "it", "nothing")) for name in ("one", "other")]


def curriculum(seed: int = 0, advance_at: float = 0.8) -> Curriculum:
    return Curriculum(TASKS, LENGTHS, advance_at, seed)


def draw(of: Curriculum, collection: int, stage: int, count: int = 40) -> list[str]:
    return [question.id for question in islice(of.draw_questions(collection, stage), count)]


# Questions


@given(st.integers(), COLLECTION, STAGE)
def test_questions_depend_on_seed_collection_and_place_alone(seed: int, collection: int, stage: int) -> None:
    """However many were taken before, and whoever else asked."""
    one, again = curriculum(seed), curriculum(seed)
    draw(again, (collection + 1) % MAX_COLLECTIONS, stage)
    draw(again, collection, stage, 3)
    assert draw(one, collection, stage) == draw(again, collection, stage)


def test_other_seeds_and_other_collections_ask_otherwise() -> None:
    lengths_and_tasks = {
        tuple(
            (question.length, question.task.name)
            for question in islice(curriculum(seed).draw_questions(collection, 2), 40)
        )
        for seed in range(3)
        for collection in range(3)
    }
    assert len(lengths_and_tasks) == 9


@given(st.lists(COLLECTION, min_size=2, max_size=5, unique=True), STAGE)
def test_no_question_is_asked_twice_and_none_that_is_measured_with(collections: list[int], stage: int) -> None:
    of = curriculum()
    indices = [question.index for number in collections for question in islice(of.draw_questions(number, stage), 40)]
    assert len(set(indices)) == len(indices)
    assert 0 <= min(indices) <= max(indices) < HELD_OUT_START


def test_the_last_collection_ends_where_held_out_questions_begin_and_there_is_none_after_it() -> None:
    assert next(curriculum().draw_questions(MAX_COLLECTIONS - 1, 0)).index + QUESTIONS_PER_COLLECTION == HELD_OUT_START
    with pytest.raises(TrainingError, match=r"collection 10,000 is out of range.*another loop"):
        next(curriculum().draw_questions(MAX_COLLECTIONS, 0))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_half_of_the_questions_at_least_have_the_longest_length(stage: int) -> None:
    """Half by themselves, and the others' share of it: lengths of the other half are drawn evenly."""
    lengths = [question.length for question in islice(curriculum().draw_questions(7, stage), 4000)]
    unlocked = LENGTHS[: stage + 1]
    assert set(lengths) == set(unlocked)
    expected = 0.5 + 0.5 / len(unlocked)
    assert lengths.count(unlocked[-1]) / len(lengths) == pytest.approx(expected, abs=0.03)
    for shorter in unlocked[:-1]:
        assert lengths.count(shorter) / len(lengths) == pytest.approx(0.5 / len(unlocked), abs=0.03)


def test_tasks_are_asked_equally_often() -> None:
    tasks = [question.task.name for question in islice(curriculum().draw_questions(0, 0), 2000)]
    assert tasks.count("one") / len(tasks) == pytest.approx(0.5, abs=0.04)


# Stages

REWARD = st.floats(0, 1)
REWARDS = st.lists(st.dictionaries(st.sampled_from(LENGTHS), REWARD, max_size=3), max_size=30)


@given(REWARDS, REWARD)
def test_stages_go_on_by_one_when_the_longest_length_earned_enough_and_never_back(
    rewards: list[dict[int, float]], advance_at: float
) -> None:
    """And follow from the journal alone, in which each collection has the stage that it was asked at."""
    of = curriculum(advance_at=advance_at)
    records: list[CollectionRecord] = []
    stages = [of.find_stage(records)]
    for number, by_length in enumerate(rewards):
        means = {length: MeanReward(value, 8) for length, value in by_length.items()}
        records.append(make_record(number, stage=stages[-1], by_length=means))
        stages.append(of.find_stage(records))
    assert stages[0] == 0
    for by_length, (before, after) in zip(rewards, pairwise(stages), strict=True):
        is_enough = by_length.get(LENGTHS[before], -1.0) >= advance_at
        assert after == min(before + is_enough, len(LENGTHS) - 1)


def test_a_collection_of_an_earlier_stage_ends_none() -> None:
    """Rollouts one version behind were asked before the stage began."""
    of = curriculum()
    enough = {500: MeanReward(0.9, 8), 1000: MeanReward(0.9, 8)}
    assert of.find_stage([make_record(0, stage=0, by_length=enough), make_record(1, stage=0, by_length=enough)]) == 1
