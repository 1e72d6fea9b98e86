"""Advantages: rollouts compared within their group, and loss weights that make exactly the chosen mean."""

import math
from dataclasses import replace

import made_rollouts
import pytest

from memagent_training.algorithm.advantages import (
    AdvantageSettings,
    Baseline,
    DropReason,
    LossWeights,
    OverlongPenalty,
    compute_advantages,
    find_drop_reason,
    prepare_batch,
)
from memagent_training.algorithm.credit import parse_credit_terms
from memagent_training.data.rollouts import Rollout, RolloutGroup
from memagent_training.training_errors import TrainingError

PAPER = AdvantageSettings()
DAPO = AdvantageSettings(
    divide_by_std=True, drop_zero_variance=True, overlong_penalty=OverlongPenalty(max_length=100, cache_length=20)
)

ANSWER = ("answer", "", 0)


def conversation(tokens=2, at=("update", "", 0), **more):
    return made_rollouts.make_conversation([1, 2, 3], range(tokens), at, **more)


def rollout(run_id, reward, lengths=(2, 2), steps=None):
    """Memory updates of these lengths, of which the last is the answer."""
    conversations = [conversation(tokens, ("update", "", k)) for k, tokens in enumerate(lengths[:-1])]
    terms = {} if steps is None else {"step": steps}
    return Rollout(run_id, (*conversations, conversation(lengths[-1], ANSWER)), reward, terms)


def with_steps(share, **changes):
    """The settings in which a conversation's own reward is this share of its advantage."""
    outcome = [] if share == 1 else [{"reward": "outcome", "weight": 1 - share}]
    steps = [{"reward": "step", "weight": share, "scope": "conversation"}]
    return AdvantageSettings(credit=parse_credit_terms([*outcome, *steps]), **changes)


def group(*rollouts, name="question"):
    return RolloutGroup(name, tuple(rollouts))


def group_of(*rewards, name="question"):
    return group(*(rollout(f"{name}-{i}", reward) for i, reward in enumerate(rewards)), name=name)


def by_run(batch):
    return {(row.run_id, row.conversation_index): row.advantage for row in batch.rows}


class TestComparison:
    def test_the_paper_subtracts_the_mean_and_divides_by_nothing(self):
        assert compute_advantages([1, 0, 0, 1], PAPER) == [0.5, -0.5, -0.5, 0.5]
        assert compute_advantages([3, 0, 0], PAPER) == [2, -1, -1]

    def test_dapo_divides_by_the_sample_standard_deviation(self):
        std = math.sqrt(1 / 3)  # of 1, 0, 0, 1 with G - 1
        assert compute_advantages([1, 0, 0, 1], DAPO) == pytest.approx([s * 0.5 / (std + 1e-6) for s in (1, -1, -1, 1)])

    def test_leave_one_out_compares_with_the_mean_of_the_others(self):
        rewards = [1.0, 0.0, 0.5, 0.25]
        expected = [r - (sum(rewards) - r) / 3 for r in rewards]
        assert compute_advantages(rewards, AdvantageSettings(baseline=Baseline.LEAVE_ONE_OUT)) == pytest.approx(
            expected
        )

    def test_the_mean_is_over_rollouts_however_many_conversations_each_has(self):
        """A rival's bug: over rows, the mean here would be 9/12 and not 1/2."""
        batch = prepare_batch([group(rollout("long", 1.0, [2] * 9), rollout("short", 0.0, [2] * 3))], PAPER)
        assert {row.advantage for row in batch.rows if row.run_id == "long"} == {0.5}
        assert {row.advantage for row in batch.rows if row.run_id == "short"} == {-0.5}
        assert len(batch.rows) == 12

    def test_rewards_that_are_equal_but_for_rounding_are_equal(self):
        assert compute_advantages([0.1 + 0.2, 0.3], DAPO) == [0, 0]
        assert compute_advantages([0.1] * 3, PAPER) == [0, 0, 0]

    def test_rewards_are_compared_within_a_group(self):
        batch = prepare_batch([group_of(1, 0, name="a"), group_of(5, 3, name="b")], PAPER)
        assert [row.advantage for row in batch.rows] == [0.5, 0.5, -0.5, -0.5, 1, 1, -1, -1]
        assert [(row.group_index, row.rollout_index, row.conversation_index) for row in batch.rows][3:6] == [
            (0, 1, 1),
            (1, 0, 0),
            (1, 0, 1),
        ]


