"""Makes rollouts for the tests of this folder, and compares models and logs."""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import multi_conv_dapo
import torch

from memagent_training.algorithm.advantages import AdvantageSettings, Baseline
from memagent_training.data.rollouts import RolloutGroup, TrainingConversation


def make_conversation(
    prompt: Sequence[int],
    completion: Sequence[int],
    slot_key: tuple[str, str, int] = ("update", "", 0),
    *,
    logprobs: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
    truncated: bool = False,
    version: str = "v1",
) -> TrainingConversation:
    """Return a conversation, by default with log-probs of -1; `slot_key` is role, branch and slot."""
    logprobs = [-1.0] * len(completion) if logprobs is None else logprobs
    ids = (array("I", tokens) for tokens in (prompt, completion))
    return TrainingConversation(*ids, array("f", logprobs), *slot_key, truncated, version, mask)


def make_example_settings(settings: AdvantageSettings, **options: Any) -> multi_conv_dapo.Settings:
    """Convert the package's advantage settings to settings of the example, with further options."""
    penalty = settings.overlong_penalty
    return multi_conv_dapo.Settings(
        divide_by_std=settings.divide_by_std,
        epsilon=settings.epsilon,
        terms=tuple(
            multi_conv_dapo.Term(
                term.reward, term.weight, term.scope.value, term.of or "*", term.roles or ("*",), term.divide_by_std
            )
            for term in settings.terms
        ),
        leave_one_out=settings.baseline is Baseline.LEAVE_ONE_OUT,
        overlong=None if penalty is None else (penalty.max_length, penalty.cache_length),
        drop_zero_variance=settings.drop_zero_variance,
        mask_truncated=settings.mask_truncated,
        loss_weights=settings.loss_weights.value,
        **options,
    )


def copy_weights(model: Any) -> dict[str, Any]:
    """Return a copy of a model's weights, by name."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def find_changes(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the names of the weights that differ in any bit."""
    assert before.keys() == after.keys()
    return {name for name, weight in before.items() if not torch.equal(weight, after[name])}


def read_logs(trainer: Any, *, without: Container[str] = ()) -> list[dict[str, float]]:
    """Return the metrics that a trainer logged for its steps, without some of them."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{name: value for name, value in entry.items() if name not in without} for entry in steps]


MACHINE_METRICS = {"step_time", "train/tokens_per_second", "memory/peak_gib", "mfu"}
"""Metrics that differ between two trainings of the same bits."""


def edit_rollout(groups: Sequence[RolloutGroup], *, reward: float | None = None, **changes: Any) -> list[RolloutGroup]:
    """Return the groups with changes to the first conversation of the first rollout, or to its reward."""
    first_group = groups[0]
    rollout = first_group.rollouts_G[0]
    conversation = replace(rollout.conversations_K[0], **changes)
    rollout = replace(
        rollout,
        conversations_K=(conversation, *rollout.conversations_K[1:]),
        reward=rollout.reward if reward is None else reward,
    )
    return [replace(first_group, rollouts_G=(rollout, *first_group.rollouts_G[1:])), *groups[1:]]
