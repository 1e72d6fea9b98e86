"""Advantages compare rollouts within their group, and loss weights give exactly the chosen mean."""

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

ANSWER_SLOT = ("answer", "", 0)


def make_conversation(tokens=2, slot_key=("update", "", 0), **options):
    return made_rollouts.make_conversation([1, 2, 3], range(tokens), slot_key, **options)


def make_rollout(run_id, reward, lengths=(2, 2), step_rewards=None):
    """Make a rollout of memory updates and a final answer with these lengths."""
    conversations = [make_conversation(tokens, ("update", "", k)) for k, tokens in enumerate(lengths[:-1])]
    term_rewards = {} if step_rewards is None else {"step": step_rewards}
    return Rollout(run_id, (*conversations, make_conversation(lengths[-1], ANSWER_SLOT)), reward, term_rewards)


def make_step_settings(share, **changes):
    """Make settings in which step rewards have this weight, and the outcome the rest."""
    outcome = [] if share == 1 else [{"reward": "outcome", "weight": 1 - share}]
    steps = [{"reward": "step", "weight": share, "scope": "conversation"}]
    return AdvantageSettings(credit=parse_credit_terms([*outcome, *steps]), **changes)


def make_group(*rollouts, name="question"):
    return RolloutGroup(name, tuple(rollouts))


def make_group_of_rewards(*rewards, name="question"):
    return make_group(*(make_rollout(f"{name}-{i}", reward) for i, reward in enumerate(rewards)), name=name)


def get_advantages_by_run(batch):
    return {(row.run_id, row.conversation_index): row.advantage for row in batch.rows}


class TestComparison:
    def test_paper_subtracts_the_mean_without_scaling(self):
        assert compute_advantages([1, 0, 0, 1], PAPER) == [0.5, -0.5, -0.5, 0.5]
        assert compute_advantages([3, 0, 0], PAPER) == [2, -1, -1]

    def test_dapo_divides_by_the_sample_standard_deviation(self):
        std = math.sqrt(1 / 3)  # of 1, 0, 0, 1 with G - 1
        assert compute_advantages([1, 0, 0, 1], DAPO) == pytest.approx([s * 0.5 / (std + 1e-6) for s in (1, -1, -1, 1)])

    def test_leave_one_out_subtracts_the_mean_of_the_other_rollouts(self):
        rewards = [1.0, 0.0, 0.5, 0.25]
        expected = [r - (sum(rewards) - r) / 3 for r in rewards]
        assert compute_advantages(rewards, AdvantageSettings(baseline=Baseline.LEAVE_ONE_OUT)) == pytest.approx(
            expected
        )

    def test_mean_is_over_rollouts_not_conversations(self):
        """A bug of another trainer: over rows, the mean here would be 9/12 and not 1/2."""
        group = make_group(make_rollout("long", 1.0, [2] * 9), make_rollout("short", 0.0, [2] * 3))
        batch = prepare_batch([group], PAPER)
        assert {row.advantage for row in batch.rows if row.run_id == "long"} == {0.5}
        assert {row.advantage for row in batch.rows if row.run_id == "short"} == {-0.5}
        assert len(batch.rows) == 12

    def test_rewards_equal_up_to_rounding_have_no_advantage(self):
        assert compute_advantages([0.1 + 0.2, 0.3], DAPO) == [0, 0]
        assert compute_advantages([0.1] * 3, PAPER) == [0, 0, 0]

    def test_rewards_are_compared_within_a_group(self):
        batch = prepare_batch([make_group_of_rewards(1, 0, name="a"), make_group_of_rewards(5, 3, name="b")], PAPER)
        assert [row.advantage for row in batch.rows] == [0.5, 0.5, -0.5, -0.5, 1, 1, -1, -1]
        assert [(row.group_index, row.rollout_index, row.conversation_index) for row in batch.rows][3:6] == [
            (0, 1, 1),
            (1, 0, 0),
            (1, 0, 1),
        ]


