"""Schedules the groups of each optimizer step: the same on every rank and after every resume."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from memagent_training.algorithm.advantages import AdvantageBatch, AdvantageSettings, TrainingRow, prepare_batch
from memagent_training.algorithm.planner import Layout, StepPlan, plan_step, split_into_steps
from memagent_training.data.rollouts import RolloutGroup

EQUAL_REWARDS_REMEDY = (
    "Read each question several times, and choose questions that are answered right only sometimes, as those "
    "about longer documents are."
)
"""The remedy for rewards that are all equal."""
_SEED_STRIDE = 1_000_003
"""The difference between the seeds of two passes, so that training runs with neighbouring seeds share no order."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One optimizer step: its rows with their advantages and weights, and their distribution over ranks."""

    groups: tuple[RolloutGroup, ...] = field(repr=False)
    batch: AdvantageBatch
    rows: tuple[TrainingRow, ...] = field(repr=False)
    """The forwarded rows: the rows of the batch that have a gradient. The plan's indices refer to them."""
    plan: StepPlan


@dataclass
class Schedule:
    """The optimizer steps over some groups, pass after pass, each pass in its own order.

    Args:
        groups: all groups; those without a training signal are dropped before the others are split into steps.
        settings: the settings of advantages and loss weights.
        groups_per_step: the number of groups in a step.
        seed: determines the order of groups in each pass.
        layout: the layout in which micro-batches are forwarded.
        token_budget: the maximum number of tokens that a rank forwards at once.
        ranks: processes that train together.
        forward_all_rows: whether rows with an advantage of 0 are forwarded. They always count in the means, but have no
            gradient if the loss has only the policy gradient, without KL and entropy.
        steps: the number of optimizer steps in a pass, instead of `groups_per_step`.
        skip_certain: if `forward_all_rows` is false, rows whose completion had a probability above 1 minus this value
            at the sampler are not forwarded either.

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
    forward_all_rows: bool = True
    steps: int | None = None
    skip_certain: float = 0.0
    batch: AdvantageBatch = field(init=False, repr=False)
    """All groups as if they were one step."""
    kept_groups: tuple[RolloutGroup, ...] = field(init=False)
    _last_step: tuple[int, ScheduledStep] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.batch = prepare_batch(self.groups, self.settings)
        self.kept_groups = tuple(group for group in self.groups if group.group_id not in self.batch.drop_reasons)
        self.split_pass(0)

    @property
    def steps_per_pass(self) -> int:
        """The number of optimizer steps that train on every kept group once."""
        return self.steps or -(-len(self.kept_groups) // self.groups_per_step)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines the steps, without their distribution (ranks, layout, token budget)."""
        decisive = (self.settings, self.steps or self.groups_per_step, self.seed, self.skip_certain)
        digest = hashlib.sha256(repr((*decisive, *self.settings.credit)).encode())
        for group in sorted(self.kept_groups, key=lambda group: group.group_id):
            for rollout in group.rollouts_G:
                identity = (group.group_id, rollout.run_id, rollout.reward)
                digest.update(repr((*identity, *sorted(rollout.term_rewards.items()))).encode())
                for conversation in rollout.conversations_K:
                    ids = (conversation.prompt_ids_P, conversation.completion_ids_T, conversation.logprobs_T)
                    digest.update(b"|".join(column.tobytes() for column in ids))
                    digest.update(repr((conversation.truncated, conversation.loss_mask_T)).encode())
        return digest.hexdigest()[:32]

    def get_step(self, step_index: int) -> ScheduledStep:
        """Return the step with this index, counted from 0 over all passes."""
        if self._last_step is None or self._last_step[0] != step_index:
            pass_index, index_in_pass = divmod(step_index, self.steps_per_pass)
            self._last_step = (step_index, self.plan_groups(self.split_pass(pass_index)[index_in_pass]))
        return self._last_step[1]

    def split_pass(self, pass_index: int) -> list[tuple[RolloutGroup, ...]]:
        """Return the groups of each step of a pass; passes are counted from 0."""
        return split_into_steps(
            self.kept_groups,
            groups_per_step=self.groups_per_step,
            seed=self.seed + _SEED_STRIDE * pass_index,
            steps=self.steps,
        )

    def plan_groups(self, groups: Sequence[RolloutGroup]) -> ScheduledStep:
        """Return a step over these groups."""
        batch = prepare_batch(groups, self.settings)
        rows = batch.rows
        if not self.forward_all_rows:
            # Every rank must forward something.
            rows = tuple(row for row in rows if row.advantage != 0 and self._is_uncertain(row)) or rows[:1]
        plan = plan_step(rows, ranks=self.ranks, token_budget=self.token_budget, layout=self.layout)
        return ScheduledStep(tuple(groups), batch, rows, plan)

    def _is_uncertain(self, row: TrainingRow) -> bool:
        return -math.expm1(min(math.fsum(row.conversation.logprobs_T), 0.0)) >= self.skip_certain
