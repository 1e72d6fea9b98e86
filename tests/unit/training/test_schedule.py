"""Steps of a schedule have each group with a learning signal once per pass, in the requested number of steps."""

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

DROP_EQUAL_REWARDS = AdvantageSettings(drop_zero_variance=True)


def make_group(number: int, *rewards: float) -> RolloutGroup:
    conversation = make_conversation([1, number], [3], ("answer", "", 0))
    rollouts = (Rollout(f"{number}-{index}", (conversation,), reward) for index, reward in enumerate(rewards))
    return RolloutGroup(f"g{number}", tuple(rollouts))


def make_schedule(groups: list[RolloutGroup], **changes: Any) -> Schedule:
    defaults = {"groups_per_step": 2, "seed": 0, "layout": Layout.PADDED, "token_budget": 100, "ranks": 1}
    return Schedule(groups, DROP_EQUAL_REWARDS, **(defaults | changes))  # type: ignore[arg-type]


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_has_each_group_with_variance_once(has_variance: list[bool], data: Any) -> None:
    groups = [make_group(number, 0.0, float(varies)) for number, varies in enumerate(has_variance)]
    varied_groups = {f"g{number}" for number, varies in enumerate(has_variance) if varies}
    if not varied_groups:
        with pytest.raises(TrainingError, match=r"0 groups for 1 optimizer steps.*Collect more groups"):
            make_schedule(groups, steps=1)
        return
    assert len(make_schedule(groups).batch.drop_reasons) == len(groups) - len(varied_groups)
    steps = data.draw(st.integers(1, len(varied_groups)))
    schedule = make_schedule(groups, steps=steps)
    assert schedule.steps_per_pass == steps
    for pass_number in range(2):
        groups_by_step = [schedule.get_step(pass_number * steps + step).groups for step in range(steps)]
        assert Counter(group.group_id for group in itertools.chain(*groups_by_step)) == Counter(varied_groups)
        step_sizes = [len(group) for group in groups_by_step]
        assert max(step_sizes) - min(step_sizes) <= 1


def test_groups_per_step_sets_the_steps_and_passes_differ_in_order() -> None:
    groups = [make_group(number, 0.0, 1.0) for number in range(5)]
    assert make_schedule(groups).steps_per_pass == 3
    passes = [make_schedule(groups).split_pass(pass_number) for pass_number in range(2)]
    for steps in passes:
        assert [len(step) for step in steps] == [2, 2, 1], "the rest makes a smaller last step"
        assert sorted(group.group_id for group in itertools.chain(*steps)) == [group.group_id for group in groups]
    assert passes[0] != passes[1]
    assert make_schedule(groups[::-1]).split_pass(0) == passes[0], "the seed decides, and not the order of groups"
    assert make_schedule(groups, seed=1).split_pass(0) != passes[0]
    with pytest.raises(TrainingError, match="2 groups are named g0"):
        make_schedule([groups[0], *groups])
    assert make_schedule(groups, steps=1).steps_per_pass == 1


def test_fingerprint_depends_on_the_number_of_steps() -> None:
    groups = [make_group(number, 0.0, 1.0) for number in range(4)]
    fingerprints = {make_schedule(groups, steps=steps).fingerprint for steps in (1, 3, 4)}
    assert len(fingerprints) == 3
    assert make_schedule(groups, steps=3, groups_per_step=1).fingerprint in fingerprints  # it has no effect then


def make_rollout(number: int, probability: float, reward: float) -> Rollout:
    conversation = make_conversation([1], [3], ("answer", "", 0), logprobs=[math.log(probability)])
    return Rollout(f"{number}", (conversation,), reward)


def test_skipped_rows_still_count_in_the_loss_weights() -> None:
    """Run 3 has an advantage of 0, and run 1 one of 1."""
    probabilities_and_rewards = [(0.9999, 2.0), (0.9, 2.0), (0.5, 0.0), (0.5, 1.0), (0.5, 0.0)]
    rollouts = tuple(make_rollout(number, *pair) for number, pair in enumerate(probabilities_and_rewards))
    groups = [RolloutGroup("g", rollouts)]
    unskipped_step = make_schedule(groups, forward_all_rows=False).get_step(0)
    step = make_schedule(groups, forward_all_rows=False, skip_certain=0.001).get_step(0)
    assert [row.run_id for row in unskipped_step.rows] == ["0", "1", "2", "4"]
    assert [row.run_id for row in step.rows] == ["1", "2", "4"]
    assert {row.weight for row in step.rows} == {1 / 5}
    assert len(step.batch.rows) == 5


def test_certain_rows_are_skipped_but_one_unless_all_rows_are_needed() -> None:
    groups = [RolloutGroup("g", (make_rollout(0, 0.9999, 1.0), make_rollout(1, 0.9998, 0.0)))]
    steps = [make_schedule(groups, forward_all_rows=value, skip_certain=0.01).get_step(0) for value in (False, True)]
    assert [len(step.rows) for step in steps] == [1, 2]
    assert make_schedule(groups, skip_certain=0.01).fingerprint != make_schedule(groups).fingerprint
