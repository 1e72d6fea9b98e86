"""A collapse of the reward is detected, and a fall because of longer documents is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rl_loops import make_record

from memagent_training.rl.collector import CollapsedError, refuse_collapse
from memagent_training.rl.loop_journal import CollectionRecord, MeanReward

REWARDS = st.lists(st.floats(0, 1), max_size=20)
WINDOW = st.integers(1, 5)


def make_records(*rewards: float, stages: Sequence[int] = ()) -> list[CollectionRecord]:
    stages = stages or [0] * len(rewards)
    return [
        make_record(number, stage=stage, by_length={500: MeanReward(reward, 8)})
        for number, (reward, stage) in enumerate(zip(rewards, stages, strict=True))
    ]


def has_collapsed(records: Sequence[CollectionRecord], window: int) -> bool:
    try:
        refuse_collapse(records, window)
    except CollapsedError:
        return True
    return False


def test_fall_below_half_the_best_average_is_an_error_with_both_values() -> None:
    with pytest.raises(CollapsedError, match=r"last 2 collections is 0\.200, and it was 0\.700.*learning rate"):
        refuse_collapse(make_records(0.6, 0.8, 0.3, 0.1), window=2)


def test_negative_rewards_are_not_a_collapse() -> None:
    """With penalties, for example, a mean that rises from -0.8 to -0.2 is no collapse."""
    assert not has_collapsed(make_records(-0.8, -0.8, -0.5, -0.2), window=2)
    assert not has_collapsed(make_records(-0.2, -0.2, -0.2, -0.2), window=2)
    assert has_collapsed(make_records(0.5, 0.5, -0.5, -0.5), window=2)


def test_stages_are_compared_separately() -> None:
    rewards, stages = [0.9] * 4 + [0.2] * 4, [0] * 4 + [1] * 4
    assert not has_collapsed(make_records(*rewards, stages=stages), window=2)
    assert has_collapsed(make_records(*rewards), window=2)
    assert has_collapsed(make_records(*rewards, 0.05, 0.05, stages=[*stages, 1, 1]), window=2)


@given(REWARDS, WINDOW)
def test_no_collapse_is_reported_before_a_second_window(rewards: list[float], window: int) -> None:
    assert not has_collapsed(make_records(*rewards[:window]), window=window)


@given(st.lists(st.floats(0.01, 1), min_size=6, max_size=20), WINDOW)
def test_collapse_is_newest_average_below_half_the_best(rewards: list[float], window: int) -> None:
    averages = [sum(rewards[end - window : end]) / window for end in range(window, len(rewards) + 1)]
    ratio = averages[-1] / max(averages)
    if not math.isclose(ratio, 0.5, rel_tol=1e-6):
        assert has_collapsed(make_records(*rewards), window=window) == (ratio < 0.5)
