"""Records which read belongs to which key and request, in a SQLite file that outlives the process.

The text of runs is in the run log and the checkpoints; this file only has their owners. A run that is not in it, or
belongs to another key, does not exist for a client.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import astuple, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from memagent_graph.errors import RunLogError
from memagent_graph.storage.database import UnknownSchemaError, open_database
from memagent_serve.api_errors import make_not_found_error


class ReadState(StrEnum):
    """The state of a read. All except FINISHED continue when they are requested again."""

    WAITING = "waiting"
    """The read has not begun; other reads are ahead of it."""
    RUNNING = "running"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    """A person paused it, or changed its memory."""
    STOPPED = "stopped"
    """A limit was reached."""
    FINISHED = "finished"

    @property
    def has_ended(self) -> bool:
        """Whether the read has ended. The same request may continue it."""
        return self not in {ReadState.WAITING, ReadState.RUNNING}


@dataclass(frozen=True, slots=True)
class Entry:
    """A read in the ledger. A read that a killed process left is still RUNNING or WAITING."""

    run_id: str
    owner: str
    request: str
    """A digest of everything that the read depends on; equal requests of a key have the same digest."""
    question: str
    document: str
    """The document's name."""
    began: float
    """Seconds since 1970."""
    ended: float | None = None
    state: ReadState = ReadState.WAITING
    error: str | None = None
    edited: bool = False
    """Whether a person changed the read; the same request then starts another read."""
    read_request: str = ""
    """The request to read, as JSON, so that another process can continue the read (`ReadRequest.from_entry`)."""


_SCHEMA: Final = (
    "CREATE TABLE reads (run_id TEXT PRIMARY KEY, owner TEXT NOT NULL, request TEXT NOT NULL, question TEXT "
    "NOT NULL, document TEXT NOT NULL, began REAL NOT NULL, ended REAL, state TEXT NOT NULL, error TEXT, "
    "edited INTEGER NOT NULL DEFAULT 0, read_request TEXT NOT NULL)",
    "CREATE TABLE files (owner TEXT NOT NULL, id TEXT PRIMARY KEY, bytes INTEGER NOT NULL, created_at INTEGER"
    " NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL)",
    "CREATE TABLE texts (owner TEXT NOT NULL, key TEXT NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL, "
    "ref TEXT NOT NULL, file TEXT, PRIMARY KEY (owner, key))",
    "CREATE INDEX files_of_owners ON files (owner, created_at)",
    "CREATE INDEX reads_of_requests ON reads (owner, request, began)",
    "CREATE INDEX reads_of_owners ON reads (owner, began)",
)
_CONTAINS_TEXT: Final = "owner = ? AND instr(folded(question || char(10) || document || char(10) || run_id), ?) > 0"


class Ledger:
    """The reads of all keys. Any thread may call.

    Args:
        path: the SQLite file.

    Raises:
        RunLogError: the file cannot be opened. All methods raise it if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        """Held during several statements that belong together."""
        try:
            self._connection = open_database(path, _SCHEMA)
            self._connection.create_function("folded", 1, str.casefold, deterministic=True)
        except (OSError, sqlite3.Error) as error:
            raise self._make_failure(error) from error

    def begin(self, entry: Entry) -> None:
        """Add a read."""
        self.execute("INSERT INTO reads VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(entry))

    def mark(self, run_id: str, state: ReadState, error: str | None = None) -> None:
        """Record the state of a read."""
        ended = time.time() if state.has_ended else None
        self.execute("UPDATE reads SET state = ?, ended = ?, error = ? WHERE run_id = ?", (state, ended, error, run_id))

    def find_by_request(self, owner: str, request_digest: str) -> list[Entry]:
        """Return the reads of one request of a key, the newest first."""
        return self._select("owner = ? AND request = ? ORDER BY began DESC, rowid DESC", (owner, request_digest))

    def search(self, owner: str, text: str, *, newest: int, skip: int = 0) -> tuple[list[Entry], int]:
        """Return a key's reads with a text in the question, the document's name or the id, ignoring case, newest first.

        Returns:
            `newest` of them after the first `skip`, and the total number.
        """
        values = owner, text.casefold()
        ((total,),) = self.execute(f"SELECT count(*) FROM reads WHERE {_CONTAINS_TEXT}", values)  # noqa: S608  one of those above
        page = self._select(
            f"{_CONTAINS_TEXT} ORDER BY began DESC, rowid DESC LIMIT ? OFFSET ?", (*values, newest, skip)
        )
        return page, total

    def mark_edited(self, run_id: str, *, edited: bool = True) -> None:
        """Record whether a person changed a read."""
        self.execute("UPDATE reads SET edited = ? WHERE run_id = ?", (edited, run_id))

    def get(self, owner: str, run_id: str) -> Entry:
        """Return a read.

        Raises:
            APIError: 404; the read does not exist, or belongs to another key.
        """
        for entry in self._select("owner = ? AND run_id = ?", (owner, run_id)):
            return entry
        raise make_not_found_error("there is no such read")

    def close(self) -> None:
        """Close the file."""
        with self.lock:
            self._connection.close()

    def _select(self, condition: str, values: tuple[Any, ...]) -> list[Entry]:
        rows = self.execute(f"SELECT * FROM reads WHERE {condition}", values)  # noqa: S608  one of those above
        return [Entry(**{**dict(row), "state": ReadState(row["state"]), "edited": bool(row["edited"])}) for row in rows]

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """Return the rows of a statement."""
        try:
            with self.lock, closing(self._connection.execute(statement, values)) as cursor:
                return cursor.fetchall()
        except sqlite3.Error as error:
            raise self._make_failure(error) from error

    def _make_failure(self, error: Exception) -> RunLogError:
        return RunLogError(
            f"the list of reads in {self.path} cannot be used: {error}",
            hint="Move the file away. The same requests are then read again; earlier answers are in the run log."
            if isinstance(error, UnknownSchemaError)
            else "Free some disk space, or set MEMAGENT_HOME to another data folder.",
        )
