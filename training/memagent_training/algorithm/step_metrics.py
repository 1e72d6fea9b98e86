"""Metrics of a step for the training log: of its rollouts, and of its loss as exact means over learned tokens."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Final

import torch
from accelerate import Accelerator
from torch import Tensor

from memagent_graph.grouping import group_values
from memagent_training.algorithm.advantages import AdvantageBatch
from memagent_training.algorithm.loss import TokenLoss
from memagent_training.data.rollouts import RolloutGroup

_PEAK_FLOPS: Final = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations per second by the manufacturer's data, by a part of the device's name."""


@dataclass
class TokenMetrics:
    """Sums over the learned tokens of a step, for a loss with these settings."""

    loss: TokenLoss
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _largest_ratios: list[Tensor] = field(default_factory=list)

    def add(
        self, logprobs_BT: Tensor, old_BT: Tensor, logged_BT: Tensor | None, reference_BT: Tensor | None,
        advantages_BT: Tensor, loss_mask_BT: Tensor, entropies_BT: Tensor,
    ) -> None:  # fmt: skip
        """Add a micro-batch, from the inputs of its loss; `logged_BT` is None if not comparable with the others."""
        loss = self.loss
        ratio_BT = loss.compute_ratio(logprobs_BT, old_BT, loss_mask_BT)
        is_positive_BT, is_negative_BT = advantages_BT > 0, advantages_BT < 0
        token_values = {
            "tokens": loss_mask_BT,
            "entropy": entropies_BT,
            "ratio/mean": ratio_BT,
            "clip_ratio/low_mean": (ratio_BT < 1 - loss.clip_low) & is_negative_BT,
            "clip_ratio/high_mean": (ratio_BT > 1 + loss.clip_high) & is_positive_BT,
        }
        if loss.dual_clip is not None:
            token_values["clip_ratio/dual_mean"] = (ratio_BT > loss.dual_clip) & is_negative_BT
        if reference_BT is not None:
            token_values["kl"] = loss.compute_kl(logprobs_BT, reference_BT)
        if loss.importance_cap is not None and logged_BT is not None:
            token_values["importance/mean"] = loss.compute_importance(old_BT, logged_BT)
            token_values["importance/capped"] = token_values["importance/mean"] >= loss.importance_cap
        for name, value_BT in token_values.items():
            total = torch.where(loss_mask_BT, value_BT.double(), 0.0).sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._largest_ratios.append(torch.where(loss_mask_BT, ratio_BT, 0.0).max())

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """Return means and maxima over all ranks; every rank must call this."""
        names = list(self._sums)
        sums = accelerator.reduce(torch.stack([self._sums[name] for name in names]), reduction="sum")
        largest = accelerator.gather(torch.stack(self._largest_ratios).max()[None])
        totals = dict(zip(names, sums.tolist(), strict=True))
        tokens = totals.pop("tokens")
        return {
            **{name: total / tokens for name, total in totals.items()},
            "ratio/max": float(largest.max()),
        }


def compute_row_metrics(
    groups: Sequence[RolloutGroup], batch: AdvantageBatch, policy_versions: Sequence[str]
) -> dict[str, float]:
    """Return metrics of a step's rewards, lengths and staleness.

    Args:
        groups: the step's groups.
        batch: the rows that are learned.
        policy_versions: all versions, oldest first; the staleness of a conversation is the number of newer versions
            than its own.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    conversations = [conversation for rollout in rollouts for conversation in rollout.conversations_K]
    lengths = [len(conversation.completion_ids_T) for conversation in conversations]
    metrics = {
        "reward": fmean(rollout.reward for rollout in rollouts),
        "reward_std": fmean(
            stdev(rollout.reward for rollout in group.rollouts_G) if len(group.rollouts_G) > 1 else 0.0
            for group in groups
        ),
        "frac_reward_zero_std": fmean(len({rollout.reward for rollout in group.rollouts_G}) == 1 for group in groups),
        "advantage/abs_mean": fmean(abs(row.advantage) for row in batch.rows),
        "rollouts": len(rollouts),
        "conversations": len(conversations),
        "conversations/learned": len(batch.rows),
        "conversations/per_rollout": len(conversations) / len(rollouts),
        "completions/mean_length": fmean(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": fmean(conversation.truncated for conversation in conversations),
        "prompts/mean_length": fmean(len(conversation.prompt_ids_P) for conversation in conversations),
        "tokens/learned": batch.learned_tokens,
        "penalised_fraction": batch.penalised_rollouts / len(rollouts),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.term_rewards}):
        rewards = [reward for rollout in rollouts if (reward := rollout.get_reward(name)) is not None]
        metrics[f"reward/{name}"] = fmean(fmean(reward) if isinstance(reward, tuple) else reward for reward in rewards)
    roles = (conversation.role for conversation in conversations)
    for role, values in sorted(group_values(zip(roles, lengths, strict=True)).items()):
        metrics[f"completions/{role}/mean_length"] = fmean(values)
        metrics[f"completions/{role}/max_length"] = max(values)
    newest_first = list(policy_versions)[::-1]
    versions = (conversation.policy_version for conversation in conversations)
    ages = [newest_first.index(version) for version in versions if version in newest_first]
    if ages:
        metrics["staleness/mean"] = fmean(ages)
        metrics["staleness/max"] = max(ages)
    return metrics


def compute_device_metrics(tokens: int, seconds: float, weights: int, processes: int) -> dict[str, float]:
    """Return the speed of a step, its fraction of the devices' peak speed, and the peak memory of this process.

    Args:
        tokens: the number of forwarded tokens, over all processes.
        seconds: the duration of the step.
        weights: the number of the model's weights.
        processes: the number of processes that train together, with one device each.
    """
    tokens_per_second = tokens / max(seconds, 1e-9)
    metrics = {"train/tokens_per_second": tokens_per_second}
    if not torch.cuda.is_available():
        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return metrics | {"memory/peak_gib": kibibytes / 2**20}
    metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    device_name = torch.cuda.get_device_name()
    peak_flops = next((flops for model, flops in _PEAK_FLOPS.items() if model in device_name), None)
    if peak_flops is not None:
        metrics["mfu"] = 6 * weights * tokens_per_second / (peak_flops * processes)
    return metrics
