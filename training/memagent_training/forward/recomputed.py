"""Log-probs under the initial weights of a training: kept for every row, saved with every checkpoint.

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
from memagent_training.training_errors import TrainingError

RowKey: TypeAlias = tuple[str, int]
"""A conversation: its run's id and its place there."""

FILE_NAME = "multi_conv_dapo.safetensors"


def key_of(row: TrainingRow) -> RowKey:
    """Return the row's conversation."""
    return (row.run_id, row.conversation_index)


@dataclass(frozen=True, slots=True)
class LogProbGap:
    """The difference between logged and recomputed log-probs, over learned tokens, in nats."""

    tokens: int
    mean: float
    """Mean absolute difference."""
    largest: float
    worst_run: str
    """The run with the largest mean difference."""
    worst_mean: float

    def __str__(self) -> str:
        return (
            f"logged against recomputed log-probs over {self.tokens:,} tokens: {self.mean:.2g} nats on average, "
            f"{self.largest:.2g} at most; run {self.worst_run} has the most, {self.worst_mean:.2g} on average"
        )


def gap_between(rows: Iterable[TrainingRow], recomputed: Mapping[RowKey, Tensor]) -> LogProbGap | None:
    """Return the gap over the recomputed rows; None if there are none."""
    totals: dict[str, tuple[float, int]] = {}
    largest = 0.0
    for row in rows:
        if key_of(row) not in recomputed:
            continue
        conversation = row.conversation
        gaps_T = (torch.tensor(conversation.logprobs_T) - recomputed[key_of(row)]).abs().double()
        if conversation.loss_mask_T is not None:
            gaps_T = gaps_T[torch.tensor(conversation.loss_mask_T)]
        total, count = totals.get(row.run_id, (0.0, 0))
        totals[row.run_id] = (total + float(gaps_T.sum()), count + len(gaps_T))
        largest = max(largest, float(gaps_T.max()))
    if not totals:
        return None
    tokens = sum(count for _, count in totals.values())
    mean = sum(total for total, _ in totals.values()) / tokens
    means = {run_id: total / count for run_id, (total, count) in totals.items()}
    worst = max(sorted(means), key=lambda run_id: means[run_id])
    return LogProbGap(tokens, mean, largest, worst, means[worst])


def save(path: Path, fingerprint: str, recomputed: Mapping[RowKey, Tensor]) -> None:
    """Write them; the file appears when it is complete. An empty mapping still records the training's runs."""
    keys = sorted(recomputed)
    tensors = {
        "values": torch.cat([torch.empty(0), *(recomputed[key] for key in keys)]),
        "lengths": torch.tensor([len(recomputed[key]) for key in keys], dtype=torch.int64),
        "places": torch.tensor([place for _, place in keys], dtype=torch.int64),
    }
    metadata = {"fingerprint": fingerprint, "run_ids": json.dumps([run_id for run_id, _ in keys])}
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata)
    unfinished.replace(path)


def load(path: Path, fingerprint: str) -> dict[RowKey, Tensor]:
    """Read them back.

    Raises:
        TrainingError: there is no such file, it is damaged, or it belongs to other runs or settings.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            values, lengths, places = (file.get_tensor(name) for name in ("values", "lengths", "places"))
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
    keys = zip(run_ids, places.tolist(), strict=False)
    return dict(zip(keys, torch.split(values, lengths.tolist()), strict=False))
