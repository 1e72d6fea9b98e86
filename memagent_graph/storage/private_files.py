"""Private files: documents, questions and answers can be opened only by their owner.

New files are created like this (0600 in folders of 0700). The user's data folder, and files in it, that an older
version made readable for all are closed, with a warning in the log. An existing file elsewhere, and a folder that
MEMAGENT_HOME names, keep their mode: someone chose it.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Final

from memagent_graph.storage.paths import data_folder, is_data_folder_chosen

log = logging.getLogger(__name__)

_OF_OTHERS: Final = 0o077
_BESIDE: Final = ("", "-wal", "-shm")
"""SQLite's files next to a database, which get its mode when they are created."""


def private_folder(folder: Path) -> None:
    """Create a folder, and missing folders above it, for their owner only.

    Raises:
        OSError: it cannot be created.
    """
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    if not is_data_folder_chosen():
        _close_to_others(data_folder())


def private_file(path: Path) -> None:
    """Create a file for its owner only, if it does not exist; SQLite would create one that everyone may read.

    Raises:
        OSError: it, or its folder, cannot be created.
    """
    private_folder(path.parent)
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
    if path.parent == data_folder():
        for suffix in _BESIDE:
            _close_to_others(path.with_name(path.name + suffix))


def _close_to_others(path: Path) -> None:
    """Remove the permissions of everyone but the owner from a file or folder, if it is ours."""
    if not hasattr(os, "getuid"):
        return
    try:
        found = path.stat()
        if found.st_uid == os.getuid() and found.st_mode & _OF_OTHERS:
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OF_OTHERS)
            log.warning("%s was readable by other users; now only its owner can open it", path)
    except OSError:
        return  # it does not exist yet, or the file system has no modes
