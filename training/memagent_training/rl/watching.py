"""The reports of a loop while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from memagent_training.rl.loop_journal import CollectionRecord, Measurement
from memagent_training.serving.policy_sync import Served


class Phase(StrEnum):
    """The phases of a loop."""

    SYNC = "sync"
    """Weights are written, and loaded into the server."""
    MEASURE = "measure"
    COLLECT = "collect"
    """Questions are read; with rollouts one version behind, only the remaining wait."""
    TRAIN = "train"


class Watcher:
    """Gets a loop's progress; this base class ignores everything. Calls come from the training thread, except
    `measured`.
    """

    def resumes(self, checkpoint: Path | None, passed_over: Sequence[Path]) -> None:
        """Take note of the checkpoint that the loop continues from; newer ones are incomplete."""

    def begins(self, iteration: int, phase: Phase) -> None:
        """Take note that a phase of an iteration begins, and the previous one has ended."""

    def serves(self, iteration: int, served: Served) -> None:
        """Take note that the weights of an iteration are served."""

    def measured(self, measurement: Measurement) -> None:
        """Held-out questions were read."""

    def collected(self, record: CollectionRecord) -> None:
        """Take note of an iteration's groups, also of those that an earlier call collected."""

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of an optimizer step."""

    def saved(self, step: int) -> None:
        """There is a checkpoint."""

    def ends(self, reason: str) -> None:
        """Take note that the loop ended, and why."""
