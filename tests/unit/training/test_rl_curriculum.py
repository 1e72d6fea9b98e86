"""Questions of a loop are reproducible and never repeated, and documents only become longer."""

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


def make_curriculum(seed: int = 0, advance_at: float = 0.8) -> Curriculum:
    return Curriculum(TASKS, LENGTHS, advance_at, seed)


def draw_ids(curriculum: Curriculum, collection: int, stage: int, count: int = 40) -> list[str]:
    return [question.id for question in islice(curriculum.draw_questions(collection, stage), count)]


# Questions


@given(st.integers(), COLLECTION, STAGE)
def test_questions_depend_only_on_seed_collection_and_stage(seed: int, collection: int, stage: int) -> None:
    """They do not depend on earlier draws."""
    curriculum, used_curriculum = make_curriculum(seed), make_curriculum(seed)
    draw_ids(used_curriculum, (collection + 1) % MAX_COLLECTIONS, stage)
    draw_ids(used_curriculum, collection, stage, 3)
    assert draw_ids(curriculum, collection, stage) == draw_ids(used_curriculum, collection, stage)


def test_other_seeds_and_collections_draw_other_questions() -> None:
    lengths_and_tasks = {
        tuple(
            (question.length, question.task.name)
            for question in islice(make_curriculum(seed).draw_questions(collection, 2), 40)
        )
        for seed in range(3)
        for collection in range(3)
    }
    assert len(lengths_and_tasks) == 9


@given(st.lists(COLLECTION, min_size=2, max_size=5, unique=True), STAGE)
def test_questions_are_never_repeated_or_held_out(collections: list[int], stage: int) -> None:
    curriculum = make_curriculum()
    draws = [islice(curriculum.draw_questions(collection, stage), 40) for collection in collections]
    indices = [question.index for draw in draws for question in draw]
    assert len(set(indices)) == len(indices)
    assert 0 <= min(indices) <= max(indices) < HELD_OUT_START


def test_last_collection_ends_where_held_out_questions_begin() -> None:
    first_question = next(make_curriculum().draw_questions(MAX_COLLECTIONS - 1, 0))
    assert first_question.index + QUESTIONS_PER_COLLECTION == HELD_OUT_START
    with pytest.raises(TrainingError, match=r"collection 10,000 is out of range.*another loop"):
        next(make_curriculum().draw_questions(MAX_COLLECTIONS, 0))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_at_least_half_of_the_questions_have_the_longest_length(stage: int) -> None:
    """One half has the longest length; the lengths of the other half are drawn evenly."""
    lengths = [question.length for question in islice(make_curriculum().draw_questions(7, stage), 4000)]
    stage_lengths = LENGTHS[: stage + 1]
    assert set(lengths) == set(stage_lengths)
    expected_share = 0.5 + 0.5 / len(stage_lengths)
    assert lengths.count(stage_lengths[-1]) / len(lengths) == pytest.approx(expected_share, abs=0.03)
    for shorter in stage_lengths[:-1]:
        assert lengths.count(shorter) / len(lengths) == pytest.approx(0.5 / len(stage_lengths), abs=0.03)


def test_tasks_are_asked_equally_often() -> None:
    tasks = [question.task.name for question in islice(make_curriculum().draw_questions(0, 0), 2000)]
    assert tasks.count("one") / len(tasks) == pytest.approx(0.5, abs=0.04)


# Stages

REWARD = st.floats(0, 1)
REWARDS = st.lists(st.dictionaries(st.sampled_from(LENGTHS), REWARD, max_size=3), max_size=30)


@given(REWARDS, REWARD)
def test_stage_increases_by_one_when_the_longest_length_earned_enough(
    rewards: list[dict[int, float]], advance_at: float
) -> None:
    """They follow from the journal alone, which has the stage of each collection."""
    curriculum = make_curriculum(advance_at=advance_at)
    records: list[CollectionRecord] = []
    stages = [curriculum.find_stage(records)]
    for number, by_length in enumerate(rewards):
        means = {length: MeanReward(value, 8) for length, value in by_length.items()}
        records.append(make_record(number, stage=stages[-1], by_length=means))
        stages.append(curriculum.find_stage(records))
    assert stages[0] == 0
    for by_length, (stage, next_stage) in zip(rewards, pairwise(stages), strict=True):
        is_enough = by_length.get(LENGTHS[stage], -1.0) >= advance_at
        assert next_stage == min(stage + is_enough, len(LENGTHS) - 1)


def test_collection_of_an_earlier_stage_does_not_advance_the_stage() -> None:
    """Rollouts one version behind were sampled before the stage began."""
    curriculum = make_curriculum()
    enough = {500: MeanReward(0.9, 8), 1000: MeanReward(0.9, 8)}
    assert curriculum.find_stage([make_record(number, stage=0, by_length=enough) for number in range(2)]) == 1
