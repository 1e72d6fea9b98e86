"""Switches a SQLite file to write-ahead logging while other processes open the same new file."""

from __future__ import annotations

import sqlite3
import time

_PAUSE_SECONDS = 0.02


def use_write_ahead_log(connection: sqlite3.Connection, *, timeout: float = 30.0) -> bool:
    """Switch the file to write-ahead logging; several processes and threads may try at once.

    SQLite's own time-out does not cover this switch: if two connections make it at the same moment, one gets an error
    at once that the file is locked, with any time-out (https://sqlite.org/wal.html, "sometimes queries return
    SQLITE_BUSY"). So it is retried here.

    Args:
        connection: an open connection outside any transaction.
        timeout: seconds after which a file that stays locked is an error.

    Returns:
        Whether the file system supports it; if not, the file keeps its rollback journal.

    Raises:
        sqlite3.Error: the file is not a database, cannot be written, or stays locked.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            # The primary code is in the low byte; the rest says which kind of busy it was.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        else:
            return bool(mode == "wal")
        time.sleep(_PAUSE_SECONDS)
