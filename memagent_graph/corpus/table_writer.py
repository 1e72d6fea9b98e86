"""Writes a table from its ledger: rows are entered there, and go to parts exactly once, whatever is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from memagent_graph.corpus.corpus_ledger import CorpusLedger
from memagent_graph.corpus.corpus_rows import Row
from memagent_graph.corpus.table_folder import TableFolder, part_name

LEDGER: Final = "ledger.sqlite"
_PART_BYTES: Final = 64 * 2**20
_PART_SECONDS: Final = 600.0


class TableWriter:
    """Enters rows and writes parts. The caller holds the table (`corpus_run.exclusive`), and has taken it over.

    Any thread may call; parts are written by one at a time.

    Args:
        table: where the rows go.
        rows_per_part: how many rows a part has; the last one has fewer.

    Raises:
        CorpusError: the ledger cannot be opened; from any method, it or the table cannot be written.
    """

    def __init__(self, table: TableFolder, rows_per_part: int = 10_000) -> None:
        self.table = table
        self.ledger = CorpusLedger(table.work / LEDGER)
        self._rows_per_part = max(1, rows_per_part)
        self._counting, self._writing = threading.Lock(), threading.Lock()
        self._rows = self._bytes = 0
        self._wrote = time.monotonic()
        self.forget: Callable[[Iterable[str]], None] | None = None
        """Called with the ids of rows that a part has, if their checkpoints outlive the folder for work: until then,
        another machine would need them to have these rows without a read."""

    def recover(self) -> None:
        """Bring table and ledger together after a kill, after the ledger was lost, or after another machine wrote."""
        ledger, table = self.ledger, self.table
        manifest = table.manifest()
        listed = [part.number for part in manifest.parts] if manifest else []
        unlisted = table.unlisted()
        for number in ledger.unwritten_parts():
            if number in (*listed, *unlisted):
                there = {str(row["id"]) for row in table.rows_of(part_name(number), ["id"])}
                if there != {row.id for row in ledger.rows_of(number)}:
                    ledger.release(number)
                    continue
            self._write(number)
        known = ledger.parts() | set(ledger.replaced())
        adopted = sorted({*listed, *unlisted} - known)
        for number in adopted:
            if number not in listed:
                table.list_part(number)
            rows = table.rows_of(part_name(number), ["id", "document", "question", "error"])
            ledger.adopt(
                number, ((row["id"], row["document"], row["question"], row["error"] is not None) for row in rows)
            )
        if self.forget and adopted:  # a machine that was lost may not have removed those of its last part
            self.forget(str(row["id"]) for row in table.rows_of(part_name(adopted[-1]), ["id"]))
        self._remove_replaced()
        self._count()

    def enter(self, document: str, version: str, rows: Sequence[Row]) -> None:
        """Enter a document's rows; they are safe when this returns."""
        size = self.ledger.finish(document, version, rows)
        with self._counting:
            self._rows, self._bytes = self._rows + len(rows), self._bytes + size

    @property
    def is_part_due(self) -> bool:
        """Whether there are enough rows for a part, or some that have waited long."""
        is_old = self._rows and time.monotonic() - self._wrote >= _PART_SECONDS
        return self._rows >= self._rows_per_part or self._bytes >= _PART_BYTES or bool(is_old)

    def write_parts(self, *, all_rows: bool = False) -> None:
        """Write the rows of the ledger as parts; with `all_rows`, also those that do not fill one."""
        with self._writing:  # a thread outlives the task that waited for it
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
                self._wrote = time.monotonic()
            self._remove_replaced()

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()

    def _count(self) -> None:
        with self._counting:
            self._rows, self._bytes = self.ledger.unassigned()

    def _write(self, number: int) -> None:
        self.table.write_part(number, self.ledger.rows_of(number))
        if self.forget:
            self.forget(row.id for row in self.ledger.rows_of(number) if row.chunks)
        self.ledger.written(number)

    def _remove_replaced(self) -> None:
        for number, ids in self.ledger.replaced().items():
            self.table.remove_rows(number, ids)
            self.ledger.removed(number)
