"""Private files: documents, questions and answers can be opened only by their owner.

New files are created like this (0600 in folders of 0700). An existing file or folder keeps its mode: someone chose it.
"""

from __future__ import annotations

import os
from pathlib import Path


def private_folder(folder: Path) -> None:
    """Create a folder, and missing folders above it, for their owner only.

    Raises:
        OSError: it cannot be created.
    """
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")


def private_file(path: Path) -> None:
    """Create a file for its owner only, if it does not exist; SQLite would create one that everyone may read.

    Raises:
        OSError: it, or its folder, cannot be created.
    """
    private_folder(path.parent)
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
