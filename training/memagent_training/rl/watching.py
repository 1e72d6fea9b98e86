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
        """The loop continues from a checkpoint, if there is a complete one; newer ones are incomplete."""

    def begins(self, iteration: int, phase: Phase) -> None:
        """A phase of an iteration begins; the previous one has ended."""

    def serves(self, iteration: int, served: Served) -> None:
        """The weights of an iteration are served."""

    def measured(self, measurement: Measurement) -> None:
        """Held-out questions were read."""

    def collected(self, record: CollectionRecord) -> None:
        """An iteration's groups are ready; also those that an earlier call collected."""

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """An optimizer step is done."""

    def saved(self, step: int) -> None:
        """There is a checkpoint."""

    def ends(self, reason: str) -> None:
        """The loop ended, with the reason."""