class TestStepRewards:
    HALF = make_step_settings(0.25)

    def test_step_rewards_are_compared_by_position_and_added_to_the_outcome(self):
        """Answers are compared with answers at any index; a step without a counterpart has only the outcome."""
        batch = prepare_batch(
            [make_group(make_rollout("a", 1, [2] * 3, (0.5, 0.9, 1)), make_rollout("b", 0, [2] * 2, (0.5, 0)))],
            self.HALF,
        )
        assert get_advantages_by_run(batch) == pytest.approx(
            {("a", 0): 0.375, ("a", 1): 0.375, ("a", 2): 0.5, ("b", 0): -0.375, ("b", 1): -0.5}
        )

    def test_step_rewards_are_compared_within_role_branch_and_slot(self):
        """The order in which branches were read does not matter; a second answer belongs to another question."""
        slots = [("update", "s0", 0), ("update", "s1", 0), ("merge", "", 0), ("answer", "", 0), ("answer", "", 1)]
        rewards_of_a = dict(zip(slots, (0.1, 0.2, 0.3, 0.4, 0.5), strict=True))
        rewards_of_b = dict(zip([slots[1], slots[0], *slots[2:]], (0.8, 0.3, 0.3, 0.0, 0.1), strict=True))
        rewards_by_run = {"a": rewards_of_a, "b": rewards_of_b, "c": {slots[3]: 0.2}}
        rollouts = [
            Rollout(name, tuple(make_conversation(2, slot) for slot in rewards), 1, {"step": tuple(rewards.values())})
            for name, rewards in rewards_by_run.items()
        ]
        batch = prepare_batch([make_group(*rollouts)], make_step_settings(1))
        advantages = {(row.run_id, row.conversation.slot_key): row.advantage for row in batch.rows}
        for slot in slots:
            slot_rewards = {name: rewards[slot] for name, rewards in rewards_by_run.items() if slot in rewards}
            slot_mean = sum(slot_rewards.values()) / len(slot_rewards)
            expected = {name: reward - slot_mean for name, reward in slot_rewards.items()}
            assert {name: advantages[name, slot] for name in slot_rewards} == pytest.approx(expected)

    def test_step_rewards_keep_a_group_whose_outcomes_are_equal(self):
        mixed_settings = make_step_settings(0.5, drop_zero_variance=True)
        equal_outcomes = make_group(make_rollout("a", 1, [2] * 2, (1, 0)), make_rollout("b", 1, [2] * 2, (0, 0)))
        assert prepare_batch([equal_outcomes], mixed_settings).drop_reasons == {}
        assert prepare_batch([equal_outcomes], AdvantageSettings(drop_zero_variance=True)).drop_reasons
        step_settings = make_step_settings(1, drop_zero_variance=True)
        equal_steps = make_group(make_rollout("a", 1, [2], (0,)), make_rollout("b", 0, [2], (0,)))
        assert find_drop_reason(equal_steps, step_settings) is DropReason.EQUAL_REWARDS

    def test_missing_step_rewards_are_an_error_with_the_run(self):
        with pytest.raises(TrainingError, match=r"run question-0"):
            prepare_batch([make_group_of_rewards(1, 0)], self.HALF)


class TestOverlongPenalty:
    @pytest.mark.parametrize(
        ("length", "penalty"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1), (999, -1)]
    )
    def test_overlong_penalty_grows_over_the_cache_length(self, length, penalty):
        assert OverlongPenalty(100, 20).compute(make_rollout("a", 1, [length])) == pytest.approx(penalty)

    def test_overlong_penalty_counts_the_longest_conversation(self):
        batch = prepare_batch(
            [make_group(make_rollout("wordy", 1, [5, 90, 5]), make_rollout("brief", 0))],
            AdvantageSettings(overlong_penalty=OverlongPenalty(100, 20)),
        )
        assert {row.advantage for row in batch.rows if row.run_id == "wordy"} == {0.25}
        assert batch.penalised_rollouts == 1

    def test_overlong_penalty_does_not_keep_a_group_of_equal_rewards(self):
        batch = prepare_batch([make_group(make_rollout("wordy", 1, [100]), make_rollout("brief", 1, [5]))], DAPO)
        assert batch.drop_reasons == {"question": DropReason.EQUAL_REWARDS}


