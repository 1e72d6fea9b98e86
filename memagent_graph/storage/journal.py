"""A journal: rows as JSON lines in a file that survives crashes. Only one process at a time may write to it.

A row is in the file when `append` returns. A killed process can leave an incomplete last line, which is removed when
the journal is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import IO, Any, Final

from memagent_graph.errors import MemAgentError
from memagent_graph.storage.bounded_files import open_regular_file, parse_json
from memagent_graph.storage.file_locks import try_to_lock
from memagent_graph.storage.private_files import create_private_file

_ROW_START: Final = b'{"'
"""The first bytes of every row."""
_MAX_BYTES: Final = 4 << 30


class Journal(AbstractContextManager["Journal"]):
    """A file of rows, open for writing; see `open_journal`. It has to be closed."""

    def __init__(self, path: Path, file: IO[bytes], rows: list[dict[str, Any]]) -> None:
        self.path = path
        self.rows = rows
        """The rows in the file, the oldest first."""
        self._file = file

    def append(self, *rows: Mapping[str, Any], sync: bool = True) -> None:
        """Add rows. After a crash in between, the file may have only some of them.

        Args:
            rows: objects with values that JSON can represent.
            sync: whether to wait for the disk. If not, rows survive the end of the process, but not a power failure.

        Raises:
            OSError: the rows cannot be written.
        """
        lines = [json.dumps(row) for row in rows]
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
        self.rows += map(json.loads, lines)

    def close(self) -> None:
        """Wait for the disk, and release the lock for other processes. A second call does nothing."""
        if not self._file.closed:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_journal(path: Path, *, error: type[MemAgentError]) -> Journal:
    """Open a journal for writing, and create it if it does not exist.

    Args:
        path: the file.
        error: the class of errors to raise.

    Raises:
        error: another process has the file open, or it is not a journal.
        OSError: the file cannot be opened.
    """
    create_private_file(path)
    with ExitStack() as stack:
        file = stack.enter_context(path.open("r+b"))
        if not try_to_lock(file):
            raise error(f"another process writes to {path}", hint="Wait until it has ended, or choose another folder.")
        rows, size = _parse_rows(file, path, error)
        file.truncate(size)
        file.seek(size)
        stack.pop_all()
    return Journal(path, file, rows)


def read_journal(path: Path, *, error: type[MemAgentError]) -> list[dict[str, Any]]:
    """Return the rows of a journal, which may be in use.

    Raises:
        error: the file is not a journal, or cannot be read.
    """
    try:
        with open_regular_file(path) as file:
            return _parse_rows(file, path, error)[0]
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror}", hint="Choose another folder.") from cause


def _parse_rows(file: IO[bytes], path: Path, error: type[MemAgentError]) -> tuple[list[dict[str, Any]], int]:
    """Return the rows, and the size of the complete lines in bytes."""
    if os.fstat(file.fileno()).st_size > _MAX_BYTES:
        raise error(f"{path} has more than {_MAX_BYTES:,} bytes", hint="Choose another folder.")
    content = file.read()
    size = content.rfind(b"\n") + 1
    incomplete_row = content[size : size + len(_ROW_START)]
    if incomplete_row != _ROW_START[: len(incomplete_row)]:
        raise error(f"{path} is not a journal of this program", hint="Choose another folder.")
    rows = []
    for line_number, line in enumerate(content[:size].splitlines(), start=1):
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise TypeError("it is not an object")
        except (ValueError, TypeError) as cause:
            raise error(
                f"line {line_number} of {path} cannot be parsed: {cause}",
                hint="Delete that line and continue, or choose another folder.",
            ) from cause
        rows.append(row)
    return rows, size
