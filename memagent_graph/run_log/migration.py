"""The run log's tables, and the migration of files of older versions.

Version 3 has more than one way of reading: a conversation has a role, a branch and a slot, and separate tables
have what it read, its parents, and a run's answers. Six queries, `_AS_NEW`, express a file of version 2 in these
terms. The migration copies their rows; a reader that must not change the file uses views instead of the tables.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

VERSION: Final = 3

_TABLES: Final = {
    "runs": """(
    run_id TEXT PRIMARY KEY,
    began REAL NOT NULL,
    ended REAL,
    document TEXT NOT NULL,
    settings TEXT NOT NULL,
    stop_reason TEXT,
    trace TEXT,
    strategy TEXT NOT NULL,
    strategy_fingerprint TEXT NOT NULL
) STRICT""",
    "imported": """(
    run_id TEXT PRIMARY KEY REFERENCES runs (run_id) ON DELETE CASCADE
) STRICT""",
    "answers": """(
    run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    question TEXT NOT NULL,
    answer TEXT,
    PRIMARY KEY (run_id, number)
) STRICT, WITHOUT ROWID""",
    "templates": """(
    hash TEXT PRIMARY KEY,
    content TEXT NOT NULL
) STRICT""",
    "configurations": """(
    id INTEGER PRIMARY KEY,
    policy TEXT NOT NULL,
    policy_version TEXT NOT NULL,
    tokenizer TEXT NOT NULL,
    template TEXT NOT NULL,
    sampling TEXT NOT NULL,
    UNIQUE (policy, policy_version, tokenizer, template, sampling)
) STRICT""",
    "conversations": """(
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
    seq INTEGER NOT NULL,
    node TEXT NOT NULL,
    branch TEXT NOT NULL,
    role TEXT NOT NULL,
    slot INTEGER NOT NULL,
    writes TEXT NOT NULL,
    position INTEGER NOT NULL,
    step TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    superseded INTEGER NOT NULL DEFAULT 0,
    configuration INTEGER NOT NULL REFERENCES configurations (id),
    began REAL NOT NULL,
    seconds REAL NOT NULL,
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
) STRICT""",
    "conversation_reads": """(
    conversation INTEGER NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    chunk INTEGER NOT NULL,
    start_char INTEGER NOT NULL,
    end_char INTEGER NOT NULL,
    start_byte INTEGER NOT NULL,
    end_byte INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (conversation, number)
) STRICT, WITHOUT ROWID""",
    "conversation_parents": """(
    conversation INTEGER NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    parent TEXT NOT NULL,
    PRIMARY KEY (conversation, number)
) STRICT, WITHOUT ROWID""",
    "events": """(
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
    conversation INTEGER REFERENCES conversations (id) ON DELETE CASCADE,
    position INTEGER,
    time REAL NOT NULL,
    kind TEXT NOT NULL,
    detail TEXT NOT NULL,
    rule TEXT,
    text BLOB,
    step TEXT
) STRICT""",
    "rewards": """(
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
    conversation INTEGER REFERENCES conversations (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    value REAL NOT NULL,
    source TEXT NOT NULL,
    time REAL NOT NULL,
    note TEXT
) STRICT""",
}
"""Each with the text after its name when it is created."""

_INDEXES: Final = (
    "CREATE INDEX conversations_of_run ON conversations (run_id, seq)",
    "CREATE UNIQUE INDEX conversations_that_count ON conversations (run_id, branch, role, slot, attempt) "
    "WHERE superseded = 0",
    "CREATE INDEX events_of_run ON events (run_id)",
    "CREATE INDEX events_of_conversation ON events (conversation)",
    "CREATE INDEX rewards_of_run ON rewards (run_id)",
    "CREATE INDEX rewards_of_conversation ON rewards (conversation)",
)

_AS_NEW: Final = {
    "runs": (
        "SELECT run_id, began, ended, document, settings, stop_reason, trace, 'overwrite' AS strategy, "
        "'' AS strategy_fingerprint FROM main.runs"
    ),
    "answers": "SELECT run_id, 0 AS number, question, answer FROM main.runs",
    "conversations": (
        "SELECT id, run_id, row_number() OVER (PARTITION BY run_id ORDER BY id) - 1 AS seq, "
        "CASE kind WHEN 'answer' THEN 'answer' ELSE 'update_memory' END AS node, '' AS branch, kind AS role, "
        "CASE kind WHEN 'answer' THEN 0 ELSE position END AS slot, "
        "CASE kind WHEN 'answer' THEN 'answer' ELSE 'memory' END AS writes, "
        "position, step, attempt, outcome, superseded, configuration, began, seconds, prompt_tokens, "
        "completion_tokens, cached_tokens, finish_reason, prompt_ids, completion_ids, logprobs, text, memory, trace "
        "FROM main.conversations"
    ),
    "events": "SELECT *, NULL AS step FROM main.events",
    "imported": "SELECT run_id FROM main.runs WHERE 0",
    "conversation_reads": (
        "SELECT id AS conversation, 0 AS number, position AS chunk, coalesce(start_char, 0) AS start_char, "
        "coalesce(end_char, 0) AS end_char, start_byte, coalesce(end_byte, 0) AS end_byte, "
        "coalesce(chunk_tokens, 0) AS tokens FROM main.conversations WHERE start_byte IS NOT NULL"
    ),
    "conversation_parents": (
        "SELECT conversation, 0 AS number, parent FROM (SELECT c.id AS conversation, (SELECT p.step "
        "FROM main.conversations p WHERE p.run_id = c.run_id AND p.position < c.position AND p.id < c.id "
        "AND p.outcome <> 'discarded' ORDER BY p.position DESC, p.id DESC LIMIT 1) AS parent "
        "FROM main.conversations c) WHERE parent IS NOT NULL"
    ),
}
"""Tables of version 3 as queries of version 2. There, each chunk was read after the previous one."""

_HELD: Final = {0: (), 1: ("runs", "answers"), 2: tuple(_TABLES)}
"""By version: the tables that have rows in such a file; version 1 has no conversations."""


def statements(version: int) -> Iterator[str]:
    """The statements that bring a file to this version; a new file is version 0. Foreign keys must not be enforced.

    Every table is created, filled from the old ones if there are any, and renamed.
    """
    if version == 1:
        yield "ALTER TABLE runs ADD COLUMN trace TEXT"
    prefix = "new_" if version else ""
    yield from (f"CREATE TABLE {prefix}{table} {columns}" for table, columns in _TABLES.items())
    for table in _HELD[version]:
        as_new = _AS_NEW.get(table) or f"SELECT * FROM {table}"  # noqa: S608  our own names
        yield f"INSERT INTO new_{table} {as_new}"
    for table in _TABLES if version else ():
        yield f"DROP TABLE IF EXISTS {table}"
        yield f"ALTER TABLE new_{table} RENAME TO {table}"
    yield from _INDEXES


def show_as_new(connection: sqlite3.Connection) -> None:
    """Read a file of version 2 like one of version 3, on this connection only: views hide its tables."""
    for table, query in _AS_NEW.items():
        connection.execute(f"CREATE TEMP VIEW {table} AS {query}")


def back_up(path: Path, version: int) -> None:
    """Copy a log to `NAME.vVERSION` next to it, while the caller prevents writes.

    Raises:
        sqlite3.Error, OSError: it cannot be copied; nothing has been changed.
    """
    destination = path.with_name(f"{path.name}.v{version}")
    partial = destination.with_name(f".{destination.name}.partial")
    partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(partial)) as copy:
        source.backup(copy)
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(destination)
