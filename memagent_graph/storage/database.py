"""Opens the SQLite files of this package: private, in write-ahead mode, and safe while other processes open them.

A file must have exactly the tables, views and indexes of its schema. Files of other versions are thus refused, and so
are files with other views, triggers or generated columns, which would run code when a table is used.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from memagent_graph.storage.private_files import create_private_file

TIMEOUT_SECONDS = 30.0
"""Seconds to wait for a file that another process has locked."""
_RETRY_SECONDS = 0.02
_NOT_WRITABLE_CODES = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM})
_SEQUENCE_TABLE = "CREATE TABLE sqlite_sequence(name,seq)"
"""The table that SQLite adds for a schema with AUTOINCREMENT."""


class UnknownSchemaError(sqlite3.DatabaseError):
    """A file's schema differs: it comes from another version or program, or has additional views or triggers."""


def open_database(path: Path, schema: Sequence[str]) -> sqlite3.Connection:
    """Open a SQLite file. If it does not exist, create it, readable by its owner only.

    The connection is in autocommit mode, may be used by any thread (one at a time), and returns `sqlite3.Row`.
    Committed transactions survive a crash of the process, but the newest may be lost in a power failure.

    Args:
        path: the path of the file.
        schema: the statements that create tables, views and indexes, each on one line.

    Raises:
        UnknownSchemaError: the file has another schema.
        OSError, sqlite3.Error: the file cannot be opened, or is not a database.
    """
    create_private_file(path)
    connection = _connect(path)
    try:
        if not path.stat().st_size:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # so that deletions can free disk space
        use_write_ahead_log(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        if not _read_definitions(connection):
            connection.execute("BEGIN IMMEDIATE")
            if not _read_definitions(connection):  # no other process has created the tables
                for statement in schema:
                    connection.execute(statement)
            connection.execute("COMMIT")
        return _require_schema(connection, schema)
    except BaseException:
        connection.close()
        raise


def open_database_to_read(path: Path, schema: Sequence[str]) -> sqlite3.Connection:
    """Open a SQLite file as `open_database` does, or read-only if it may not be written.

    Without write access to the folder, SQLite cannot coordinate with a writer. The file is then read without its
    write-ahead log, which is possible only if that log is empty.

    Raises:
        UnknownSchemaError, OSError, sqlite3.Error: as for `open_database`.
    """
    try:
        return open_database(path, schema)
    except (OSError, sqlite3.OperationalError) as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_PERM) & 0xFF
        if code not in _NOT_WRITABLE_CODES or (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
            raise
        write_ahead_log = path.with_name(f"{path.name}-wal")
        has_log = write_ahead_log.exists() and write_ahead_log.stat().st_size
        for mode in ("mode=ro",) if has_log else ("mode=ro", "mode=ro&immutable=1"):
            with suppress(sqlite3.OperationalError):
                return _require_schema(_connect(f"{path.absolute().as_uri()}?{mode}"), schema)
        raise


def _connect(path: Path | str) -> sqlite3.Connection:
    uri, seconds = isinstance(path, str), TIMEOUT_SECONDS
    connection = sqlite3.connect(path, check_same_thread=False, timeout=seconds, isolation_level=None, uri=uri)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.create_function("casefold", 1, lambda text: text and str(text).casefold(), deterministic=True)
    return connection


def _require_schema(connection: sqlite3.Connection, schema: Sequence[str]) -> sqlite3.Connection:
    """Return a connection to a file with this schema; close it and raise `UnknownSchemaError` for another schema."""
    try:
        if _read_definitions(connection) != sorted(schema):
            raise UnknownSchemaError("its tables are those of another version of this package, or of another program")
    except BaseException:
        connection.close()
        raise
    return connection


def _read_definitions(connection: sqlite3.Connection) -> list[str]:
    """Return the statements that define the contents of a file, sorted, one per line."""
    with closing(connection.execute("SELECT CAST(sql AS TEXT) FROM sqlite_master WHERE sql IS NOT NULL")) as rows:
        return sorted(" ".join(statement.split()) for (statement,) in rows if statement != _SEQUENCE_TABLE)


def use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch the file to write-ahead logging, if its file system supports it. Several processes may try at once.

    SQLite's time-out does not apply to this switch. If two connections try it at the same moment, one gets an error
    immediately (https://sqlite.org/wal.html, "sometimes queries return SQLITE_BUSY"), so it is retried here.

    Raises:
        sqlite3.Error: the file is not a database, cannot be written, or stays locked.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # The low byte is the primary code; the rest is the extended code.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_SECONDS)
