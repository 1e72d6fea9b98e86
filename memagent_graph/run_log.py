"""The log of runs: one SQLite file that many processes write to.

So far it holds what a run is (its question, its document, the settings of its reader) and how it ended: enough to
find a run again and go on with it from its id alone. Keys and headers are no part of a reader's settings.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent_graph.documents import DocumentRef
from memagent_graph.errors import RunError, RunNotFoundError

_MIGRATIONS = (
    """
    CREATE TABLE runs (
        run_id TEXT PRIMARY KEY,
        began REAL NOT NULL,
        ended REAL,
        question TEXT NOT NULL,
        document TEXT NOT NULL,
        settings TEXT NOT NULL,
        stop_reason TEXT,
        answer TEXT
    ) STRICT
    """,
)
"""One statement per schema version; the file's `user_version` counts those that were applied."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. Times are seconds since 1970; `ended` and `stop_reason` are None while it runs, or after a crash."""

    run_id: str
    began: float
    ended: float | None
    question: str
    document: DocumentRef
    settings: Mapping[str, Any]
    """What its reader was built from."""
    stop_reason: str | None
    answer: str | None


class RunLog:
    """A log of runs in one SQLite file (WAL mode).

    Raises:
        RunError: the file is no run log, is of a newer version of this package, or cannot be written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._connect() as connection:
                self._migrate(connection)
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(error) from error

    def begin(self, run_id: str, question: str, document: DocumentRef, settings: Mapping[str, Any]) -> None:
        """Enter a run as begun. A run that goes on keeps its entry, with its end taken back."""
        with self._connect() as connection:
            connection.execute(
                "INSERT INTO runs (run_id, began, question, document, settings) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (run_id) DO UPDATE SET ended = NULL, stop_reason = NULL",
                (run_id, time.time(), question, json.dumps(document), json.dumps(dict(settings))),
            )

    def end(self, run_id: str, stop_reason: str, answer: str | None) -> None:
        """Enter how a run ended."""
        with self._connect() as connection:
            connection.execute(
                "UPDATE runs SET ended = ?, stop_reason = ?, answer = ? WHERE run_id = ?",
                (time.time(), stop_reason, answer, run_id),
            )

    def get(self, run_id: str) -> RunRecord:
        """One run.

        Raises:
            RunNotFoundError: there is none of that id; the newest ids are named.
        """
        with self._connect() as connection:
            row = connection.execute("SELECT * FROM runs WHERE run_id = ?", (run_id,)).fetchone()
            newest = connection.execute("SELECT run_id FROM runs ORDER BY began DESC LIMIT 3").fetchall()
        if row is None:
            known = ", ".join(each["run_id"] for each in newest)
            raise RunNotFoundError(
                f"there is no run {run_id!r} in {self.path}",
                hint=f"The newest are {known}." if known else "It holds no runs yet.",
            )
        return _record(row)

    def runs(self, *, newest: int | None = None) -> Iterator[RunRecord]:
        """The runs, newest first, at most `newest` of them."""
        with self._connect() as connection:
            for row in connection.execute("SELECT * FROM runs ORDER BY began DESC LIMIT ?", (newest or -1,)):
                yield _record(row)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """A connection of the call's own: cheap beside a run, and safe in any thread."""
        with closing(sqlite3.connect(self.path, timeout=30)) as connection, connection:
            connection.row_factory = sqlite3.Row
            yield connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(_MIGRATIONS):
            raise RunError(
                f"{self.path} was written by a newer version of this package (schema {version})",
                hint="Upgrade memagent-graph, or name another file with --log.",
            )
        for statement in _MIGRATIONS[version:]:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(_MIGRATIONS)}")

    def _unusable(self, error: Exception) -> RunError:
        return RunError(f"{self.path} cannot be used as a run log: {error}", hint="Name another file with --log.")


def _record(row: sqlite3.Row) -> RunRecord:
    values = dict(row)
    values["document"] = json.loads(values["document"])
    values["settings"] = json.loads(values["settings"])
    return RunRecord(**values)
