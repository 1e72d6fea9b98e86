"""Files that somebody else may have written: whatever is wrong with them is a `ValueError`, and they are bounded."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

_MAX_BYTES: Final = 64 << 20
"""The largest tokenizers have half of it."""
MOST_BYTES_OF_WORDING: Final = 1 << 20
"""Of a template or a profile."""
_AT_ONCE: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path, root: Path | None = None) -> BinaryIO:
    """Open a file for reading; a pipe is not waited for.

    Raises `OSError` if that is not possible, or what was opened is no regular file, or not below a resolved root. Linux
    says where an open file is; elsewhere its path is resolved again.
    """
    number = os.open(path, os.O_RDONLY | _AT_ONCE)
    place, problem = Path(f"/proc/self/fd/{number}"), None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        problem = "it is not a regular file"
    elif root and not (place.readlink() if place.is_symlink() else path.resolve()).is_relative_to(root):
        problem = "it leads out of its folder now"
    if problem:
        os.close(number)
        raise OSError(errno.EINVAL, problem, str(path))
    return os.fdopen(number, "rb")


def text_file(path: Path, most_bytes: int = _MAX_BYTES, *, pipes: bool = False) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        OSError: it cannot be read, or is a pipe or device, without `pipes`.
        ValueError: it is not UTF-8, or too large.
    """
    with path.open("rb") if pipes else open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return content.decode("utf-8")


def json_file(path: Path, most_bytes: int = _MAX_BYTES) -> Any:
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
