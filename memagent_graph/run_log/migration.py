"""From one version of the run log's tables to the next. No script is ever changed once it has been released.

Version 3 knows more than one way of reading: a conversation has a role, a branch and a slot, and tables of their own
hold what it read, what it comes from, and a run's answers. What a file of version 2 holds is said in these terms by
six queries, `_AS_NEW`. The migration copies their rows; a reader that must not change the file puts views in the
tables' place.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

VERSION: Final = 3

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
"""Tables of version 3 as queries of version 2. A chunk was always read behind the one before it."""

_STRATEGIES: Final = f"""
CREATE TABLE new_runs (
    run_id TEXT PRIMARY KEY,
    began REAL NOT NULL,
    ended REAL,
    document TEXT NOT NULL,
    settings TEXT NOT NULL,
    stop_reason TEXT,
    trace TEXT,
    strategy TEXT NOT NULL,
    strategy_fingerprint TEXT NOT NULL
) STRICT;
CREATE TABLE answers (
    run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    question TEXT NOT NULL,
    answer TEXT,
    PRIMARY KEY (run_id, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE new_conversations (
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
) STRICT;
CREATE TABLE conversation_reads (
    conversation INTEGER NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    chunk INTEGER NOT NULL,
    start_char INTEGER NOT NULL,
    end_char INTEGER NOT NULL,
    start_byte INTEGER NOT NULL,
    end_byte INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (conversation, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE conversation_parents (
    conversation INTEGER NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    parent TEXT NOT NULL,
    PRIMARY KEY (conversation, number)
) STRICT, WITHOUT ROWID;
INSERT INTO new_runs {_AS_NEW["runs"]};
INSERT INTO answers {_AS_NEW["answers"]};
INSERT INTO new_conversations {_AS_NEW["conversations"]};
INSERT INTO conversation_reads {_AS_NEW["conversation_reads"]};
INSERT INTO conversation_parents {_AS_NEW["conversation_parents"]};
ALTER TABLE events ADD COLUMN step TEXT;
DROP TABLE conversations;
DROP TABLE runs;
ALTER TABLE new_runs RENAME TO runs;
ALTER TABLE new_conversations RENAME TO conversations;
CREATE INDEX conversations_of_run ON conversations (run_id, seq);
CREATE UNIQUE INDEX conversations_that_count ON conversations (run_id, branch, role, slot, attempt)
    WHERE superseded = 0;
"""

SCRIPTS: Final = (_RUNS, _CONVERSATIONS, _STRATEGIES)
"""Each takes a file from one version to the next."""


def show_as_new(connection: sqlite3.Connection) -> None:
    """Let a file of version 2 read as one of version 3, on this connection alone: views hide its tables."""
    for table, query in _AS_NEW.items():
        connection.execute(f"CREATE TEMP VIEW {table} AS {query}")


def back_up(path: Path, version: int) -> None:
    """Copy a log to `NAME.vVERSION` beside it, while the caller keeps others from writing to it.

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
