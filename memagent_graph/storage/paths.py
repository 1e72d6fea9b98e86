"""Default paths: the per-user folders of the operating system."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def data_folder() -> Path:
    """Return the data folder: `MEMAGENT_HOME`, or the user's data folder of the operating system."""
    return Path(os.environ.get("MEMAGENT_HOME") or platformdirs.user_data_dir("memagent"))


def default_store() -> Path:
    """Return the default folder for texts of documents."""
    return data_folder() / "documents"


def default_checkpoints() -> Path:
    """Return the default file for checkpoints."""
    return data_folder() / "checkpoints.sqlite"


def default_run_log() -> Path:
    """Return the default file for the run log."""
    return data_folder() / "runs.sqlite"
