"""Default paths: the per-user folders of the operating system."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def data_folder() -> Path:
    """Return runs and checkpoints: `MEMAGENT_HOME`, or the user's data folder."""
    return Path(os.environ.get("MEMAGENT_HOME") or platformdirs.user_data_dir("memagent"))


def default_store() -> Path:
    """Documents' text."""
    return data_folder() / "documents"


def default_checkpoints() -> Path:
    """Checkpoints of runs."""
    return data_folder() / "checkpoints.sqlite"


def default_run_log() -> Path:
    """Return the log of runs."""
    return data_folder() / "runs.sqlite"
