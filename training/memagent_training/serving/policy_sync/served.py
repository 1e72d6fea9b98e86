"""The result and the errors of a swap of weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from memagent_training.training_errors import TrainingError


class How(Enum):
    """A way of loading weights into a server."""

    ADAPTER = "adapter"
    """Adapters next to the served weights. Readers of older ones are not affected."""
    RELOAD = "reload"
    """Whole weights, in place. Requests wait for a moment."""
    RESTART = "restart"
    """A new server process under the same address. Requests in flight fail."""


class SyncError(TrainingError):
    """One way of loading weights into a server failed; another may work."""


@dataclass(frozen=True, slots=True)
class Served:
    """Weights that a server answers with, verified."""

    model: str
    """The model name for requests."""
    version: str
    """The policy version for conversations."""
    how: How
    seconds: float
    """Seconds of the whole swap, including verification."""
    gap: float
    """The largest difference between the server's log-probs of the probe and the trainer's."""
    reasons: tuple[str, ...] = ()
    """Why earlier ways were not used, one sentence each."""
