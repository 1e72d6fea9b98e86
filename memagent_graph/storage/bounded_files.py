"""Files that somebody else may have written: whatever is wrong with them is a `ValueError`, and they are bounded."""

from __future__ import annotations

import errno
import json
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


def text_file(path: Path, most_bytes: int = _MOST_BYTES, *, pipes: bool = False) -> str:
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