class TestStepRewards:
    HALF = with_steps(0.25)

    def test_step_rewards_are_compared_at_the_same_position_and_mixed_with_the_outcome(self):
        """Answers are compared with answers at any index; without a counterpart, the outcome alone counts."""
        batch = prepare_batch(
            [group(rollout("a", 1, [2] * 3, (0.5, 0.9, 1.0)), rollout("b", 0, [2] * 2, (0.5, 0.0)))], self.HALF
        )
        assert by_run(batch) == pytest.approx(
            {("a", 0): 0.375, ("a", 1): 0.375, ("a", 2): 0.5, ("b", 0): -0.375, ("b", 1): -0.5}
        )

    def test_step_rewards_are_compared_within_role_and_branch_where_a_run_fans_out(self):
        """Whatever the order in which branches were read; a second answer is another question's."""
        places = [("update", "s0", 0), ("update", "s1", 0), ("merge", "", 0), ("answer", "", 0), ("answer", "", 1)]
        one = dict(zip(places, (0.1, 0.2, 0.3, 0.4, 0.5), strict=True))
        other = dict(zip([places[1], places[0], *places[2:]], (0.8, 0.3, 0.3, 0.0, 0.1), strict=True))
        runs = {"a": one, "b": other, "c": {places[3]: 0.2}}
        one_group = group(*(Rollout(name, tuple(conversation(2, at) for at in of), 1, {"step": (*of.values(),)})
                       for name, of in runs.items()))  # fmt: skip
        batch = prepare_batch([one_group], with_steps(1))
        advantages = {(row.run_id, row.conversation.slot_key): row.advantage for row in batch.rows}
        for at in places:
            there = {name: of[at] for name, of in runs.items() if at in of}
            mean = sum(there.values()) / len(there)
            assert [advantages[name, at] for name in there] == pytest.approx([item - mean for item in there.values()])

    def test_step_rewards_keep_a_group_whose_outcomes_are_equal(self):
        mixed = with_steps(0.5, drop_zero_variance=True)
        same_outcome = group(rollout("a", 1, [2] * 2, (1, 0)), rollout("b", 1, [2] * 2, (0, 0)))
        assert prepare_batch([same_outcome], mixed).drop_reasons == {}
        assert prepare_batch([same_outcome], AdvantageSettings(drop_zero_variance=True)).drop_reasons
        only_steps = with_steps(1, drop_zero_variance=True)
        other_outcome = group(rollout("a", 1, [2], (0,)), rollout("b", 0, [2], (0,)))
        assert find_drop_reason(other_outcome, only_steps) is DropReason.EQUAL_REWARDS

    def test_missing_step_rewards_are_an_error_with_the_run(self):
        with pytest.raises(TrainingError, match=r"run question-0"):
            prepare_batch([group_of(1, 0)], self.HALF)


class TestOverlongPenalty:
    @pytest.mark.parametrize(
        ("length", "penalty"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1), (999, -1)]
    )
    def test_overlong_penalty_grows_over_the_cache_length(self, length, penalty):
        assert OverlongPenalty(100, 20).compute(rollout("a", 1, [length])) == pytest.approx(penalty)

    def test_overlong_penalty_counts_the_longest_conversation(self):
        batch = prepare_batch(
            [group(rollout("wordy", 1, [5, 90, 5]), rollout("brief", 0))],
            AdvantageSettings(overlong_penalty=OverlongPenalty(100, 20)),
        )
        assert {row.advantage for row in batch.rows if row.run_id == "wordy"} == {0.25}
        assert batch.penalised_rollouts == 1

    def test_overlong_penalty_does_not_keep_a_group_of_equal_rewards(self):
        batch = prepare_batch([group(rollout("wordy", 1, [100]), rollout("brief", 1, [5]))], DAPO)
        assert batch.drop_reasons == {"question": DropReason.EQUAL_REWARDS}


