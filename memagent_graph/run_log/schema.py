"""The run log's tables. A file's `user_version` counts the migrations that were applied to it."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from memagent_graph.errors import RunLogError
from memagent_graph.storage.write_ahead import use_write_ahead_log

_RUNS: Final = """
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    began REAL NOT NULL,
    ended REAL,
    question TEXT NOT NULL,
    document TEXT NOT NULL,
    settings TEXT NOT NULL,
    stop_reason TEXT,
    answer TEXT
) STRICT;
"""

_CONVERSATIONS: Final = """
ALTER TABLE runs ADD COLUMN trace TEXT;
CREATE TABLE templates (
    hash TEXT PRIMARY KEY,
    content TEXT NOT NULL
) STRICT;
CREATE TABLE configurations (
    id INTEGER PRIMARY KEY,
    policy TEXT NOT NULL,
    policy_version TEXT NOT NULL,
    tokenizer TEXT NOT NULL,
    template TEXT NOT NULL,
    sampling TEXT NOT NULL,
    UNIQUE (policy, policy_version, tokenizer, template, sampling)
) STRICT;
CREATE TABLE conversations (
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    kind TEXT NOT NULL,
    step TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    superseded INTEGER NOT NULL DEFAULT 0,
    configuration INTEGER NOT NULL REFERENCES configurations (id),
    began REAL NOT NULL,
    seconds REAL NOT NULL,
    start_char INTEGER,
    end_char INTEGER,
    start_byte INTEGER,
    end_byte INTEGER,
    chunk_tokens INTEGER,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    finish_reason TEXT NOT NULL,
    prompt_ids BLOB,
    completion_ids BLOB,
    logprobs BLOB,
    text BLOB,
    memory BLOB,
    trace TEXT
) STRICT;
CREATE INDEX conversations_of_run ON conversations (run_id, position);
CREATE UNIQUE INDEX conversations_that_count ON conversations (run_id, position, kind, attempt) WHERE superseded = 0;
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
    conversation INTEGER REFERENCES conversations (id) ON DELETE CASCADE,
    position INTEGER,
    time REAL NOT NULL,
    kind TEXT NOT NULL,
    detail TEXT NOT NULL,
    rule TEXT,
    text BLOB
) STRICT;
CREATE INDEX events_of_run ON events (run_id);
CREATE INDEX events_of_conversation ON events (conversation);
CREATE TABLE rewards (
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
    conversation INTEGER REFERENCES conversations (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    value REAL NOT NULL,
    source TEXT NOT NULL,
    time REAL NOT NULL,
    note TEXT
) STRICT;
CREATE INDEX rewards_of_run ON rewards (run_id);
CREATE INDEX rewards_of_conversation ON rewards (conversation);
"""

MIGRATIONS: Final = (_RUNS, _CONVERSATIONS)
"""Each takes a file from one version to the next. None is ever changed once it has been released."""


def connect(path: Path, *, timeout: float = 30.0) -> sqlite3.Connection:
    """A connection with rows by name, foreign keys, and commits that survive the process (not a loss of power).

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


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring a file to this version; several processes may try at once.

    Raises:
        RunLogError: the file was written by a newer version.
        sqlite3.Error: it is no database, cannot be written, or stays locked.
    """
    if not use_write_ahead_log(connection):
        raise sqlite3.OperationalError("the file system does not support write-ahead logging")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise RunLogError(
                f"{path} was written by a newer version of this package (schema {version}, this one knows "
                f"{len(MIGRATIONS)})",
                hint="Upgrade memagent-graph, name another file with --log, or read without a log (--no-log).",
            )
        for script in MIGRATIONS[version:]:
            for statement in filter(str.strip, script.split(";\n")):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