class TestDroppedGroups:
    def test_groups_without_variance_do_not_count_in_the_denominator(self):
        groups = [make_group_of_rewards(1, 0, name="a"), make_group_of_rewards(1, 1, name="b")]
        dapo_batch, paper_batch = prepare_batch(groups, DAPO), prepare_batch(groups, PAPER)
        assert dapo_batch.drop_reasons == {"b": DropReason.EQUAL_REWARDS}
        assert dapo_batch.learned_tokens == 8
        assert {row.weight for row in dapo_batch.rows} == {1 / 8}
        assert paper_batch.drop_reasons == {}
        assert {row.weight for row in paper_batch.rows} == {1 / 16}
        assert [row.advantage for row in paper_batch.rows][4:] == [0] * 4

    @pytest.mark.parametrize("baseline", Baseline)
    def test_groups_of_one_rollout_are_dropped(self, baseline):
        batch = prepare_batch([make_group_of_rewards(1), make_group(name="none")], AdvantageSettings(baseline=baseline))
        assert batch.rows == prepare_batch([], DAPO).rows == ()
        assert list(batch.drop_reasons.values()) == [DropReason.ALONE] * 2

    def test_groups_with_only_masked_tokens_are_dropped(self):
        masked_rollout = Rollout("a", (make_conversation(2, mask=[False, False]),), 1.0)
        truncated_rollout = Rollout("b", (make_conversation(2, truncated=True),), 0.0)
        batch = prepare_batch([make_group(masked_rollout, truncated_rollout)], AdvantageSettings(mask_truncated=True))
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
        answer = make_conversation(6, slot_key=ANSWER_SLOT, mask=[True] * 4 + [False] * 2)
        rollout_a = Rollout("a", (make_conversation(2), answer), 1.0)
        masked_row = make_conversation(3, mask=[False] * 3)
        rollout_b = Rollout("b", (make_conversation(6), masked_row, make_conversation(6, slot_key=ANSWER_SLOT)), 0.0)
        batch = prepare_batch([make_group(rollout_a, rollout_b)], AdvantageSettings(loss_weights=mean))
        assert [row.weight for row in batch.rows] == weights
        assert [(row.run_id, row.conversation_index) for row in batch.rows] == [("a", 0), ("a", 1), ("b", 0), ("b", 2)]

    def test_masked_truncated_completion_still_counts_with_its_reward(self):
        conversations = (make_conversation(5, truncated=True), make_conversation(3, slot_key=ANSWER_SLOT))
        groups = [make_group(Rollout("a", conversations, 1.0), make_rollout("b", 0.0, [2]))]
        batch = prepare_batch(groups, AdvantageSettings(mask_truncated=True))
        assert get_advantages_by_run(batch) == {("a", 1): 0.5, ("b", 0): -0.5}
        assert {row.weight for row in batch.rows} == {1 / 5}
        assert {row.weight for row in prepare_batch(groups, PAPER).rows} == {1 / 10}


class TestRefusals:
    @pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
    def test_non_finite_reward_error_names_its_run(self, reward):
        step_group = make_group(make_rollout("a", 1, [2], (0.0,)), make_rollout("b", 0, [2], (reward,)))
        with pytest.raises(TrainingError, match="run b"):
            prepare_batch([step_group], make_step_settings(0.5))
        with pytest.raises(TrainingError, match="run question-1") as error:
            prepare_batch([make_group_of_rewards(1, reward)], PAPER)
        assert error.value.run_id == "question-1"

    @pytest.mark.parametrize(
        "make_invalid_settings",
        [lambda: AdvantageSettings(epsilon=0), lambda: OverlongPenalty(100, 101), lambda: OverlongPenalty(100, 0)],
    )
    def test_settings_out_of_range_are_refused(self, make_invalid_settings):
        with pytest.raises(TrainingError, match="must be above 0"):
            make_invalid_settings()


def test_conversations_and_rollouts_of_inconsistent_lengths_are_refused() -> None:
    conversation = make_conversation(2)
    for change in ({"logprobs_T": conversation.logprobs_T[:1]}, {"loss_mask_T": (True,)}):
        with pytest.raises(ValueError, match="each of the 2 completion tokens"):
            replace(conversation, **change)
    rollout = Rollout("r", (conversation,), 1.0)
    for change in ({"conversations_K": ()}, {"term_rewards": {"format": (1.0, 0.0)}}):
        with pytest.raises(ValueError, match="run r must have conversations"):
            replace(rollout, **change)
