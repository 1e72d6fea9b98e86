"""The ledger of a table: a SQLite file that records which documents are finished. A killed run continues from it.

A new row is first stored in the ledger, in the same transaction that marks its document as finished. Later the row is
written to a part of the table. The ledger records the part's number before the part is written. If a kill interrupts
the write, the same rows are written again under the same name, so no row is duplicated and none is lost. Memory use
does not grow with the number of documents.
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

from memagent_corpus.corpus_rows import Row, decoded_row, encoded
from memagent_graph.errors import CorpusError
from memagent_graph.storage.database import use_write_ahead_log
from memagent_graph.storage.private_files import private_file

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
class Remaining:
    """The questions about a document that still have to be answered."""

    questions: tuple[str, ...]
    """Questions without a row, or with a failed row that is to be retried. All of them if the source changed."""
    begun: bool
    """Whether an earlier process began to read the document, so that checkpoints may exist."""
    changed: bool
    """Whether the document may have changed since it was read, according to its source."""
    answered: frozenset[str] = frozenset()
    """The ids of the document's rows that have an answer. They stay valid if the text is still the same."""


class CorpusLedger:
    """The ledger of one table. It is thread-safe.

    Args:
        path: the SQLite file, which is created if it does not exist.

    Raises:
        CorpusError: the file cannot be opened. All methods raise it if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._as_corpus_error():
            private_file(path)
            self._connection = sqlite3.connect(path, check_same_thread=False, timeout=30.0, isolation_level=None)
            use_write_ahead_log(self._connection)
            # After a power failure, lost documents are read again. `assign` uses FULL: a part must not lose its rows.
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.executescript(_SCHEMA)

    def remaining(
        self, document: str, version: str, questions: Sequence[str], *, retry_failed: bool = False
    ) -> Remaining:
        """Return which of these questions about a document still have to be answered.

        Args:
            document: the document's name.
            version: its current version.
            questions: all questions about it.
            retry_failed: treat questions whose row has an error as unanswered.
        """
        name = _text(document)
        with self._transaction(write=False) as connection:
            known = connection.execute("SELECT version, begun FROM documents WHERE name = ?", (name,)).fetchone()
            if known is None:
                return Remaining(tuple(questions), begun=False, changed=False)
            found = connection.execute("SELECT question, failed, id FROM rows WHERE document = ?", (name,)).fetchall()
        changed = bool(found) and bool(known[0]) and bool(version) and known[0] != version
        done = set() if changed else {question for question, failed, _ in found if not (failed and retry_failed)}
        left = tuple(each for each in questions if _question(each) not in done)
        if not left and version and not known[0]:  # adopted from the table: from now on, changes can be detected
            with self._transaction() as connection:
                connection.execute("UPDATE documents SET version = ? WHERE name = ?", (version, name))
        answered = frozenset(identity for _, failed, identity in found if not failed) if left else frozenset[str]()
        return Remaining(left, begun=bool(known[1]), changed=changed, answered=answered)

    def begin(self, document: str) -> None:
        """Record that a document is being read."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO documents VALUES (?, '', 1) ON CONFLICT (name) DO UPDATE SET begun = 1",
                (_text(document),),
            )

    def finish(self, document: str, version: str, rows: Sequence[Row]) -> int:
        """Store a document's rows and mark the document as finished. The rows replace older ones for the questions.

        Returns:
            The size of the encoded rows in bytes.
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
        """Return the number of rows without a part, and their size in bytes."""
        with self._transaction(write=False) as connection:
            count, size = connection.execute(
                "SELECT count(*), coalesce(sum(length(payload)), 0) FROM rows "
                "WHERE part IS NULL AND payload IS NOT NULL"
            ).fetchone()
            return int(count), int(size)

    def assign(self, part: int, max_rows: int) -> None:
        """Assign the oldest rows without a part to this one. The assignment is on disk when this returns."""
        with self._lock, self._as_corpus_error():
            self._connection.execute("PRAGMA synchronous = FULL")
            try:
                self._connection.execute(
                    "UPDATE rows SET part = ? WHERE number IN (SELECT number FROM rows "
                    "WHERE part IS NULL AND payload IS NOT NULL ORDER BY number LIMIT ?)",
                    (part, max_rows),
                )
            finally:
                self._connection.execute("PRAGMA synchronous = NORMAL")

    def unwritten_parts(self) -> list[int]:
        """Return the parts that have rows assigned but are not recorded as written."""
        with self._transaction(write=False) as connection:
            found = connection.execute(
                "SELECT DISTINCT part FROM rows WHERE payload IS NOT NULL AND part IS NOT NULL ORDER BY part"
            )
            return [part for (part,) in found.fetchall()]

    def rows_of(self, part: int) -> Iterator[Row]:
        """Yield the rows assigned to an unwritten part, reading a few at a time."""
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

    def mark_written(self, part: int) -> None:
        """Record that a part is in the table, and delete the content of its rows from the ledger."""
        with self._transaction() as connection:
            connection.execute("UPDATE rows SET payload = NULL WHERE part = ? AND payload IS NOT NULL", (part,))

    def last_part(self) -> int:
        """Return the highest part number; -1 if there is none."""
        with self._transaction(write=False) as connection:
            found = connection.execute("SELECT max(part) FROM rows").fetchone()[0]
            return -1 if found is None else int(found)

    def replaced(self) -> dict[int, set[str]]:
        """Return, for each part, the ids of rows that newer rows have replaced."""
        with self._transaction(write=False) as connection:
            found: dict[int, set[str]] = {}
            for part, identity in connection.execute("SELECT part, id FROM replaced"):
                found.setdefault(part, set()).add(identity)
            return found

    def mark_removed(self, part: int) -> None:
        """Record that the replaced rows of a part have been removed from the table."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM replaced WHERE part = ?", (part,))

    # Counts, and recovery

    def counts(self) -> tuple[int, int]:
        """Return the number of rows, and the number of failed rows among them."""
        with self._transaction(write=False) as connection:
            rows, failed = connection.execute("SELECT count(*), coalesce(sum(failed), 0) FROM rows").fetchone()
            return int(rows), int(failed)

    def is_reading(self) -> bool:
        """Whether any document is begun but not finished."""
        with self._transaction(write=False) as connection:
            return connection.execute("SELECT 1 FROM documents WHERE begun = 1 LIMIT 1").fetchone() is not None

    def parts(self) -> set[int]:
        """Return the numbers of all parts in the ledger."""
        with self._transaction(write=False) as connection:
            return {part for (part,) in connection.execute("SELECT DISTINCT part FROM rows WHERE part IS NOT NULL")}

    def adopt(self, part: int, rows: Iterable[tuple[str, str, str, bool]]) -> None:
        """Add a part of the table that is missing from the ledger.

        A row in the table takes precedence over an unwritten row in the ledger, and a row in a later part over one in
        an earlier part.

        Args:
            part: the part's number.
            rows: id, document, question, and whether the row failed.
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
        """Unassign the rows of an unwritten part, because another writer has used its number."""
        with self._transaction() as connection:
            connection.execute("UPDATE rows SET part = NULL WHERE part = ? AND payload IS NOT NULL", (part,))

    def close(self) -> None:
        """Close the SQLite file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[sqlite3.Connection]:
        with self._lock, self._as_corpus_error():
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
    def _as_corpus_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise CorpusError(
                f"the ledger {self.path} cannot be used: {error}",
                hint="Free some disk space and run the same command again. Finished documents are not lost.",
            ) from error


def _question(text: str) -> str:
    """Return a short hash of a question, which is its key in the ledger."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _text(name: str) -> str:
    """Return a name that SQLite can store: half surrogate pairs become question marks."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode()
