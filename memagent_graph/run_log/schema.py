"""Connections to the run log. A file's `user_version` is the version of its tables."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from memagent_graph.errors import RunLogError
from memagent_graph.run_log import migration
from memagent_graph.storage.database import use_write_ahead_log

VERSION: Final = migration.VERSION


def connect(path: Path, *, timeout: float = 30.0) -> sqlite3.Connection:
    """A connection with rows by name, foreign keys, and commits that survive the process (but not a loss of power).

    Args:
        path: the file.
        timeout: seconds to wait for a writer in another process.
    """
    # Statements open and close their own transactions; isolation_level None keeps sqlite3 from adding others.
    connection = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection on which a file of the previous version reads like one of this version; the file is not changed.

    Raises:
        RunLogError: the file was written by a newer version.
    """
    connection = connect(path)
    try:
        if _version(connection, path) == VERSION - 1:
            connection.execute("BEGIN")  # one state of the file, as another process may migrate it at any moment
            if _version(connection, path) == VERSION - 1:
                migration.show_as_new(connection)
            else:
                connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables of a new file, or check an existing one; one of the previous version stays until a write.

    Raises:
        RunLogError: the file was written by a newer version.
        sqlite3.Error: it is not a database, cannot be written, or stays locked.
    """
    if not use_write_ahead_log(connection):
        raise sqlite3.OperationalError("the file system does not support write-ahead logging")
    if _version(connection, path) < VERSION - 1:  # such a file has no conversations
        migrate(connection, path)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring a file to this version; several processes may try at once, and any of them may be killed.

    A file with runs is copied first, to `NAME.v2` next to it.

    Raises:
        RunLogError: the file was written by a newer version.
        sqlite3.Error: it is not a database, cannot be written, or stays locked.
    """
    if _version(connection, path) == VERSION:
        return
    # This cannot be changed in a transaction; with it on, dropping a table would delete what refers to it.
    connection.execute("PRAGMA foreign_keys = OFF")
    try:
        connection.execute("BEGIN IMMEDIATE")
        version = _version(connection, path)
        if version not in {0, VERSION}:
            migration.back_up(path, version)
        for statement in migration.statements(version) if version < VERSION else ():
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    finally:
        connection.execute("PRAGMA foreign_keys = ON")


def _version(connection: sqlite3.Connection, path: Path) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise RunLogError(
            f"{path} was written by a newer version of this package (schema {version}, this one knows {VERSION})",
            hint="Upgrade memagent-graph, name another file with --log, or read without a log (--no-log).",
        )
    return version
