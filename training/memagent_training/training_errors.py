"""The errors of training, below the package's own error classes.

MemAgentError
└── TrainingError               training cannot begin or continue
    ├── ReplayError                 logged runs that cannot be made into groups to train on
    ├── RewardError                 a reward function that gave no usable number
    └── SyncError                   weights that did not get into a server in one way; another may work
"""

from __future__ import annotations

from memagent_graph.errors import MemAgentError


class TrainingError(MemAgentError):
    """Training cannot begin or continue."""


class ReplayError(TrainingError):
    """Logged runs that cannot be made into groups to train on: no source, or a mixture that needs a choice."""


class RewardError(TrainingError):
    """A reward function gave no usable number, or its answers to compare with cannot be read."""


class SyncError(TrainingError):
    """One way of loading weights into a server failed; another may work."""