class TestDroppedGroups:
    def test_groups_without_variance_do_not_count_in_the_denominator(self):
        groups = [group_of(1, 0, name="a"), group_of(1, 1, name="b")]
        dapo, paper = prepare_batch(groups, DAPO), prepare_batch(groups, PAPER)
        assert dapo.drop_reasons == {"b": DropReason.EQUAL_REWARDS}
        assert dapo.learned_tokens == 8
        assert {row.weight for row in dapo.rows} == {1 / 8}
        assert paper.drop_reasons == {}
        assert {row.weight for row in paper.rows} == {1 / 16}
        assert [row.advantage for row in paper.rows][4:] == [0] * 4

    @pytest.mark.parametrize("baseline", Baseline)
    def test_groups_of_one_rollout_are_dropped(self, baseline):
        batch = prepare_batch([group_of(1), group(name="none")], AdvantageSettings(baseline=baseline))
        assert batch.rows == prepare_batch([], DAPO).rows == ()
        assert list(batch.drop_reasons.values()) == [DropReason.ALONE] * 2

    def test_groups_with_only_masked_tokens_are_dropped(self):
        silent = Rollout("a", (conversation(2, mask=[False, False]),), 1.0)
        cut = Rollout("b", (conversation(2, truncated=True),), 0.0)
        batch = prepare_batch([group(silent, cut)], AdvantageSettings(mask_truncated=True))
        assert batch.drop_reasons == {"question": DropReason.NOTHING_LEARNED}
        assert batch.rows == ()


class TestLossWeights:
    @pytest.mark.parametrize(
        ("mean", "weights"),
        [
            (LossWeights.TOKEN_MEAN, [1 / 18, 1 / 18, 1 / 18, 1 / 18]),
            (LossWeights.ROLLOUT_MEAN, [1 / 12, 1 / 12, 1 / 24, 1 / 24]),
            (LossWeights.CONVERSATION_MEAN, [1 / 8, 1 / 16, 1 / 24, 1 / 24]),
        ],
    )
    def test_loss_weights_make_the_chosen_mean(self, mean, weights):
        """One rollout of 2 + 4 learned tokens and one of 6 + 0 + 6: T = 18, N = 2, C = 4."""
        first = Rollout("a", (conversation(2), conversation(6, at=ANSWER, mask=[True] * 4 + [False] * 2)), 1.0)
        silent = conversation(3, mask=[False] * 3)
        second = Rollout("b", (conversation(6), silent, conversation(6, at=ANSWER)), 0.0)
        batch = prepare_batch([group(first, second)], AdvantageSettings(loss_weights=mean))
        assert [row.weight for row in batch.rows] == weights
        assert [(row.run_id, row.conversation_index) for row in batch.rows] == [("a", 0), ("a", 1), ("b", 0), ("b", 2)]

    def test_a_truncated_completion_is_left_out_if_wanted_but_its_reward_still_counts(self):
        cut = Rollout("a", (conversation(5, truncated=True), conversation(3, at=ANSWER)), 1.0)
        groups = [group(cut, rollout("b", 0.0, [2]))]
        batch = prepare_batch(groups, AdvantageSettings(mask_truncated=True))
        assert by_run(batch) == {("a", 1): 0.5, ("b", 0): -0.5}
        assert {row.weight for row in batch.rows} == {1 / 5}
        assert {row.weight for row in prepare_batch(groups, PAPER).rows} == {1 / 10}


class TestRefusals:
    @pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
    def test_a_reward_that_is_no_number_names_its_run(self, reward):
        steps = group(rollout("a", 1, [2], (0.0,)), rollout("b", 0, [2], (reward,)))
        with pytest.raises(TrainingError, match="run b"):
            prepare_batch([steps], with_steps(0.5))
        with pytest.raises(TrainingError, match="run question-1") as refusal:
            prepare_batch([group_of(1, reward)], PAPER)
        assert refusal.value.run_id == "question-1"

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda: AdvantageSettings(epsilon=0),
            lambda: OverlongPenalty(100, 101),
            lambda: OverlongPenalty(100, 0),
        ],
    )
    def test_settings_out_of_range(self, wrong):
        with pytest.raises(TrainingError, match="must be above 0"):
            wrong()


def test_conversations_and_rollouts_whose_lengths_differ_are_refused() -> None:
    turn = conversation(2)
    for change in ({"logprobs_T": turn.logprobs_T[:1]}, {"loss_mask_T": (True,)}):
        with pytest.raises(ValueError, match="each of the 2 completion tokens"):
            replace(turn, **change)
    rollout = Rollout("r", (turn,), 1.0)
    for change in ({"conversations_K": ()}, {"term_rewards": {"format": (1.0, 0.0)}}):
        with pytest.raises(ValueError, match="run r must have conversations"):
            replace(rollout, **change)
