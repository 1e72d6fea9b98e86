"""What of a corpus is done: a SQLite file beside the table, from which a killed run continues.

A row goes here first, in one transaction with the note that its document is done, and from here to a part of the table.
Which part that is stands here before the part is written, so a part that a kill interrupted is written again with the
same rows under the same name: no row is doubled, none is missing. Nothing is held in memory, for any number of
documents.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memagent_graph.corpus.corpus_rows import Row, decoded_row, encoded
from memagent_graph.errors import CorpusError
from memagent_graph.storage.private_files import private_file
from memagent_graph.storage.write_ahead import use_write_ahead_log

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS rows (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, document TEXT NOT NULL, question TEXT NOT NULL,
    failed INTEGER NOT NULL, part INTEGER, payload BLOB
);
CREATE INDEX IF NOT EXISTS rows_of_documents ON rows (document);
CREATE INDEX IF NOT EXISTS unwritten_rows ON rows (part, number) WHERE payload IS NOT NULL;
CREATE TABLE IF NOT EXISTS documents (
    name TEXT PRIMARY KEY, version TEXT NOT NULL, begun INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS replaced (part INTEGER NOT NULL, id TEXT NOT NULL, PRIMARY KEY (part, id)) WITHOUT ROWID;
"""
_ROWS_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True)
class Open:
    """What is left to do for a document."""

    questions: tuple[str, ...]
    """Those that have no row yet."""
    begun: bool
    """Whether an earlier process has begun it, so that there may be checkpoints."""
    changed: bool
    """Whether its source says that it may have changed since it was read."""
    answered: frozenset[str] = frozenset()
    """The ids of its rows that have an answer. If its text is the same as before, they are not read for again."""


