"""Advantages and loss weights of conversations, from rewards that are compared within a group of rollouts.

An advantage is a sum of terms (`credit`). Each compares a reward R within a group of G rollouts; the result is the
advantage of each learned token of the conversations that the term credits: all K of a rollout, or only some roles.

    A_ik  = sum over terms of weight * A_term, where the term credits conversation k of rollout i
    A     = R - mean(R), or R - mean of the other R, over a comparison set; optionally divided by std(R) + epsilon

Rewards of runs are compared over rollouts; the overlong penalty is added to the outcome before the comparison. A
conversation's reward is compared with the rewards at the same position (role, branch and slot) of the group's other
rollouts: the k-th memory update with their k-th, an answer with the answers to the same question, a branch's note with
the notes of that branch. A conversation that is alone at its position has an A of 0. std is the sample standard
deviation (G - 1), as in TRL and verl. Without terms, the outcome alone decides the advantage.

The loss of a step is sum(weight * token loss) over its learned tokens, where the weights sum to 1 however the step is
split into micro-batches and over ranks. N rollouts, C conversations and T tokens count only what is learned:

    token_mean         weight = 1 / T of the step                each token weighs the same
    rollout_mean       weight = 1 / (N * T of its rollout)       each rollout weighs the same
    conversation_mean  weight = 1 / (C * T of its conversation)  each conversation weighs the same
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean, stdev

from memagent_training.algorithm.credit import OUTCOME_TERMS, CreditTerm
from memagent_training.data.rollouts import OUTCOME, Rollout, RolloutGroup, TrainingConversation
from memagent_training.training_errors import TrainingError


class Baseline(StrEnum):
    """The value that a rollout's reward is compared with."""

    GROUP_MEAN = "group_mean"
    """The mean of its group, including itself (GRPO, DAPO, MemAgent)."""

    LEAVE_ONE_OUT = "leave_one_out"
    """The mean of the group's other rollouts (RLOO): the advantage is G / (G - 1) times as large as with GROUP_MEAN."""


class LossWeights(StrEnum):
    """The units over which the loss of a step is a mean."""

    TOKEN_MEAN = "token_mean"  # noqa: S105 - not a password
    """The mean over all learned tokens of the step (DAPO)."""

    ROLLOUT_MEAN = "rollout_mean"
    """The mean over rollouts of the mean over each one's learned tokens."""

    CONVERSATION_MEAN = "conversation_mean"
    """The mean over conversations of the mean over each one's learned tokens (as GRPO's mean over sequences)."""


