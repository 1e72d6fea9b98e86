"""Log-probs under the initial weights of a training run: kept for every row, saved with every checkpoint.

They are the denominator of the clipped loss's ratio, and are compared with the logged log-probs before the first step.
After a resume those weights no longer exist, so the numbers must be on disk.
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
from memagent_training.algorithm.loss import LOG_BOUND
from memagent_training.training_errors import TrainingError

RowKey: TypeAlias = tuple[str, int]
"""A conversation: its run's id and its index in that run."""

FILE_NAME = "multi_conv_dapo.safetensors"


def row_key(row: TrainingRow) -> RowKey:
    """Return the row's conversation."""
    return (row.run_id, row.conversation_index)


@dataclass(frozen=True, slots=True)
class LogProbGap:
    """The difference between the sampler's logged log-probs and the initial weights', over learned tokens, in nats."""

    tokens: int
    mean: float
    """Mean absolute difference."""
    largest: float
    worst_run: str
    """The run with the largest mean difference."""
    worst_mean: float
    metrics: Mapping[str, float]
    """The numbers for the training log, under TRL's names where it has one.

    The ratio of a token is p_old / p_logged: its importance weight without a cap. k1 and k3 estimate the KL divergence
    of the sampler from the initial weights: the mean of log(p_logged / p_old), and Schulman's, which is never negative.
    The effective sample size is (sum of ratios)^2 / sum of their squares, as a fraction of the tokens.
    """

    def __str__(self) -> str:
        return (
            f"logged against recomputed log-probs over {self.tokens:,} tokens: {self.mean:.2g} nats on average, "
            f"{self.largest:.2g} at most; run {self.worst_run} has the most, {self.worst_mean:.2g} on average"
        )


def compare_logprobs(rows: Iterable[TrainingRow], recomputed: Mapping[RowKey, Tensor]) -> LogProbGap | None:
    """Return the gap over the recomputed rows; None if nothing of them is learned."""
    gaps_of: dict[str, list[Tensor]] = {}
    for row in rows:
        if row_key(row) not in recomputed:
            continue
        conversation = row.conversation
        gaps_T = (recomputed[row_key(row)] - torch.tensor(conversation.logprobs_T)).double()
        if conversation.loss_mask_T is not None:
            gaps_T = gaps_T[torch.tensor(conversation.loss_mask_T, dtype=torch.bool)]
        if len(gaps_T):
            gaps_of.setdefault(row.run_id, []).append(gaps_T)
    if not gaps_of:
        return None
    of_run = {run_id: torch.cat(parts) for run_id, parts in gaps_of.items()}
    means = {run_id: float(gaps.abs().mean()) for run_id, gaps in of_run.items()}
    worst = max(sorted(means), key=lambda run_id: means[run_id])
    gaps = torch.cat(list(of_run.values()))
    ratios = gaps.clamp(-LOG_BOUND, LOG_BOUND).exp()
    mean, largest = float(gaps.abs().mean()), float(gaps.abs().max())
    metrics = {
        "sampling/sampling_logp_difference/mean": mean,
        "sampling/sampling_logp_difference/max": largest,
        "sampling/importance_sampling_ratio/min": float(ratios.min()),
        "sampling/importance_sampling_ratio/mean": float(ratios.mean()),
        "sampling/importance_sampling_ratio/max": float(ratios.max()),
        "sampling/kl_k1": float(-gaps.mean()),
        "sampling/kl_k3": float((ratios - 1 - gaps).mean()),
        "sampling/effective_sample_size": float(ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)),
    }
    return LogProbGap(len(gaps), mean, largest, worst, means[worst], metrics)


def save(path: Path, fingerprint: str, recomputed: Mapping[RowKey, Tensor]) -> None:
    """Write the log-probs; the file appears when it is complete. An empty mapping still records the runs."""
    keys = sorted(recomputed)
    tensors = {
        "values": torch.cat([torch.empty(0), *(recomputed[key] for key in keys)]),
        "lengths": torch.tensor([len(recomputed[key]) for key in keys], dtype=torch.int64),
        "indices": torch.tensor([index for _, index in keys], dtype=torch.int64),
    }
    metadata = {"fingerprint": fingerprint, "run_ids": json.dumps([run_id for run_id, _ in keys])}
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata)
    unfinished.replace(path)


def load(path: Path, fingerprint: str) -> dict[RowKey, Tensor]:
    """Read the log-probs back.

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
