"""The tables of the run log, connections to its file, and statements on the tables. Callers open the transactions."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from memagent_graph.policy import ARRAY_TYPES
from memagent_graph.run_log.columns import RECORD_COLUMNS, pack_row
from memagent_graph.run_log.records import Conversation, LoggedEvent, Reward, RunRecord
from memagent_graph.storage.database import open_database, open_database_to_read

_RUN_REFERENCE: Final = "TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE"
_ROW_ID: Final = "INTEGER PRIMARY KEY"


def _make_table_statement(name: str, record_class: type, **columns: str) -> str:
    """Return the statement that creates the table of a record class; `columns` overrides or adds column types."""
    types = {field: column.sql for field, column in RECORD_COLUMNS[record_class].items()} | columns
    # SQLite reads a row from its first column on, so the large columns are last.
    definitions = sorted(
        (f"{field} {sql}" for field, sql in types.items()), key=lambda definition: definition.endswith("BLOB")
    )
    return f"CREATE TABLE {name} ({', '.join(definitions)}) STRICT"


_SCHEMA: Final = (
    _make_table_statement("runs", RunRecord, run_id="TEXT PRIMARY KEY"),
    _make_table_statement("conversations", Conversation, id=_ROW_ID, run_id=_RUN_REFERENCE),
    _make_table_statement("events", LoggedEvent, id=_ROW_ID, run_id=_RUN_REFERENCE),
    _make_table_statement(
        "rewards",
        Reward,
        id=_ROW_ID,
        run_id=_RUN_REFERENCE,
        conversation="INTEGER REFERENCES conversations (id) ON DELETE CASCADE",
    ),
    "CREATE TABLE imported (run_id TEXT PRIMARY KEY REFERENCES runs (run_id) ON DELETE CASCADE) STRICT",
    "CREATE TABLE templates (hash TEXT PRIMARY KEY, content TEXT NOT NULL) STRICT",
    "CREATE VIEW valid_rewards AS SELECT rewards.* FROM rewards JOIN runs USING (run_id) "
    "WHERE conversation IS NOT NULL OR time >= coalesce(attempt, 0)",
    "CREATE INDEX conversations_of_run ON conversations (run_id)",
    "CREATE UNIQUE INDEX conversations_that_count ON conversations (run_id, branch, role, slot, attempt) "
    "WHERE superseded = 0",
    "CREATE INDEX events_of_run ON events (run_id)",
    "CREATE INDEX rewards_of_run ON rewards (run_id)",
    "CREATE INDEX rewards_of_conversation ON rewards (conversation)",
)


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a log, and create its file and tables if they do not exist.

    Args:
        path: the file.
        read_only: whether to open the file for reading only.

    Raises:
        OSError, sqlite3.Error: the file is not a log of this version, cannot be opened, or stays locked.
    """
    connection = (open_database_to_read if read_only else open_database)(path, _SCHEMA)
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal" and not read_only:
            raise sqlite3.OperationalError("the file system does not support write-ahead logging")
    except BaseException:
        connection.close()
        raise
    return connection


SMALL_COLUMNS: Final = ", ".join(name for name in RECORD_COLUMNS[Conversation] if name not in ARRAY_TYPES)
"""The columns of conversations without token ids and log-probs."""


def insert_row(
    connection: sqlite3.Connection, table: str, values: Mapping[str, Any], *, update: Iterable[str] | None = None
) -> int:
    """Add a row, and return its id. If its key exists, replace the columns in `update`; fail if `update` is None."""
    assignments = ", ".join(f"{column} = excluded.{column}" for column in update or ())
    action = f"UPDATE SET {assignments}" if assignments else "NOTHING"
    conflict_clause = "" if update is None else f"ON CONFLICT DO {action}"
    placeholders = ", ".join("?" * len(values))
    statement = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({placeholders}) {conflict_clause}"  # noqa: S608  our own names
    return connection.execute(statement, tuple(values.values())).lastrowid or 0


def begin_attempt(connection: sqlite3.Connection, run_id: str, start_time: float) -> None:
    """Begin another attempt of a run, if the run exists: remove its end. Its own rewards so far no longer count.

    The attempt begins after these rewards even if the clock was set back.
    """
    rewards = "SELECT max(time) FROM rewards WHERE run_id = ? AND conversation IS NULL"
    (newest,) = connection.execute(rewards, (run_id,)).fetchone()
    attempt = start_time if newest is None else max(start_time, math.nextafter(newest, math.inf))
    update = "UPDATE runs SET attempt = ?, ended = NULL, stop_reason = NULL, answer = NULL WHERE run_id = ?"
    connection.execute(update, (attempt, run_id))


def insert_template(connection: sqlite3.Connection, fingerprint: str, wording: Mapping[str, str]) -> None:
    """Add the wording of prompts, if the log does not have it yet."""
    insert_row(connection, "templates", {"hash": fingerprint, "content": json.dumps(dict(wording))}, update=())


def insert_reward(connection: sqlite3.Connection, reward: Reward) -> None:
    """Add a reward; its `conversation` is a row id or None.

    A reward of the run is valid for the present attempt even if the clock was set back.
    """
    if reward.conversation is None:
        (attempt,) = connection.execute("SELECT attempt FROM runs WHERE run_id = ?", (reward.run_id,)).fetchone()
        reward = replace(reward, time=max(reward.time, attempt or 0.0))
    insert_row(connection, "rewards", pack_row(replace(reward, id=None)))


def make_conversation_job(
    conversation: Conversation, *, supersedes_others: bool
) -> Callable[[sqlite3.Connection], int]:
    """Return a job that adds a conversation and returns its row id.

    The values are packed in the caller's thread, when the job is created, so that the writer thread does little work.

    With `supersedes_others`, the job marks other calls in the slot as superseded, and all calls that depend on them.
    """
    values = pack_row(conversation) | {"id": None}
    run_id = conversation.run_id

    def insert_conversation(connection: sqlite3.Connection) -> int:
        if supersedes_others:
            query = (
                "SELECT DISTINCT call_id FROM conversations WHERE run_id = :run_id AND branch = :branch "
                "AND role = :role AND slot = :slot AND superseded = 0 AND call_id <> :call_id"
            )
            supersede_calls(connection, run_id, [row[0] for row in connection.execute(query, values)])
        return insert_row(connection, "conversations", values)

    return insert_conversation


def supersede_calls(connection: sqlite3.Connection, run_id: str, call_ids: Sequence[str]) -> None:
    """Mark some calls as superseded, and all calls that depend on them."""
    if not call_ids:
        return
    query = "SELECT call_id, parents FROM conversations WHERE run_id = ? AND superseded = 0 ORDER BY id"
    dependents = set(call_ids)
    for call_id, parents in connection.execute(query, (run_id,)):  # parents come before the calls that depend on them
        if not dependents.isdisjoint(json.loads(parents)):
            dependents.add(call_id)
    update = "UPDATE conversations SET superseded = 1 WHERE run_id = ? AND call_id IN (SELECT value FROM json_each(?))"
    connection.execute(update, (run_id, json.dumps(list(dependents))))
