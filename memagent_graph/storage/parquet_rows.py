"""Reads rows of untrusted Parquet files. A text that many rows share is in memory only once.

In a file of a few kilobytes, millions of rows can share a text of several megabytes. So texts are read with dictionary
encoding, and unpacked a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from memagent_graph.errors import load_extra

_BATCH_ROWS: Final = 64
_MAX_SLICE_BYTES: Final = 64 << 20
_MAX_GROUP_BYTES: Final = 4 << 30
_MAX_GROUP_VALUES: Final = 1 << 26
"""Maximum values in a row group, over all columns. An empty value needs no space in the file, but 8 bytes in memory."""


def load_pyarrow(extra: str, needed_for: str) -> Any:
    """Return the module `pyarrow`, with `pyarrow.parquet` loaded.

    Raises:
        MissingExtraError: pyarrow is not installed; `extra` installs it.
    """
    load_extra("pyarrow.parquet", extra, needed_for)
    return load_extra("pyarrow", extra, needed_for)


def open_parquet(file: Any, extra: str, needed_for: str) -> Any:
    """Return a `pyarrow.parquet.ParquetFile` that reads texts as dictionaries; `file` is a path or an open file.

    It raises `MissingExtraError` as `load_pyarrow` does, and Arrow's errors if the file cannot be read.
    """
    parquet = load_pyarrow(extra, needed_for).parquet
    metadata = parquet.read_metadata(file)
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    return parquet.ParquetFile(file, metadata=metadata, read_dictionary=paths)


def require_readable_row_groups(file: Any) -> None:
    """Raise `ValueError` if a row group of a file is too large to be read."""
    for group in map(file.metadata.row_group, range(file.num_row_groups)):
        value_count = sum(group.column(index).num_values for index in range(group.num_columns))
        if group.total_byte_size > _MAX_GROUP_BYTES or value_count > _MAX_GROUP_VALUES:
            raise ValueError("it has a row group that is too large to read")


def iter_rows(file: Any, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the rows of a file in slices that are small after unpacking, or have one row."""
    for group in range(file.num_row_groups):  # one at a time, because Arrow does not join dictionaries in lists
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
            row_count = max(1, _MAX_SLICE_BYTES // max(1, batch.nbytes))
            yield from (batch.slice(start, row_count) for start in range(0, len(batch), row_count))
