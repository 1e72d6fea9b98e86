"""Writes new rows to the ledger, and from there to the parts of the table, exactly once even after kills.

Parts never change: a part with replaced rows is written again under a new number. A run may be killed after any of
these steps:

1. A part's file is written. Until the manifest lists it, it does not belong to the table, and the next run removes it.
2. The manifest lists the part, and no longer lists a part that it replaces.
3. The ledger records the part. After a kill before that, the next run finds the part in the manifest and adopts it.

So the manifest decides which rows are in the table, and the ledger has all other rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from memagent_corpus.corpus_ledger import CorpusLedger
from memagent_corpus.corpus_rows import CorpusRow, list_column_values
from memagent_corpus.table_folder import TableFolder, TablePart
from memagent_corpus.typed_columns import TypedColumn
from memagent_graph.errors import CorpusError

LEDGER_FILE: Final = "ledger.sqlite"
_MAX_PART_BYTES: Final = 64 * 2**20
_MAX_WAIT_SECONDS: Final = 600.0


class TableWriter:
    """Adds rows to the ledger and writes parts. It is thread-safe.

    The caller must hold the lock of the table (`corpus_run.lock_table`), and call `recover` first.

    Args:
        table: the table to write, which this run has taken over.
        columns: the typed columns of its rows, if the answers have a schema.
        rows_per_part: rows in each part. The last part has fewer.
        delete_checkpoints: called with the ids of rows once they are in a part, if the checkpoints are shared with
            other machines. Until then, another machine needs the checkpoints to recover these rows.

    Raises:
        CorpusError: the ledger cannot be opened. All methods raise it if the ledger or the table cannot be written, or
            if another run has taken over.
    """

    def __init__(
        self,
        table: TableFolder,
        columns: Sequence[TypedColumn],
        rows_per_part: int,
        delete_checkpoints: Callable[[Iterable[str]], None] | None,
    ) -> None:
        self.table, self._columns, self._delete_checkpoints = table, columns, delete_checkpoints
        self._rows_per_part = max(1, rows_per_part)
        self._count_lock, self._write_lock = threading.Lock(), threading.Lock()
        self._waiting_rows = self._waiting_bytes = 0
        self._last_write_time = time.monotonic()
        self.ledger = CorpusLedger(table.work_folder / LEDGER_FILE)

    def recover(self, parts: Sequence[TablePart], *, drop_damaged: bool = False) -> None:
        """Make ledger and table agree after a kill, a lost ledger, or writes from another machine.

        Args:
            parts: the parts in the manifest.
            drop_damaged: remove damaged and missing parts from the table. Their documents count as not read.

        Raises:
            CorpusError: a part is damaged or missing.
        """
        if damaged_parts := self.table.find_damaged_parts(parts):
            if not drop_damaged:
                raise CorpusError(
                    f"{len(damaged_parts)} of the {len(parts)} parts of {self.table.display_name} are missing or "
                    f"differ from what was written: {', '.join(part.name for part in damaged_parts[:3])}",
                    hint="Restore them from a copy, or read their documents again with --retry-failed.",
                )
            parts = [part for part in parts if part not in damaged_parts]
            self.table.publish(parts)
        ledger_parts = self.ledger.list_parts()
        for part in ledger_parts:
            if part not in parts:
                self.ledger.replace_part(part, None)
        new_parts = [part for part in parts if part not in ledger_parts]
        for part in new_parts:
            rows = self.table.read_part_rows(part, ["id", "document", "question", "error"])
            self.ledger.adopt_part(
                part, ((row["id"], row["document"], row["question"], row["error"] is not None) for row in rows)
            )
        if self._delete_checkpoints and new_parts:  # a lost machine may have stopped before it deleted these
            self._delete_checkpoints(str(row["id"]) for row in self.table.read_part_rows(new_parts[-1], ["id"]))
        self.table.remove_unlisted_files()
        self._rewrite_stale_parts()
        self._count_waiting_rows()

    def add_rows(self, document: str, version: str, rows: Sequence[CorpusRow], questions: Sequence[str]) -> None:
        """Add a finished document's rows to the ledger (`CorpusLedger.store_rows`). They are safe when this returns."""
        added_bytes = self.ledger.store_rows(document, version, rows, questions)
        with self._count_lock:
            self._waiting_rows, self._waiting_bytes = self._waiting_rows + len(rows), self._waiting_bytes + added_bytes

    @property
    def is_part_due(self) -> bool:
        """Whether there are enough rows or bytes for a part, or rows that have waited for ten minutes."""
        is_old = self._waiting_rows and time.monotonic() - self._last_write_time >= _MAX_WAIT_SECONDS
        return self._waiting_rows >= self._rows_per_part or self._waiting_bytes >= _MAX_PART_BYTES or bool(is_old)

    def write_parts(self, *, all_rows: bool = False) -> None:
        """Write the rows of the ledger as parts. With `all_rows`, also write a last part that is not full."""
        with self._write_lock:  # a cancelled task leaves its thread running
            if all_rows:
                self._count_waiting_rows()
            while self._waiting_rows and (all_rows or self.is_part_due):
                self._write_part()
                self._count_waiting_rows()
                self._last_write_time = time.monotonic()
            self._rewrite_stale_parts()

    def _count_waiting_rows(self) -> None:
        with self._count_lock:
            self._waiting_rows, self._waiting_bytes = self.ledger.count_waiting_rows()

    def _write_part(self) -> None:
        """Write the oldest rows of the ledger as a part."""
        parts, last_number, ids = self.ledger.list_parts(), -1, list[str]()

        def iter_rows() -> Iterator[dict[str, Any]]:
            nonlocal last_number
            for row_number, row in self.ledger.iter_waiting_rows(self._rows_per_part):
                last_number = row_number
                if row.chunks:
                    ids.append(row.id)
                yield list_column_values(row, self._columns)

        part = self.table.write_part(_choose_part_number(parts), iter_rows(), self._columns)
        if part is None:
            return
        self.table.publish([*parts, part])
        if self._delete_checkpoints:
            self._delete_checkpoints(ids)
        self.ledger.mark_written(part, last_number)

    def _rewrite_stale_parts(self) -> None:
        """Write parts again under new numbers, without the rows that newer rows have replaced."""
        for part in self.ledger.list_parts(only_stale=True):
            parts, ids = self.ledger.list_parts(), self.ledger.list_ids(part)
            rows = (row for row in self.table.read_part_rows(part) if row["id"] in ids)
            new_part = self.table.write_part(_choose_part_number(parts), rows, self._columns)
            other_parts = [other_part for other_part in parts if other_part != part]
            self.table.publish(other_parts if new_part is None else [*other_parts, new_part])
            self.ledger.replace_part(part, new_part)
            self.table.remove_unlisted_files()


def _choose_part_number(parts: Sequence[TablePart]) -> int:
    return max((part.number for part in parts), default=-1) + 1
