"""Writes new rows to the ledger, and from there to the parts of the table, exactly once even after kills."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from memagent_corpus.corpus_ledger import CorpusLedger
from memagent_corpus.corpus_rows import Row
from memagent_corpus.table_folder import TableFolder, part_name

LEDGER: Final = "ledger.sqlite"
_PART_BYTES: Final = 64 * 2**20
_PART_SECONDS: Final = 600.0


class TableWriter:
    """Adds rows to the ledger and writes parts. It is thread-safe.

    The caller must hold the lock of the table (`corpus_run.exclusive`) and must have called `TableFolder.take_over`.

    Args:
        table: where the rows are written.
        rows_per_part: rows in each part. The last part has fewer.

    Raises:
        CorpusError: the ledger cannot be opened. All methods raise it if the ledger or the table cannot be written.
    """

    def __init__(self, table: TableFolder, rows_per_part: int = 10_000) -> None:
        self.table = table
        self.ledger = CorpusLedger(table.work / LEDGER)
        self._rows_per_part = max(1, rows_per_part)
        self._counting, self._writing = threading.Lock(), threading.Lock()
        self._rows = self._bytes = 0
        self._last_part_written = time.monotonic()
        self.delete_checkpoints: Callable[[Iterable[str]], None] | None = None
        """Called with the ids of rows once they are in a part, if the checkpoints are shared with other machines. Until
        then, another machine needs the checkpoints to recover these rows."""

    def recover(self) -> None:
        """Make the ledger and the table consistent after a kill, a lost ledger, or writes from another machine."""
        ledger, table = self.ledger, self.table
        manifest = table.manifest()
        listed = [part.number for part in manifest.parts] if manifest else []
        unlisted = table.unlisted_parts()
        for number in ledger.unwritten_parts():
            if number in (*listed, *unlisted):
                in_table = {str(row["id"]) for row in table.rows_of(part_name(number), ["id"])}
                if in_table != {row.id for row in ledger.rows_of(number)}:
                    ledger.release(number)
                    continue
            self._write(number)
        known = ledger.parts() | set(ledger.replaced())
        adopted = sorted({*listed, *unlisted} - known)
        for number in adopted:
            if number not in listed:
                table.add_to_manifest(number)
            rows = table.rows_of(part_name(number), ["id", "document", "question", "error"])
            ledger.adopt(
                number, ((row["id"], row["document"], row["question"], row["error"] is not None) for row in rows)
            )
        if self.delete_checkpoints and adopted:  # a lost machine may have stopped before it deleted these
            self.delete_checkpoints(str(row["id"]) for row in table.rows_of(part_name(adopted[-1]), ["id"]))
        self._remove_replaced()
        self._count()

    def add(self, document: str, version: str, rows: Sequence[Row]) -> None:
        """Add a finished document's rows to the ledger. They are safe when this returns."""
        size = self.ledger.finish(document, version, rows)
        with self._counting:
            self._rows, self._bytes = self._rows + len(rows), self._bytes + size

    @property
    def is_part_due(self) -> bool:
        """Whether there are enough rows or bytes for a part, or rows that have waited for ten minutes."""
        is_old = self._rows and time.monotonic() - self._last_part_written >= _PART_SECONDS
        return self._rows >= self._rows_per_part or self._bytes >= _PART_BYTES or bool(is_old)

    def write_parts(self, *, all_rows: bool = False) -> None:
        """Write the rows of the ledger as parts. With `all_rows`, also write a last part that is not full."""
        with self._writing:  # a cancelled task leaves its thread running
            ledger, table = self.ledger, self.table
            if all_rows:
                self._count()
            while self._rows >= self._rows_per_part or (self._rows and (all_rows or self.is_part_due)):
                manifest = table.manifest()
                listed = max((part.number for part in manifest.parts), default=-1) if manifest else -1
                number = max(ledger.last_part(), listed) + 1
                ledger.assign(number, self._rows_per_part)
                self._write(number)
                self._count()
                self._last_part_written = time.monotonic()
            self._remove_replaced()

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()

    def _count(self) -> None:
        with self._counting:
            self._rows, self._bytes = self.ledger.unassigned()

    def _write(self, number: int) -> None:
        self.table.write_part(number, self.ledger.rows_of(number))
        if self.delete_checkpoints:
            self.delete_checkpoints(row.id for row in self.ledger.rows_of(number) if row.chunks)
        self.ledger.mark_written(number)

    def _remove_replaced(self) -> None:
        for number, ids in self.ledger.replaced().items():
            self.table.remove_rows(number, ids)
            self.ledger.mark_removed(number)
