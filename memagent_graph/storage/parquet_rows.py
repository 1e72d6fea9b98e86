"""Rows of Parquet files that somebody else may have written: a text that many of them share is in memory once.

A file of a few kilobytes can say that millions of rows have the same text of megabytes. So texts are read as
dictionaries, and unpacked a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from memagent_graph.extra_modules import extra_module

_ROWS_AT_ONCE: Final = 16
_SMALL_BYTES: Final = 64 << 20


def open_parquet(file: Any, extra: str, needed_for: str) -> Any:
    """Return a `pyarrow.parquet.ParquetFile` whose texts are dictionaries; `file` is a path or an open file.

    Raises:
        MissingExtraError: pyarrow is not installed; `extra` installs it.
    """
    parquet = extra_module("pyarrow.parquet", extra, needed_for)
    metadata = parquet.read_metadata(file)
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    return parquet.ParquetFile(file, metadata=metadata, read_dictionary=paths)


def row_parts(file: Any, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield a file's rows as small batches: one row, if all of its neighbours' texts could be large when unpacked."""
    for group in range(file.num_row_groups):  # one by one, because Arrow does not join dictionaries in lists
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns):
            rows = len(batch) if batch.nbytes * len(batch) <= _SMALL_BYTES else 1
            yield from (batch.slice(first, rows) for first in range(0, len(batch), rows))
