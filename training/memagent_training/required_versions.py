"""Refuses packages of versions that this code was not written for, before hours are spent."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement

from memagent_training.training_errors import TrainingError


def require_version(requirement: str) -> None:
    """Refuse another version of a package that is installed.

    Args:
        requirement: for example "verl>=0.9,<0.10".

    Raises:
        TrainingError: another one is installed; the hint is the command that installs the right one.
    """
    required = Requirement(requirement)
    try:
        installed = version(required.name)
    except PackageNotFoundError:
        return  # importing it says so
    if not required.specifier.contains(installed, prereleases=True):
        raise TrainingError(
            f"{required.name} {installed} is installed, and this was written for {required.name}{required.specifier}",
            hint=f'Run: pip install "{required.name}{required.specifier}"',
        )
