"""What a swap of weights promises and reports, whoever does it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from memagent_training.training_errors import TrainingError


class How(Enum):
    """The way by which weights come into a server."""

    ADAPTER = "adapter"
    """Adapters beside the served weights. Readers of older ones continue undisturbed."""
    RELOAD = "reload"
    """Whole weights, in place. Requests wait for a moment."""
    RESTART = "restart"
    """A new server process under the same address. Requests in flight fail."""


class SyncError(TrainingError):
    """One way of bringing weights into a server failed; another may not."""


@dataclass(frozen=True, slots=True)
class Served:
    """Weights that a server answers with, verified."""

    model: str
    """The name to ask the server for."""
    version: str
    """What conversations are to carry as their policy's version."""
    how: How
    seconds: float
    """Of the whole swap, verification included."""
    gap: float
    """The largest difference between the server's log-probs of the probe and the trainer's."""
    reasons: tuple[str, ...] = ()
    """Why the ways before this one were not taken, one sentence each."""
