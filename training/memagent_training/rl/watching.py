"""What a loop reports while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from memagent_training.rl.loop_journal import CollectionRecord, Measurement
from memagent_training.serving.policy_sync import Served


class Phase(StrEnum):
    """What a loop spends its time on."""

    SYNC = "sync"
    """Weights are written, and brought into the server."""
    MEASURE = "measure"
    COLLECT = "collect"
    """Questions are read; with rollouts one version behind, only what is still waited for."""
    TRAIN = "train"


class Watcher:
    """Told of a loop's progress; by itself it ignores everything. Calls come from the thread that trains, but for
    `measured`.
    """

    def resumes(self, checkpoint: Path | None, passed_over: Sequence[Path]) -> None:
        """The loop continues from a checkpoint, if there is a whole one; newer ones were not written to their end."""

    def begins(self, iteration: int, phase: Phase) -> None:
        """A phase of an iteration begins; the one before has ended."""

    def serves(self, iteration: int, served: Served) -> None:
        """The weights of an iteration are served."""

    def measured(self, measurement: Measurement) -> None:
        """Held-out questions were read."""

    def collected(self, record: CollectionRecord) -> None:
        """An iteration's groups are there; also what an earlier call had collected."""

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """An optimizer step was taken."""

    def saved(self, step: int) -> None:
        """There is a checkpoint."""

    def ends(self, reason: str) -> None:
        """The loop ended, for what reason."""
