"""Default paths: the per-user folders of the operating system."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def data_folder() -> Path:
    """Return the folder for everything that is kept: `MEMAGENT_HOME`, or the user's data folder."""
    return Path(os.environ.get("MEMAGENT_HOME") or platformdirs.user_data_dir("memagent"))


def default_store() -> Path:
    """Return the folder of documents' texts."""
    return data_folder() / "documents"


def default_checkpoints() -> Path:
    """Return the file with the checkpoints of runs."""
    return data_folder() / "checkpoints.sqlite"


def default_run_log() -> Path:
    """Return the file with the log of runs."""
    return data_folder() / "runs.sqlite"
