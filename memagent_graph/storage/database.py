"""Opens the SQLite files of this package: private, in write-ahead mode, and safe while other processes open them."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from memagent_graph.storage.private_files import private_file

_PAUSE_SECONDS = 0.02


def open_database(path: Path, schema: str, *, timeout: float = 30.0) -> sqlite3.Connection:
    """Open a SQLite file, and create it for its owner only if it does not exist.

    The connection is in autocommit mode, may be used by any thread (one at a time), and returns `sqlite3.Row`. What is
    committed survives the process; after a power failure the newest transactions may be missing.

    Args:
        path: the file.
        schema: statements that create what does not exist yet.
        timeout: seconds to wait for a file that another process has locked.

    Raises:
        OSError, sqlite3.Error: it cannot be opened, or is not a database.
    """
    private_file(path)
    connection = sqlite3.connect(path, check_same_thread=False, timeout=timeout, isolation_level=None)
    try:
        connection.row_factory = sqlite3.Row
        use_write_ahead_log(connection, timeout=timeout)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(schema)
    except BaseException:
        connection.close()
        raise
    return connection


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
