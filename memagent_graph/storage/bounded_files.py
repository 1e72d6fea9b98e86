"""Reads files that somebody else may have written: the size is bounded, and invalid content raises `ValueError`."""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Final

_MAX_BYTES: Final = 64 << 20
"""The default maximum, twice the size of the largest tokenizers."""
MAX_WORDING_BYTES: Final = 1 << 20
"""The maximum size of a template or a profile."""
_OPEN_FLAGS: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular_file(path: Path, root: Path | None = None) -> BinaryIO:
    """Open a regular file for reading, without waiting for a pipe.

    Raises `OSError` if the file cannot be opened, is not a regular file, or is not below `root` (a resolved path).
    On Linux the path of the open file is checked; elsewhere the path is resolved again.
    """
    descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    descriptor_link, problem = Path(f"/proc/self/fd/{descriptor}"), None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        problem = "it is not a regular file"
    elif root:
        target = descriptor_link.readlink() if descriptor_link.is_symlink() else path.resolve()
        if not target.is_relative_to(root):
            problem = "it leads out of its folder now"
    if problem:
        os.close(descriptor)
        raise OSError(errno.EINVAL, problem, str(path))
    return os.fdopen(descriptor, "rb")


def read_text_file(path: Path, max_bytes: int = _MAX_BYTES, *, allow_pipes: bool = False) -> str:
    """Return the text of a file in UTF-8, without a byte order mark.

    Raises:
        OSError: the file cannot be read, or is a pipe or device and `allow_pipes` is False.
        ValueError: the file is not UTF-8, or too large.
    """
    with path.open("rb") if allow_pipes else open_regular_file(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content.decode("utf-8-sig")


def inflate(data: bytes, max_bytes: int, window_bits: int = zlib.MAX_WBITS) -> bytes:
    """Return the content of a zlib stream.

    Raises:
        ValueError: the stream is damaged or cut off, or its content has more than `max_bytes`.
    """
    stream = zlib.decompressobj(window_bits)
    try:
        content = stream.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"compressed data is damaged: {error}") from error
    if len(content) > max_bytes:
        raise ValueError(f"compressed data has more than {max_bytes:,} bytes")
    if not stream.eof:
        raise ValueError("compressed data is cut off")
    return content


def read_json_file(path: Path, max_bytes: int = _MAX_BYTES) -> Any:
    """Return the value in a JSON file. Raises the errors of `read_text_file` and `parse_json`."""
    return parse_json(read_text_file(path, max_bytes))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)  # a byte order mark
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
