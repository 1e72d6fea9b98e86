"""The run log's tables, and connections to its file."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from memagent_graph.run_log.columns import columns_of
from memagent_graph.run_log.records import Conversation, LoggedEvent, Reward, RunRecord
from memagent_graph.storage.database import open_database, open_database_to_read

_OF_RUN: Final = "TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE"
_KEY: Final = "INTEGER PRIMARY KEY"


def _table(name: str, record: type, **columns: str) -> str:
    """Return the statement that creates the table of a class of records; `columns` replaces some and adds others."""
    types = {field: column.sql for field, column in columns_of(record).items()} | columns
    # SQLite finds a column only by way of those before it, so the large ones are last.
    definitions = sorted((f"{field} {sql}" for field, sql in types.items()), key=lambda words: words.endswith("BLOB"))
    return f"CREATE TABLE {name} ({', '.join(definitions)}) STRICT"


_SCHEMA: Final = (
    _table("runs", RunRecord, run_id="TEXT PRIMARY KEY"),
    _table("conversations", Conversation, id=_KEY, run_id=_OF_RUN),
    _table("events", LoggedEvent, id=_KEY, run_id=_OF_RUN),
    _table(
        "rewards",
        Reward,
        id=_KEY,
        run_id=_OF_RUN,
        conversation="INTEGER REFERENCES conversations (id) ON DELETE CASCADE",
    ),
    "CREATE TABLE imported (run_id TEXT PRIMARY KEY REFERENCES runs (run_id) ON DELETE CASCADE) STRICT",
    "CREATE TABLE templates (hash TEXT PRIMARY KEY, content TEXT NOT NULL) STRICT",
    "CREATE INDEX conversations_of_run ON conversations (run_id, seq)",
    "CREATE UNIQUE INDEX conversations_that_count ON conversations (run_id, branch, role, slot, attempt) "
    "WHERE superseded = 0",
    "CREATE INDEX events_of_run ON events (run_id)",
    "CREATE INDEX rewards_of_run ON rewards (run_id)",
    "CREATE INDEX rewards_of_conversation ON rewards (conversation)",
)


def connect(path: Path, *, to_read: bool = False, timeout: float = 30.0) -> sqlite3.Connection:
    """Open a log, and create its file and tables if they do not exist.

    Args:
        path: the file.
        to_read: whether it may be a file that cannot be written.
        timeout: seconds to wait for a writer in another process.

    Raises:
        OSError, sqlite3.Error: it is not a log of this version, cannot be opened, or stays locked.
    """
    connection = (open_database_to_read if to_read else open_database)(path, _SCHEMA, timeout=timeout)
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal" and not to_read:
            raise sqlite3.OperationalError("the file system does not support write-ahead logging")
    except BaseException:
        connection.close()
        raise
    return connection
