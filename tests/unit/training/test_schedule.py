"""Steps of a schedule: each group that teaches something once a pass, and as many steps as are asked for."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_rollouts import make_conversation

from memagent_training.algorithm.advantages import AdvantageSettings
from memagent_training.algorithm.planner import Layout
from memagent_training.algorithm.schedule import Schedule
from memagent_training.data.rollouts import Rollout, RolloutGroup
from memagent_training.training_errors import TrainingError

DROPPING = AdvantageSettings(drop_zero_variance=True)


def make_group(number: int, *rewards: float) -> RolloutGroup:
    turn = make_conversation([1, number], [3], ("answer", "", 0))
    rollouts = (Rollout(f"{number}-{place}", (turn,), reward) for place, reward in enumerate(rewards))
    return RolloutGroup(f"g{number}", tuple(rollouts))


def make_schedule(groups: list[RolloutGroup], **changes: Any) -> Schedule:
    usual = {"groups_per_step": 2, "seed": 0, "layout": Layout.PADDED, "token_budget": 100, "ranks": 1}
    return Schedule(groups, DROPPING, **(usual | changes))  # type: ignore[arg-type]


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_a_pass_of_so_many_steps_has_each_group_that_teaches_something_once(teaches: list[bool], data: Any) -> None:
    groups = [make_group(number, 0.0, float(differs)) for number, differs in enumerate(teaches)]
    useful = {f"g{number}" for number, differs in enumerate(teaches) if differs}
    if not useful:
        with pytest.raises(TrainingError, match=r"0 groups for 1 optimizer steps.*Collect more groups"):
            make_schedule(groups, steps=1)
        return
    assert len(make_schedule(groups).drop_reasons) == len(groups) - len(useful)
    steps = data.draw(st.integers(1, len(useful)))
    of = make_schedule(groups, steps=steps)
    assert of.steps_per_pass == steps
    for which_pass in range(2):
        each_step = [of.get_step(which_pass * steps + place).groups for place in range(steps)]
        assert Counter(one.group_id for one in itertools.chain(*each_step)) == Counter(useful)
        sizes = [len(one) for one in each_step]
        assert max(sizes) - min(sizes) <= 1


def test_without_steps_groups_per_step_decides_and_passes_have_different_orders() -> None:
    groups = [make_group(number, 0.0, 1.0) for number in range(5)]
    assert make_schedule(groups).steps_per_pass == 3
    passes = [make_schedule(groups).split_pass(which) for which in range(2)]
    for steps in passes:
        assert [len(step) for step in steps] == [2, 2, 1], "the rest makes a smaller last step"
        assert Counter(one.group_id for one in itertools.chain(*steps)) == Counter(one.group_id for one in groups)
    assert passes[0] != passes[1]
    assert make_schedule(groups[::-1]).split_pass(0) == passes[0], "the seed decides, and not the order of groups"
    assert make_schedule(groups, seed=1).split_pass(0) != passes[0]
    with pytest.raises(TrainingError, match="2 groups are named g0"):
        make_schedule([groups[0], *groups])
    assert make_schedule(groups, steps=1).steps_per_pass == 1


def test_the_fingerprint_tells_numbers_of_steps_apart() -> None:
    groups = [make_group(number, 0.0, 1.0) for number in range(4)]
    prints = {make_schedule(groups, steps=steps).fingerprint for steps in (1, 3, 4)}
    assert len(prints) == 3
    assert make_schedule(groups, steps=3, groups_per_step=1).fingerprint in prints  # it decides nothing then


def make_rollout(number: int, probability: float, reward: float) -> Rollout:
    turn = make_conversation([1], [3], ("answer", "", 0), logprobs=[math.log(probability)])
    return Rollout(f"{number}", (turn,), reward)


def test_certain_rows_and_rows_without_an_advantage_are_not_forwarded_but_count_in_the_means() -> None:
    """So do rows with an advantage of 0, as that of run 3, and rows with one of 1 are forwarded."""
    probabilities_and_rewards = [(0.9999, 2.0), (0.9, 2.0), (0.5, 0.0), (0.5, 1.0), (0.5, 0.0)]
    rollouts = tuple(make_rollout(number, *pair) for number, pair in enumerate(probabilities_and_rewards))
    groups = [RolloutGroup("g", rollouts)]
    whole = make_schedule(groups, all_rows=False).get_step(0)
    step = make_schedule(groups, all_rows=False, skip_certain=0.001).get_step(0)
    assert [row.run_id for row in whole.rows] == ["0", "1", "2", "4"]
    assert [row.run_id for row in step.rows] == ["1", "2", "4"]
    assert {row.weight for row in step.rows} == {1 / 5}
    assert len(step.batch.rows) == 5


def test_certain_rows_are_skipped_except_one_and_unless_the_loss_has_kl_or_entropy() -> None:
    groups = [RolloutGroup("g", (make_rollout(0, 0.9999, 1.0), make_rollout(1, 0.9998, 0.0)))]
    steps = [make_schedule(groups, all_rows=all_rows, skip_certain=0.01).get_step(0) for all_rows in (False, True)]
    assert [len(step.rows) for step in steps] == [1, 2]
    assert make_schedule(groups, skip_certain=0.01).fingerprint != make_schedule(groups).fingerprint
