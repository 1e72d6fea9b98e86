"""Private files: only their owner can read documents, questions and answers.

New files have mode 0600 in folders of mode 0700. Existing files and folders keep their mode. A new version replaces a
file only when it is complete, so an error or a crash changes nothing. The default folder is the user's data folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

import platformdirs


def get_data_folder() -> Path:
    """Return the data folder: `MEMAGENT_HOME`, or the user's data folder of the operating system."""
    folder = os.environ.get("MEMAGENT_HOME") or platformdirs.user_data_dir("memagent")
    return Path(os.path.expanduser(folder))  # noqa: PTH111  `Path.expanduser` raises for an unknown user


def get_default_store_path() -> Path:
    """Return the default folder for texts of documents."""
    return get_data_folder() / "documents"


def get_default_checkpoints_path() -> Path:
    """Return the default file for checkpoints."""
    return get_data_folder() / "checkpoints.sqlite"


def get_default_run_log_path() -> Path:
    """Return the default file for the run log."""
    return get_data_folder() / "runs.sqlite"


def create_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, readable by their owner only.

    Raises:
        OSError: the folder cannot be created.
    """
    for missing_folder in reversed([parent for parent in (folder, *folder.parents) if not parent.exists()]):
        missing_folder.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")


def create_private_file(path: Path) -> None:
    """Create a file that only its owner can read, if it does not exist. SQLite would let everyone read it.

    Raises:
        OSError: the file or its folder cannot be created.
    """
    create_private_folder(path.parent)
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))


UNFINISHED_PREFIX = ".writing-"
"""The beginning of the names of files that are being written. A killed process leaves them behind."""


@contextmanager
def open_atomically(path: Path) -> Iterator[BufferedRandom]:
    """Open a new file that replaces `path` at the end of the block. It is synced to disk and private.

    If the block raises, `path` is unchanged. A symbolic link at `path` is replaced, not followed.

    Args:
        path: the file. Its folder must exist.

    Yields:
        The new file, open for writing.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, name = tempfile.mkstemp(prefix=UNFINISHED_PREFIX, dir=path.parent)
    temporary_path = Path(name)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary_path.replace(path)
    except BaseException:
        temporary_path.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file as `open_atomically` does. Text is written as UTF-8.

    Raises:
        OSError: the file cannot be written.
    """
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