class DropReason(StrEnum):
    """The reasons why a whole group has no training signal."""

    ALONE = "alone"
    """Fewer than two rollouts: nothing to compare with."""

    EQUAL_REWARDS = "equal_rewards"
    """All rollouts have the same reward."""

    NOTHING_LEARNED = "nothing_learned"
    """No completion token is learned: all are masked or belong to truncated completions that are left out."""


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """DAPO's soft penalty: 0 up to `max_length - cache_length` tokens, then falling to -1 at `max_length`."""

    max_length: int
    cache_length: int

    def __post_init__(self) -> None:
        if not 0 < self.cache_length <= self.max_length:
            raise TrainingError(
                f"overlong_cache_length must be above 0 and at most overlong_max_length ({self.max_length}), "
                f"got {self.cache_length}",
                hint="Change one of the two, or set neither.",
            )

    def compute(self, rollout: Rollout) -> float:
        """Return a rollout's penalty, from its longest completion, learned or not."""
        longest = max(len(conversation.completion_ids_T) for conversation in rollout.conversations_K)
        excess = longest - (self.max_length - self.cache_length)
        return -min(max(excess / self.cache_length, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """The settings of advantages and loss weights; the defaults are the released MemAgent recipe's."""

    baseline: Baseline = Baseline.GROUP_MEAN
    divide_by_std: bool = False
    epsilon: float = 1e-6
    """Added to std, so that rewards that hardly differ do not give large advantages."""
    overlong_penalty: OverlongPenalty | None = None
    mask_truncated: bool = False
    """Whether a completion that was cut off is left out of the loss (DAPO's overlong filtering). The rollout's other
    conversations stay, and its reward stays in the group's mean."""
    drop_zero_variance: bool = False
    """Whether groups whose rewards are all equal before penalties are removed from the batch and from every mean."""
    loss_weights: LossWeights = LossWeights.TOKEN_MEAN
    credit: tuple[CreditTerm, ...] = field(default=(), repr=False)
    """The terms of the advantage; if empty, the outcome is the only one."""

    def __post_init__(self) -> None:
        if self.credit and self.overlong_penalty and not any(term.reward == OUTCOME for term in self.credit):
            raise TrainingError(
                "an overlong penalty is part of the outcome, but no credit term is about the outcome",
                hint="Leave the penalty out, or add a term {reward: outcome, weight: 0.2}.",
            )
        if not 0.0 < self.epsilon < math.inf:
            raise TrainingError(
                f"advantage_epsilon must be above 0 and finite, got {self.epsilon}", hint="Set it to 1e-6."
            )

    @property
    def terms(self) -> tuple[CreditTerm, ...]:
        """The terms that are summed."""
        return self.credit or OUTCOME_TERMS


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One row of the loss: a conversation to learn from, whose learned tokens share advantage and weight."""

    conversation: TrainingConversation
    advantage: float
    weight: float
    """The factor of each learned token's loss before the sum over the step."""
    run_id: str
    group_index: int
    """The index of its group among all groups of the step, including dropped ones."""
    rollout_index: int
    conversation_index: int


@dataclass(frozen=True, slots=True)
class AdvantageBatch:
    """The rows of one optimizer step, and their counts. A step without rows is skipped."""

    rows: tuple[TrainingRow, ...] = field(repr=False)
    drop_reasons: Mapping[str, DropReason]
    """The dropped groups' ids, each with its reason."""
    learned_tokens: int
    """Completion tokens to learn from, T."""
    penalised_rollouts: int
    """Rollouts that got an overlong penalty."""


def compute_advantages(rewards_G: Sequence[float], settings: AdvantageSettings) -> list[float]:
    """Return A_i = R_i - baseline, divided by std if set; exact zeros if all rewards are equal.

    The sums are correctly rounded (`fsum`), so the result does not depend on the order of the rollouts.
    """
    size = len(rewards_G)
    if _are_equal(rewards_G):
        return [0.0] * size
    mean = fmean(rewards_G)
    scale = size / (size - 1) if settings.baseline is Baseline.LEAVE_ONE_OUT else 1.0
    if settings.divide_by_std:
        scale /= stdev(rewards_G) + settings.epsilon
    return [(reward - mean) * scale for reward in rewards_G]


def find_drop_reason(group: RolloutGroup, settings: AdvantageSettings) -> DropReason | None:
    """Return why a group has no training signal; None if it has one."""
    if len(group.rollouts_G) < 2:
        return DropReason.ALONE
    if not any(
        _count_learned_tokens(conversation, settings)
        for rollout in group.rollouts_G
        for conversation in rollout.conversations_K
    ):
        return DropReason.NOTHING_LEARNED
    if settings.drop_zero_variance:
        comparison_sets = (peers for term in settings.terms for peers in term.make_comparison_sets(group))
        if all(_are_equal([credited.reward for credited in peers]) for peers in comparison_sets):
            return DropReason.EQUAL_REWARDS
    return None


def prepare_batch(groups: Sequence[RolloutGroup], settings: AdvantageSettings) -> AdvantageBatch:
    """Return the rows of one optimizer step over these groups, with advantages and loss weights.

    Args:
        groups: all groups of the step, over all ranks: the weights' denominators are counted only here.
        settings: how rewards become advantages and weights.

    Raises:
        TrainingError: a reward is not a finite number, or step rewards are needed and a run has none.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    for rollout in rollouts:
        for term in (*OUTCOME_TERMS, *settings.terms):  # the outcome is reported even if no term uses it
            term.require_reward(rollout)
    drop_reasons: dict[str, DropReason] = {}
    rows_and_tokens: list[tuple[TrainingRow, int]] = []
    for group_index, group in enumerate(groups):
        reason = find_drop_reason(group, settings)
        if reason is not None:
            drop_reasons[group.group_id] = reason
            continue
        advantages_GK = _compute_conversation_advantages(group, settings)
        for rollout_index, (rollout, advantages_K) in enumerate(zip(group.rollouts_G, advantages_GK, strict=True)):
            pairs = zip(rollout.conversations_K, advantages_K, strict=True)
            for conversation_index, (conversation, advantage) in enumerate(pairs):
                tokens = _count_learned_tokens(conversation, settings)
                indices = (group_index, rollout_index, conversation_index)
                if tokens:
                    rows_and_tokens.append(
                        (TrainingRow(conversation, advantage, 0.0, rollout.run_id, *indices), tokens)
                    )
    penalty = settings.overlong_penalty
    return AdvantageBatch(
        rows=_set_weights(rows_and_tokens, settings.loss_weights),
        drop_reasons=drop_reasons,
        learned_tokens=sum(tokens for _, tokens in rows_and_tokens),
        penalised_rollouts=sum(penalty.compute(rollout) < 0 for rollout in rollouts) if penalty is not None else 0,
    )


def _compute_conversation_advantages(group: RolloutGroup, settings: AdvantageSettings) -> list[list[float]]:
    """Return A_ik, for the G rollouts and the K conversations of each."""
    advantages_GK = [[0.0] * len(rollout.conversations_K) for rollout in group.rollouts_G]
    for term in settings.terms:
        term_settings = settings if term.divide_by_std is None else replace(settings, divide_by_std=term.divide_by_std)
        penalty = settings.overlong_penalty if term.reward == OUTCOME else None
        for peers in term.make_comparison_sets(group):
            rewards = [credited.reward for credited in peers]
            if penalty is not None:
                penalties = [penalty.compute(group.rollouts_G[credited.rollout]) for credited in peers]
                rewards = list(map(sum, zip(rewards, penalties, strict=True)))
            for credited, advantage in zip(peers, compute_advantages(rewards, term_settings), strict=True):
                for conversation in credited.conversations:
                    advantages_GK[credited.rollout][conversation] += term.weight * advantage
    return advantages_GK


def _set_weights(rows_and_tokens: Sequence[tuple[TrainingRow, int]], mean_over: LossWeights) -> tuple[TrainingRow, ...]:
    """Return the rows with the weights of the chosen mean, from each row's number of learned tokens."""
    rollout_tokens: Counter[tuple[int, int]] = Counter()
    for row, tokens in rows_and_tokens:
        rollout_tokens[_make_rollout_key(row)] += tokens
    step_tokens = rollout_tokens.total()

    def compute_weight(row: TrainingRow, tokens: int) -> float:
        match mean_over:
            case LossWeights.TOKEN_MEAN:
                return 1 / step_tokens
            case LossWeights.ROLLOUT_MEAN:
                return 1 / (len(rollout_tokens) * rollout_tokens[_make_rollout_key(row)])
            case LossWeights.CONVERSATION_MEAN:
                return 1 / (len(rows_and_tokens) * tokens)

    return tuple(replace(row, weight=compute_weight(row, tokens)) for row, tokens in rows_and_tokens)


def _make_rollout_key(row: TrainingRow) -> tuple[int, int]:
    return row.group_index, row.rollout_index


def _count_learned_tokens(conversation: TrainingConversation, settings: AdvantageSettings) -> int:
    return 0 if settings.mask_truncated and conversation.truncated else conversation.learned_tokens


def _are_equal(rewards: Sequence[float]) -> bool:
    """Return whether rewards are the same except for rounding, such as 0.1 + 0.2 and 0.3."""
    return len(rewards) < 2 or math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)
