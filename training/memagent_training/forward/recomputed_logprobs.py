"""Log-probs of all rows under the initial weights of a training run, saved with every checkpoint.

They are the denominator of the clipped loss's ratio, and are compared with the logged log-probs before the first step.
After a resume the initial weights no longer exist, so the log-probs must be on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from memagent_training.algorithm.advantages import TrainingRow
from memagent_training.algorithm.loss import LOG_RATIO_BOUND
from memagent_training.training_errors import TrainingError

RowKey: TypeAlias = tuple[str, int]
"""A conversation: its run's id and its index in that run."""

FILE_NAME = "multi_conv_dapo.safetensors"


def make_row_key(row: TrainingRow) -> RowKey:
    """Return the key of the row's conversation."""
    return (row.run_id, row.conversation_index)


@dataclass(frozen=True, slots=True)
class LogProbGap:
    """The difference between logged log-probs and those of the initial weights, over learned tokens, in nats."""

    tokens: int
    mean: float
    """Mean absolute difference."""
    largest: float
    worst_run: str
    """The run with the largest mean difference."""
    worst_mean: float
    metrics: Mapping[str, float]
    """The metrics for the training log, under TRL's names if there are any.

    The ratio of a token is p_old / p_logged: its importance weight without a cap. k1 and k3 estimate the KL divergence
    of the sampler from the initial weights: the mean of log(p_logged / p_old), and Schulman's, which is never negative.
    The effective sample size is (sum of ratios)^2 / sum of their squares, as a fraction of the tokens.
    """

    def __str__(self) -> str:
        return (
            f"logged against recomputed log-probs over {self.tokens:,} tokens: {self.mean:.2g} nats on average, "
            f"{self.largest:.2g} at most; run {self.worst_run} has the most, {self.worst_mean:.2g} on average"
        )


def compare_logprobs(rows: Iterable[TrainingRow], recomputed_logprobs: Mapping[RowKey, Tensor]) -> LogProbGap | None:
    """Return the gap over the recomputed rows; None if none of their tokens is learned."""
    gaps_by_run: dict[str, list[Tensor]] = {}
    for row in rows:
        if make_row_key(row) not in recomputed_logprobs:
            continue
        conversation = row.conversation
        gaps_T = (recomputed_logprobs[make_row_key(row)] - torch.tensor(conversation.logprobs_T)).double()
        if conversation.loss_mask_T is not None:
            gaps_T = gaps_T[torch.tensor(conversation.loss_mask_T, dtype=torch.bool)]
        if len(gaps_T):
            gaps_by_run.setdefault(row.run_id, []).append(gaps_T)
    if not gaps_by_run:
        return None
    means = {run_id: float(torch.cat(run_gaps).abs().mean()) for run_id, run_gaps in gaps_by_run.items()}
    worst_run = max(sorted(means), key=lambda run_id: means[run_id])
    all_gaps = torch.cat([gaps_T for run_gaps in gaps_by_run.values() for gaps_T in run_gaps])
    ratios = all_gaps.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    mean_gap, max_gap = float(all_gaps.abs().mean()), float(all_gaps.abs().max())
    metrics = {
        "sampling/sampling_logp_difference/mean": mean_gap,
        "sampling/sampling_logp_difference/max": max_gap,
        "sampling/importance_sampling_ratio/min": float(ratios.min()),
        "sampling/importance_sampling_ratio/mean": float(ratios.mean()),
        "sampling/importance_sampling_ratio/max": float(ratios.max()),
        "sampling/kl_k1": float(-all_gaps.mean()),
        "sampling/kl_k3": float((ratios - 1 - all_gaps).mean()),
        "sampling/effective_sample_size": float(ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)),
    }
    return LogProbGap(len(all_gaps), mean_gap, max_gap, worst_run, means[worst_run], metrics)


def save(path: Path, fingerprint: str, recomputed_logprobs: Mapping[RowKey, Tensor]) -> None:
    """Write the log-probs; the file appears when it is complete, and always records the fingerprint of the runs."""
    keys = sorted(recomputed_logprobs)
    tensors = {
        "values": torch.cat([torch.empty(0), *(recomputed_logprobs[key] for key in keys)]),
        "lengths": torch.tensor([len(recomputed_logprobs[key]) for key in keys], dtype=torch.int64),
        "indices": torch.tensor([index for _, index in keys], dtype=torch.int64),
    }
    metadata = {"fingerprint": fingerprint, "run_ids": json.dumps([run_id for run_id, _ in keys])}
    unfinished_path = path.with_suffix(".unfinished")
    save_file(tensors, unfinished_path, metadata)
    unfinished_path.replace(path)


def load(path: Path, fingerprint: str) -> dict[RowKey, Tensor]:
    """Read the log-probs.

    Raises:
        TrainingError: there is no such file, it is damaged, or it belongs to other runs or settings.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            values, lengths, indices = (file.get_tensor(name) for name in ("values", "lengths", "indices"))
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{path.parent} is not a complete checkpoint of this training: {error}",
            hint="Resume from an earlier checkpoint, or begin again in another output folder.",
        ) from error
    if metadata.get("fingerprint") != fingerprint:
        raise TrainingError(
            f"{path.parent} was trained on other runs, rewards or settings",
            hint="Resume with the same ones, or begin again in another output folder.",
        )
    run_ids = json.loads(metadata.get("run_ids", "[]"))
    keys = zip(run_ids, indices.tolist(), strict=False)
    return dict(zip(keys, torch.split(values, lengths.tolist()), strict=False))
