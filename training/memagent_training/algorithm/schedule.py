"""The groups of each optimizer step of a training run: the same on every rank and after every resume."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memagent_training.algorithm.advantages import (
    AdvantageBatch,
    AdvantageSettings,
    DropReason,
    TrainingRow,
    prepare_batch,
)
from memagent_training.algorithm.planner import Layout, StepPlan, plan_step, split_into_steps
from memagent_training.data.rollouts import RolloutGroup

EQUAL_REWARDS_REMEDY = (
    "Read each question several times, and choose questions that are answered right only sometimes, as those "
    "about longer documents are."
)
"""The remedy for rewards that are all equal."""
_STRIDE = 1_000_003
"""The distance between the seeds of two passes, so that neighbouring seeds share none."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One optimizer step: its rows with their advantages and weights, and how they are distributed."""

    groups: tuple[RolloutGroup, ...] = field(repr=False)
    batch: AdvantageBatch
    rows: tuple[TrainingRow, ...] = field(repr=False)
    """The forwarded rows: the rows of the batch that have a gradient. The plan's indices refer to them."""
    plan: StepPlan


@dataclass
class Schedule:
    """The optimizer steps over some groups, pass after pass, each pass in its own order.

    Args:
        groups: all groups; those without a training signal are dropped before steps are filled.
        settings: how rewards become advantages.
        groups_per_step: groups per step.
        seed: seed of the passes' orders.
        layout: how micro-batches are forwarded.
        token_budget: the maximum number of tokens that a rank forwards at once.
        ranks: processes that train together.
        all_rows: whether rows with an advantage of 0 are forwarded. They count in the means in any case, but if the
            loss has only the policy gradient, without KL and entropy, they have no gradient.
        steps: optimizer steps of a pass, instead of `groups_per_step`.
        skip_certain: if `all_rows` is off, rows whose completion had a probability above 1 minus this at the sampler
            are not forwarded either.

    Raises:
        TrainingError: a reward is not a number, or two groups have the same id.
    """

    groups: Sequence[RolloutGroup]
    settings: AdvantageSettings
    groups_per_step: int
    seed: int
    layout: Layout
    token_budget: int
    ranks: int
    all_rows: bool = True
    steps: int | None = None
    skip_certain: float = 0.0
    batch: AdvantageBatch = field(init=False, repr=False)
    """All groups as if they were one step."""
    kept: tuple[RolloutGroup, ...] = field(init=False)
    dropped: Mapping[str, DropReason] = field(init=False)
    """The dropped groups' ids, each with its reason."""
    _newest: tuple[int, ScheduledStep] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.batch = prepare_batch(self.groups, self.settings)
        self.dropped = self.batch.dropped
        self.kept = tuple(group for group in self.groups if group.group_id not in self.dropped)
        self.pass_order(0)

    @property
    def steps_per_pass(self) -> int:
        """The number of optimizer steps that train on every kept group once."""
        return self.steps or -(-len(self.kept) // self.groups_per_step)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the steps, except what only distributes them (ranks, layout, token
        budget).
        """
        decisive = (self.settings, self.steps or self.groups_per_step, self.seed, self.skip_certain)
        digest = hashlib.sha256(repr((*decisive, *self.settings.credit)).encode())
        for group in sorted(self.kept, key=lambda group: group.group_id):
            for rollout in group.rollouts_G:
                identity = (group.group_id, rollout.run_id, rollout.reward)
                digest.update(repr((*identity, *sorted(rollout.term_rewards.items()))).encode())
                for conversation in rollout.conversations_K:
                    ids = (conversation.prompt_ids_P, conversation.completion_ids_T, conversation.logprobs_T)
                    digest.update(b"|".join(column.tobytes() for column in ids))
                    digest.update(repr((conversation.truncated, conversation.loss_mask_T)).encode())
        return digest.hexdigest()[:32]

    def step(self, number: int) -> ScheduledStep:
        """Return the step of that number, counted from 0 over all passes."""
        if self._newest is None or self._newest[0] != number:
            pass_number, index = divmod(number, self.steps_per_pass)
            self._newest = (number, self._schedule(self.pass_order(pass_number)[index]))
        return self._newest[1]

    def all_groups_step(self) -> ScheduledStep:
        """Return all kept groups as if they were one step: for values that are computed once for every row."""
        return self._schedule(self.kept)

    def pass_order(self, pass_number: int) -> list[tuple[RolloutGroup, ...]]:
        """Return the groups of each step of a pass, counted from 0."""
        return split_into_steps(
            self.kept,
            groups_per_step=self.groups_per_step,
            seed=self.seed + _STRIDE * pass_number,
            steps=self.steps,
        )

    def _schedule(self, groups: Sequence[RolloutGroup]) -> ScheduledStep:
        batch = prepare_batch(groups, self.settings)
        rows = batch.rows
        if not self.all_rows:
            # A step must have something to wait for.
            rows = tuple(row for row in rows if row.advantage != 0 and self._is_uncertain(row)) or rows[:1]
        plan = plan_step(rows, ranks=self.ranks, token_budget=self.token_budget, layout=self.layout)
        return ScheduledStep(tuple(groups), batch, rows, plan)

    def _is_uncertain(self, row: TrainingRow) -> bool:
        return -math.expm1(min(math.fsum(row.conversation.logprobs_T), 0.0)) >= self.skip_certain