class CorpusLedger:
    """The ledger of one table. Any thread may call.

    Args:
        path: the SQLite file; it is created if it does not exist.

    Raises:
        CorpusError: it cannot be opened, or, from any method, not be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._failures_told():
            private_file(path)
            self._connection = sqlite3.connect(path, check_same_thread=False, timeout=30.0, isolation_level=None)
            use_write_ahead_log(self._connection)
            # What a power cut takes is read again; what a part was made of is written with FULL, see `assign`.
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript(_SCHEMA)

    def open_of(self, document: str, version: str, questions: Sequence[str], *, retry_failed: bool = False) -> Open:
        """What is left to do for a document with these questions."""
        name = _text(document)
        with self._transaction(write=False) as connection:
            known = connection.execute("SELECT version, begun FROM documents WHERE name = ?", (name,)).fetchone()
            if known is None:
                return Open(tuple(questions), begun=False, changed=False)
            found = connection.execute("SELECT question, failed, id FROM rows WHERE document = ?", (name,)).fetchall()
        changed = bool(found) and bool(known[0]) and bool(version) and known[0] != version
        done = set() if changed else {question for question, failed, _ in found if not (failed and retry_failed)}
        left = tuple(each for each in questions if _question(each) not in done)
        if not left and version and not known[0]:  # its rows were found in the table: from here on, changes show
            with self._transaction() as connection:
                connection.execute("UPDATE documents SET version = ? WHERE name = ?", (version, name))
        answered = frozenset(identity for _, failed, identity in found if not failed) if left else frozenset[str]()
        return Open(left, begun=bool(known[1]), changed=changed, answered=answered)

    def begin(self, document: str) -> None:
        """Note that a document is being read."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO documents VALUES (?, '', 1) ON CONFLICT (name) DO UPDATE SET begun = 1",
                (_text(document),),
            )

    def finish(self, document: str, version: str, rows: Sequence[Row]) -> int:
        """Enter a document's rows, and that it is done. They replace earlier rows of the same questions.

        Returns:
            The size of the rows in bytes.
        """
        name, size = _text(document), 0
        payloads = [(row, encoded(row)) for row in rows]
        with self._transaction() as connection:
            for row, payload in payloads:
                question = _question(row.question)
                connection.execute(
                    "INSERT OR IGNORE INTO replaced SELECT part, id FROM rows "
                    "WHERE document = ? AND question = ? AND part IS NOT NULL",
                    (name, question),
                )
                connection.execute("DELETE FROM rows WHERE document = ? AND question = ?", (name, question))
                connection.execute(
                    "INSERT INTO rows (id, document, question, failed, payload) VALUES (?, ?, ?, ?, ?)",
                    (row.id, name, question, row.failed, payload),
                )
                size += len(payload)
            connection.execute(
                "INSERT INTO documents VALUES (?, ?, 0) "
                "ON CONFLICT (name) DO UPDATE SET version = excluded.version, begun = 0",
                (name, version),
            )
        return size

    # From rows to parts

    def unassigned(self) -> tuple[int, int]:
        """How many rows are in no part, and their size in bytes."""
        with self._transaction(write=False) as connection:
            count, size = connection.execute(
                "SELECT count(*), coalesce(sum(length(payload)), 0) FROM rows "
                "WHERE part IS NULL AND payload IS NOT NULL"
            ).fetchone()
            return int(count), int(size)

    def assign(self, part: int, most: int) -> None:
        """Choose the oldest rows that are in no part for this one. It is on disk when this returns."""
        with self._lock, self._failures_told():
            self._connection.execute("PRAGMA synchronous = FULL")
            try:
                self._connection.execute(
                    "UPDATE rows SET part = ? WHERE number IN (SELECT number FROM rows "
                    "WHERE part IS NULL AND payload IS NOT NULL ORDER BY number LIMIT ?)",
                    (part, most),
                )
            finally:
                self._connection.execute("PRAGMA synchronous = NORMAL")

    def unwritten_parts(self) -> list[int]:
        """The parts that were assigned and may not be written."""
        with self._transaction(write=False) as connection:
            found = connection.execute(
                "SELECT DISTINCT part FROM rows WHERE payload IS NOT NULL AND part IS NOT NULL ORDER BY part"
            )
            return [part for (part,) in found.fetchall()]

    def rows_of(self, part: int) -> Iterator[Row]:
        """The rows that a part is made of, until it is written; few of them held at a time."""
        last = -1
        while True:
            with self._transaction(write=False) as connection:
                found = connection.execute(
                    "SELECT number, payload FROM rows WHERE part = ? AND payload IS NOT NULL AND number > ? "
                    "ORDER BY number LIMIT ?",
                    (part, last, _ROWS_AT_ONCE),
                ).fetchall()
            if not found:
                return
            last = found[-1][0]
            yield from (decoded_row(payload) for _, payload in found)

    def written(self, part: int) -> None:
        """Note that a part is in the table."""
        with self._transaction() as connection:
            connection.execute("UPDATE rows SET payload = NULL WHERE part = ? AND payload IS NOT NULL", (part,))

    def last_part(self) -> int:
        """The highest number of a part; -1 if there is none."""
        with self._transaction(write=False) as connection:
            found = connection.execute("SELECT max(part) FROM rows").fetchone()[0]
            return -1 if found is None else int(found)

    def replaced(self) -> dict[int, set[str]]:
        """By part: the ids of its rows that newer ones have replaced."""
        with self._transaction(write=False) as connection:
            found: dict[int, set[str]] = {}
            for part, identity in connection.execute("SELECT part, id FROM replaced"):
                found.setdefault(part, set()).add(identity)
            return found

    def removed(self, part: int) -> None:
        """Note that a part no longer has its replaced rows."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM replaced WHERE part = ?", (part,))

    # Counts, and a ledger that was lost

    def counts(self) -> tuple[int, int]:
        """How many rows there are, and how many of them have failed."""
        with self._transaction(write=False) as connection:
            rows, failed = connection.execute("SELECT count(*), coalesce(sum(failed), 0) FROM rows").fetchone()
            return int(rows), int(failed)

    def is_reading(self) -> bool:
        """Whether a document was begun and is not done."""
        with self._transaction(write=False) as connection:
            return connection.execute("SELECT 1 FROM documents WHERE begun = 1 LIMIT 1").fetchone() is not None

    def parts(self) -> set[int]:
        """The parts that it knows."""
        with self._transaction(write=False) as connection:
            return {part for (part,) in connection.execute("SELECT DISTINCT part FROM rows WHERE part IS NOT NULL")}

    def adopt(self, part: int, rows: Iterable[tuple[str, str, str, bool]]) -> None:
        """Enter the rows of a part that it does not know: id, document, question, and whether it failed.

        What is in the table counts more than a row that waits here, and a later part more than an earlier one.
        """
        with self._transaction() as connection:
            for identity, document, question, failed in rows:
                place = (_text(document), _question(question))
                found = connection.execute(
                    "SELECT id, part, payload IS NULL FROM rows WHERE document = ? AND question = ?", place
                ).fetchone()
                if found is not None:
                    known, elsewhere, is_written = found
                    if is_written and elsewhere > part:
                        connection.execute("INSERT OR IGNORE INTO replaced VALUES (?, ?)", (part, identity))
                        continue
                    if is_written:
                        connection.execute("INSERT OR IGNORE INTO replaced VALUES (?, ?)", (elsewhere, known))
                    connection.execute("DELETE FROM rows WHERE document = ? AND question = ?", place)
                connection.execute(
                    "INSERT INTO rows (id, document, question, failed, part) VALUES (?, ?, ?, ?, ?)",
                    (identity, *place, failed, part),
                )
                connection.execute("INSERT OR IGNORE INTO documents VALUES (?, '', 0)", place[:1])

    def release(self, part: int) -> None:
        """Let the rows of a part that is not written go to another one: its number was taken."""
        with self._transaction() as connection:
            connection.execute("UPDATE rows SET part = NULL WHERE part = ? AND payload IS NOT NULL", (part,))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[sqlite3.Connection]:
        with self._lock, self._failures_told():
            if not write:
                yield self._connection
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise CorpusError(
                f"{self.path}, where it is noted what is done, cannot be used: {error}",
                hint="Make room on the disk and start the same command again: nothing that is done is lost.",
            ) from error


def _question(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _text(name: str) -> str:
    return name if name.isascii() else name.encode("utf-8", "replace").decode()
