"""Files that hold what people read and ask: only their owner may open them.

New ones are made so (0600 in folders of 0700). What an earlier version made in the data folder for all to read is
closed to others, with a warning in the log. A file elsewhere that is there already keeps its mode: someone chose it.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Final

from memagent_graph.storage.paths import data_folder

log = logging.getLogger(__name__)

_OF_OTHERS: Final = 0o077
_BESIDE: Final = ("", "-wal", "-shm")
"""SQLite's files beside a database, which take its mode when they are made."""


def private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner alone.

    Raises:
        OSError: it cannot be made.
    """
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    _close_to_others(data_folder())


def private_file(path: Path) -> None:
    """Make a file for its owner alone, if it is not there; SQLite would make one that all may read.

    Raises:
        OSError: it, or its folder, cannot be made.
    """
    private_folder(path.parent)
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
    if path.parent == data_folder():
        for suffix in _BESIDE:
            _close_to_others(path.with_name(path.name + suffix))


def _close_to_others(path: Path) -> None:
    """Take a file's or folder's permissions from all but its owner, if it is ours; elsewhere nothing happens."""
    if not hasattr(os, "getuid"):
        return
    try:
        found = path.stat()
        if found.st_uid == os.getuid() and found.st_mode & _OF_OTHERS:
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OF_OTHERS)
            log.warning("%s could be read by others, and is now its owner's alone", path)
    except OSError:
        return  # not there yet, or on a file system without modes
