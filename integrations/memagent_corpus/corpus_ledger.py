"""The ledger of a table: a SQLite file with the finished documents, and the rows that are not in a part yet.

A row is first stored in the ledger, in the same transaction that marks its document as finished. Later it is written to
a part of the table, and its content is deleted from the ledger. Memory use does not grow with the number of documents.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from memagent_corpus.corpus_reader import DocumentTask
from memagent_corpus.corpus_rows import CorpusRow, decode_row, encode_row
from memagent_corpus.source_access import CorpusDocument
from memagent_corpus.table_folder import TablePart
from memagent_graph.errors import CorpusError
from memagent_graph.storage.database import UnknownSchemaError, open_database

# rows.failed: 0 for an answer, 1 for an error, 2 for the answer from an earlier version of the document.
_SCHEMA: Final = (
    "CREATE TABLE documents (name TEXT PRIMARY KEY, version TEXT NOT NULL, begun INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE rows (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, document TEXT NOT "
    "NULL, question TEXT NOT NULL, failed INTEGER NOT NULL, part INTEGER, payload BLOB)",
    "CREATE INDEX rows_of_documents ON rows (document)",
    "CREATE INDEX rows_of_parts ON rows (part) WHERE part IS NOT NULL",
    "CREATE INDEX waiting_rows ON rows (number) WHERE payload IS NOT NULL",
    "CREATE TABLE parts (number INTEGER PRIMARY KEY, rows INTEGER NOT NULL, failed INTEGER NOT NULL, bytes "
    "INTEGER NOT NULL, sha256 TEXT NOT NULL, stale INTEGER NOT NULL DEFAULT 0)",
)
_ROWS_PER_FETCH: Final = 256


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
        with self._convert_errors():
            self._connection = open_database(path, _SCHEMA)

    # Documents

    def find_task(
        self, document: CorpusDocument, questions: Sequence[str], *, retry_failed: bool = False
    ) -> DocumentTask:
        """Return which of these questions about a document still have to be answered: all if the source has changed.

        Args:
            document: the document, with its current version.
            questions: all questions about the document.
            retry_failed: treat questions whose row has an error as unanswered.
        """
        name, version = _to_storable(document.name), document.version
        with self._locked_connection() as connection:
            record = connection.execute("SELECT version, begun FROM documents WHERE name = ?", (name,)).fetchone()
            if record is None:
                return DocumentTask(document, tuple(questions), is_begun=False)
            rows = connection.execute("SELECT question, failed, id FROM rows WHERE document = ?", (name,)).fetchall()
        is_changed = bool(rows) and bool(record["version"]) and bool(version) and record["version"] != version
        answered_states = {0} if retry_failed else {0, 1}
        answered_digests = {row["question"] for row in rows if row["failed"] in answered_states and not is_changed}
        open_questions = tuple(question for question in questions if _hash_question(question) not in answered_digests)
        if not open_questions and version and not record["version"]:
            # The rows come from an adopted part. With the version, later changes of the document can be detected.
            with self._transaction() as connection:
                connection.execute("UPDATE documents SET version = ? WHERE name = ?", (version, name))
        answered_ids = frozenset(row["id"] for row in rows if row["failed"] != 1)
        return DocumentTask(document, open_questions, bool(record["begun"]) or is_changed, answered_ids, is_changed)

    def mark_begun(self, document: str) -> None:
        """Record that a document is being read."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO documents VALUES (?, '', 1) ON CONFLICT (name) DO UPDATE SET begun = 1",
                (_to_storable(document),),
            )

    def store_rows(self, document: str, version: str, rows: Sequence[CorpusRow], questions: Sequence[str] = ()) -> int:
        """Store a document's rows and mark the document as finished. The rows replace older ones for the questions.

        Args:
            document: its name.
            version: the version of the source; empty if it is unknown, or questions are postponed.
            rows: the new rows.
            questions: the questions with a row for this version. If it is new, answers to others become outdated.

        Returns:
            The size of the encoded rows in bytes.
        """
        name, payloads = _to_storable(document), [encode_row(row) for row in rows]
        with self._transaction() as connection:
            if version:
                connection.execute(
                    "UPDATE rows SET failed = 2 WHERE document = ?1 AND failed = 0 AND EXISTS "
                    "(SELECT 1 FROM documents WHERE name = ?1 AND version NOT IN ('', ?2))",
                    (name, version),
                )
                connection.executemany(
                    "UPDATE rows SET failed = 0 WHERE document = ? AND question = ? AND failed = 2",
                    [(name, _hash_question(question)) for question in questions],
                )
            for row, payload in zip(rows, payloads, strict=True):
                question = _hash_question(row.question)
                _remove_row(connection, name, question)
                connection.execute(
                    "INSERT INTO rows (id, document, question, failed, payload) VALUES (?, ?, ?, ?, ?)",
                    (row.id, name, question, row.error is not None, payload),
                )
            connection.execute(
                "INSERT INTO documents VALUES (?, ?, 0) "
                "ON CONFLICT (name) DO UPDATE "
                "SET version = iif(excluded.version = '', version, excluded.version), begun = 0",
                (name, version),
            )
        return sum(map(len, payloads))

    def is_reading(self) -> bool:
        """Return whether any document is begun but not finished."""
        with self._locked_connection() as connection:
            return connection.execute("SELECT 1 FROM documents WHERE begun = 1 LIMIT 1").fetchone() is not None

    def count_rows(self) -> tuple[int, int]:
        """Return the number of rows, and the number of failed rows among them."""
        with self._locked_connection() as connection:
            rows, failed = connection.execute("SELECT count(*), coalesce(sum(failed = 1), 0) FROM rows").fetchone()
            return int(rows), int(failed)

    # Rows that wait for a part

    def count_waiting_rows(self) -> tuple[int, int]:
        """Return the number of rows that are not in a part, and their size in bytes."""
        with self._locked_connection() as connection:
            row_count, byte_count = connection.execute(
                "SELECT count(*), coalesce(sum(length(payload)), 0) FROM rows WHERE payload IS NOT NULL"
            ).fetchone()
            return int(row_count), int(byte_count)

    def iter_waiting_rows(self, max_rows: int) -> Iterator[tuple[int, CorpusRow]]:
        """Yield the oldest rows that are not in a part, with their numbers, reading a few at a time."""
        last_number, rows_left = -1, max_rows
        while rows_left > 0:
            with self._locked_connection() as connection:
                rows = connection.execute(
                    "SELECT number, CAST(payload AS BLOB) FROM rows WHERE payload IS NOT NULL AND number > ? "
                    "ORDER BY number LIMIT ?",
                    (last_number, min(rows_left, _ROWS_PER_FETCH)),
                ).fetchall()
            if not rows:
                return
            rows_left -= len(rows)
            for last_number, payload in rows:
                with self._convert_errors():
                    row = decode_row(payload)
                yield last_number, row

    # Parts

    def list_parts(self, *, only_stale: bool = False) -> list[TablePart]:
        """Return the parts of the table by number; with `only_stale`, only those with rows that newer ones replaced."""
        with self._locked_connection() as connection:
            rows = connection.execute(
                "SELECT number, rows, failed, bytes, sha256 FROM parts WHERE stale >= ? ORDER BY number", (only_stale,)
            )
            return [TablePart(*row) for row in rows]

    def mark_written(self, part: TablePart, last_number: int) -> None:
        """Record that all waiting rows up to the number `last_number` are in a part, and delete their content.

        If one of them has been replaced since it was written, the part is stale.
        """
        with self._transaction() as connection:
            row_count = connection.execute(
                "UPDATE rows SET part = ?, payload = NULL WHERE payload IS NOT NULL AND number <= ?",
                (part.number, last_number),
            ).rowcount
            _add_part(connection, part, stale=row_count < part.rows)

    def list_ids(self, part: TablePart) -> set[str]:
        """Return the ids of the rows in a part, without those that newer rows have replaced."""
        with self._locked_connection() as connection:
            return {row["id"] for row in connection.execute("SELECT id FROM rows WHERE part = ?", (part.number,))}

    def replace_part(self, part: TablePart, new_part: TablePart | None) -> None:
        """Record that the rows of a part are now in a new part.

        If there is no new part, the documents of rows that were still in the old one count as not read.
        """
        with self._transaction() as connection:
            if new_part is not None:
                row_count = connection.execute(
                    "UPDATE rows SET part = ? WHERE part = ?", (new_part.number, part.number)
                ).rowcount
                _add_part(connection, new_part, stale=row_count < new_part.rows)
            connection.execute("DELETE FROM rows WHERE part = ?", (part.number,))
            connection.execute("DELETE FROM parts WHERE number = ?", (part.number,))

    def adopt_part(self, part: TablePart, rows: Iterable[tuple[str, str, str, bool]]) -> None:
        """Add a part of the table that the ledger lacks. Its rows replace others for the same document and question.

        Args:
            part: the part.
            rows: id, document, question, and whether the row failed.
        """
        with self._transaction() as connection:
            _add_part(connection, part)
            for row_id, document, question, failed in rows:
                key = (_to_storable(document), _hash_question(question))
                _remove_row(connection, *key)
                connection.execute(
                    "INSERT INTO rows (id, document, question, failed, part) VALUES (?, ?, ?, ?, ?)",
                    (row_id, *key, failed, part.number),
                )
                connection.execute("INSERT OR IGNORE INTO documents VALUES (?, '', 0)", key[:1])

    def close(self) -> None:
        """Close the SQLite file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _locked_connection(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._convert_errors():
            yield self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._locked_connection() as connection, connection:  # it commits, or rolls back after an error
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            is_foreign = type(error) in {sqlite3.DatabaseError, UnknownSchemaError} or not isinstance(
                error, OSError | sqlite3.Error
            )
            raise CorpusError(
                f"the ledger {self.path} {'is damaged or foreign' if is_foreign else 'cannot be used'}: {error}",
                hint="Remove it and run the same command again: it is built again from the table."
                if is_foreign
                else "Free some disk space and run the same command again. Finished documents are not lost.",
            ) from error


def _remove_row(connection: sqlite3.Connection, document: str, question: str) -> None:
    """Delete the row for a question, if there is one. If it is in a part, the part becomes stale."""
    key = (document, question)
    connection.execute(
        "UPDATE parts SET stale = 1 WHERE number IN (SELECT part FROM rows WHERE document = ? AND question = ?)", key
    )
    connection.execute("DELETE FROM rows WHERE document = ? AND question = ?", key)


def _add_part(connection: sqlite3.Connection, part: TablePart, *, stale: bool = False) -> None:
    connection.execute(
        "INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?)",
        (part.number, part.rows, part.failed, part.bytes, part.sha256, stale),
    )


def _hash_question(question: str) -> str:
    """Return a short hash of a question, which is its key in the ledger."""
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _to_storable(name: str) -> str:
    """Return a name that SQLite can store: lone surrogates become question marks."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode()
