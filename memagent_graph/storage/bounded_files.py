"""Files that somebody else may have written: whatever is wrong with them is a `ValueError`, and they are bounded."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final

_MOST_BYTES: Final = 64 << 20
"""The largest tokenizers have half of it."""
MOST_BYTES_OF_WORDING: Final = 1 << 20
"""Of a template or a profile."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises `OSError` if that is not possible; for a pipe, too, which could be waited for."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.open("rb")


def open_without_links(path: Path) -> BinaryIO:
    """Open a file for reading by a resolved path. Raises `OSError` for a link at any level, put there since, too."""
    if os.open not in os.supports_dir_fd:
        return open_regular(path)
    with ExitStack() as folders:
        folder = None
        for name in path.parts[:-1]:
            folder = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", 0), dir_fd=folder)
            folders.callback(os.close, folder)
        file = os.open(path.name, os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        folders.callback(os.close, file)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(os.dup(file), "rb")


def text_file(path: Path, most_bytes: int = _MOST_BYTES) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        OSError: it cannot be read, or is a pipe or device.
        ValueError: it is not UTF-8, or too large.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return content.decode("utf-8")


def json_file(path: Path, most_bytes: int = _MOST_BYTES) -> Any:
    """Return the value in a JSON file. Errors are those of `text_file` and `json_value`."""
    return json_value(text_file(path, most_bytes))


def json_value(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
