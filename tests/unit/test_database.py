"""Concurrent opening of one new SQLite file, which SQLite's timeout does not cover, and files of other versions."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from langgraph.checkpoint.sqlite import SqliteSaver

from memagent_corpus.corpus_ledger import CorpusLedger
from memagent_graph.errors import MemAgentError
from memagent_graph.run_log import RunLog
from memagent_graph.run_log.tables import connect
from memagent_graph.storage import database
from memagent_graph.storage.checkpoints import open_checkpointer
from memagent_graph.storage.database import use_write_ahead_log
from memagent_serve.ledger import Ledger


@contextmanager
def hold_exclusive_lock(path: Path) -> Iterator[sqlite3.Connection]:
    """Lock the file with a connection of its own."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA user_version = 1")
        connection.execute("BEGIN EXCLUSIVE")
        yield connection


def test_a_lock_that_is_not_released_is_an_error_after_the_timeout(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(database, "TIMEOUT_SECONDS", 0.1)
    path = tmp_path / "new.sqlite"
    with hold_exclusive_lock(path), closing(sqlite3.connect(path, timeout=0)) as connection:
        start_time = time.monotonic()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            use_write_ahead_log(connection)
        assert time.monotonic() - start_time >= 0.1


async def test_checkpoints_wait_for_a_locked_new_file(tmp_path) -> None:
    with hold_exclusive_lock(tmp_path / "checkpoints.sqlite") as lock_connection:
        asyncio.get_running_loop().call_later(0.3, lock_connection.execute, "ROLLBACK")
        saver = await open_checkpointer(tmp_path / "checkpoints.sqlite")
    assert saver is not None
    await saver.aclose()  # type: ignore[attr-defined]


def test_many_connections_can_create_the_same_new_log_at_once(tmp_path) -> None:
    barrier = threading.Barrier(4)

    def open_log(path: Path) -> None:
        barrier.wait()
        connect(path).close()

    with ThreadPoolExecutor(4) as threads:
        for number in range(30):
            assert len([*threads.map(open_log, [tmp_path / f"{number}.sqlite"] * 4)]) == 4


def open_checkpoints(path: Path) -> sqlite3.Connection:
    """Let the checkpointer create the file; return a connection to it."""

    async def open_and_close() -> None:
        saver = await open_checkpointer(path)
        await saver.aclose()  # type: ignore[union-attr]

    asyncio.run(open_and_close())
    return sqlite3.connect(path)


@pytest.mark.parametrize(
    ("open_file", "table", "hint"),
    [
        (RunLog, "runs", "run_log"),
        (Ledger, "reads", "Move the file away"),
        (CorpusLedger, "rows", "it is built again"),
        (open_checkpoints, "checkpoints", "Choose another file"),
    ],
)
@pytest.mark.parametrize(
    "change",
    [
        "CREATE TABLE more (x)",
        "DROP TABLE {table}",
        "ALTER TABLE {table} ADD COLUMN more TEXT GENERATED ALWAYS AS (hex(zeroblob(1000000000)))",
        "CREATE TRIGGER more AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END",
        "ALTER TABLE {table} RENAME TO more; CREATE VIEW {table} AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL "
        "SELECT n + 1 FROM r) SELECT * FROM more WHERE (SELECT count(*) FROM r) > 0",
        "DROP TABLE {table}; CREATE VIRTUAL TABLE {table} USING fts5(x)",
    ],
)
def test_a_file_with_other_tables_views_or_triggers_is_refused_and_unchanged(
    tmp_path, open_file, table, hint, change
) -> None:
    path = tmp_path / "other.sqlite"
    open_file(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(change.format(table=table))
    original_bytes = path.read_bytes()
    with pytest.raises(MemAgentError, match=rf"other\.sqlite.*another version.*{hint}"):
        open_file(path)
    assert path.read_bytes() == original_bytes


def test_checkpoints_can_be_in_a_file_that_langgraph_created(tmp_path) -> None:
    with SqliteSaver.from_conn_string(str(tmp_path / "own.sqlite")) as saver:
        saver.setup()
    open_checkpoints(tmp_path / "own.sqlite").close()
