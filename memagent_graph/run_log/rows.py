"""The tables of the run log, connections to the file, and statements. The caller opens the transactions."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from memagent_graph.policy import ARRAY_TYPES
from memagent_graph.run_log.columns import RECORD_COLUMNS, pack_row
from memagent_graph.run_log.records import Conversation, LoggedEvent, Reward, RunRecord
from memagent_graph.storage.database import open_database, open_database_to_read

_OF_RUN: Final = "TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE"
_KEY: Final = "INTEGER PRIMARY KEY"


def _make_table_statement(name: str, record: type, **columns: str) -> str:
    """Return the statement that creates the table of a record class; `columns` overrides or adds column types."""
    types = {field: column.sql for field, column in RECORD_COLUMNS[record].items()} | columns
    # SQLite reads a row from its first column on, so the large columns are last.
    definitions = sorted(
        (f"{field} {sql}" for field, sql in types.items()), key=lambda definition: definition.endswith("BLOB")
    )
    return f"CREATE TABLE {name} ({', '.join(definitions)}) STRICT"


_SCHEMA: Final = (
    _make_table_statement("runs", RunRecord, run_id="TEXT PRIMARY KEY"),
    _make_table_statement("conversations", Conversation, id=_KEY, run_id=_OF_RUN),
    _make_table_statement("events", LoggedEvent, id=_KEY, run_id=_OF_RUN),
    _make_table_statement(
        "rewards",
        Reward,
        id=_KEY,
        run_id=_OF_RUN,
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


def connect(path: Path, *, to_read: bool = False) -> sqlite3.Connection:
    """Open a log, and create its file and tables if they do not exist.

    Args:
        path: the file.
        to_read: whether to open the file for reading only.

    Raises:
        OSError, sqlite3.Error: the file is not a log of this version, cannot be opened, or stays locked.
    """
    connection = (open_database_to_read if to_read else open_database)(path, _SCHEMA)
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal" and not to_read:
            raise sqlite3.OperationalError("the file system does not support write-ahead logging")
    except BaseException:
        connection.close()
        raise
    return connection


SMALL_COLUMNS: Final = ", ".join(name for name in RECORD_COLUMNS[Conversation] if name not in ARRAY_TYPES)
"""The columns of conversations without token ids and log-probs."""


def insert(
    connection: sqlite3.Connection, table: str, values: Mapping[str, Any], *, update: Iterable[str] | None = None
) -> int:
    """Add a row, and return its id. If its key exists, replace the columns in `update`; fail if `update` is None."""
    change = ", ".join(f"{column} = excluded.{column}" for column in update or ())
    otherwise = "" if update is None else f"ON CONFLICT DO UPDATE SET {change}" if change else "ON CONFLICT DO NOTHING"
    marks = ", ".join("?" * len(values))
    statement = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks}) {otherwise}"  # noqa: S608  our own names
    return connection.execute(statement, tuple(values.values())).lastrowid or 0


def begin_attempt(connection: sqlite3.Connection, run_id: str, time: float) -> None:
    """Remove the end of a run, if it exists, because another attempt begins. Its own rewards so far do not count.

    The attempt begins after them even if the clock was set back.
    """
    rewards = "SELECT max(time) FROM rewards WHERE run_id = ? AND conversation IS NULL"
    (newest,) = connection.execute(rewards, (run_id,)).fetchone()
    attempt = time if newest is None else max(time, math.nextafter(newest, math.inf))
    update = "UPDATE runs SET attempt = ?, ended = NULL, stop_reason = NULL, answer = NULL WHERE run_id = ?"
    connection.execute(update, (attempt, run_id))


def insert_template(connection: sqlite3.Connection, fingerprint: str, wording: Mapping[str, str]) -> None:
    """Add the wording of prompts if the log does not have it."""
    insert(connection, "templates", {"hash": fingerprint, "content": json.dumps(dict(wording))}, update=())


def insert_event(connection: sqlite3.Connection, run_id: str, event: LoggedEvent) -> None:
    """Add an event of a run without a conversation."""
    insert(connection, "events", {**pack_row(event), "run_id": run_id})


def insert_reward(connection: sqlite3.Connection, reward: Reward) -> None:
    """Add a reward; its `conversation` is a row id or None.

    A reward of the run is valid for the present attempt even if the clock was set back.
    """
    if reward.conversation is None:
        (attempt,) = connection.execute("SELECT attempt FROM runs WHERE run_id = ?", (reward.run_id,)).fetchone()
        reward = replace(reward, time=max(reward.time, attempt or 0.0))
    insert(connection, "rewards", pack_row(replace(reward, id=None)))


def make_conversation_job(conversation: Conversation, *, supersede_others: bool) -> Callable[[sqlite3.Connection], int]:
    """Return a job that adds a conversation and returns its row id.

    The values are packed in the caller's thread, when the job is created, so that the writer thread does little work.

    With `supersede_others`, other calls in its slot are superseded, and everything that depends on them.
    """
    values = pack_row(conversation) | {"id": None}
    run_id = conversation.run_id

    def job(connection: sqlite3.Connection) -> int:
        if supersede_others:
            query = (
                "SELECT DISTINCT call_id FROM conversations WHERE run_id = :run_id AND branch = :branch "
                "AND role = :role AND slot = :slot AND superseded = 0 AND call_id <> :call_id"
            )
            supersede(connection, run_id, [row[0] for row in connection.execute(query, values)])
        return insert(connection, "conversations", values)

    return job


def supersede(connection: sqlite3.Connection, run_id: str, call_ids: Sequence[str]) -> None:
    """Supersede some calls, and everything that depends on them."""
    if not call_ids:
        return
    query = "SELECT call_id, parents FROM conversations WHERE run_id = ? AND superseded = 0 ORDER BY id"
    dependents = set(call_ids)
    for call_id, parents in connection.execute(query, (run_id,)):  # each after its parents
        if not dependents.isdisjoint(json.loads(parents)):
            dependents.add(call_id)
    update = "UPDATE conversations SET superseded = 1 WHERE run_id = ? AND call_id IN (SELECT value FROM json_each(?))"
    connection.execute(update, (run_id, json.dumps(list(dependents))))


def supersede_except(connection: sqlite3.Connection, run_id: str, call_ids: Collection[str]) -> None:
    """Supersede all other calls."""
    sql = "UPDATE conversations SET superseded = 1 WHERE run_id = ? AND call_id NOT IN (SELECT value FROM json_each(?))"
    connection.execute(sql, (run_id, json.dumps(list(call_ids))))
