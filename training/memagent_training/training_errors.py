"""The errors of training, below the package's own error classes, and the check of the packages that it runs on.

MemAgentError
└── TrainingError               training cannot begin or continue
    ├── ReplayError                 logged runs that cannot become groups for training
    ├── RewardError                 a reward function gave no usable number
    └── SyncError                   a server could not load weights in one way; another may work
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement

from memagent_graph.errors import MemAgentError


class TrainingError(MemAgentError):
    """Training cannot begin or continue."""


class ReplayError(TrainingError):
    """Logged runs cannot become groups for training: there are none, or a mixture needs a choice."""


class RewardError(TrainingError):
    """A reward function gave no usable number, or its gold answers cannot be read."""


class SyncError(TrainingError):
    """One way of loading weights into a server failed; another may work."""


def require_version(requirement: str) -> None:
    """Check the version of a package, if it is installed, at the start instead of hours into a run.

    Args:
        requirement: for example "verl>=0.9,<0.10".

    Raises:
        TrainingError: another one is installed; the hint is the command that installs the right one.
    """
    required = Requirement(requirement)
    try:
        installed = version(required.name)
    except PackageNotFoundError:
        return  # its import fails with a message
    if not required.specifier.contains(installed, prereleases=True):
        raise TrainingError(
            f"{required.name} {installed} is installed, and this was written for {required.name}{required.specifier}",
            hint=f'Run: pip install "{required.name}{required.specifier}"',
        )
