"""Reads rows of untrusted Parquet files. A text that many rows share is in memory only once.

In a file of a few kilobytes, millions of rows can share a text of several megabytes. So texts are read with dictionary
encoding, and unpacked a few rows at a time. The items of a row's list can share a text, too, or be nulls: the size of
lists is added up before they are unpacked.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from memagent_graph.errors import load_extra

_BATCH_ROWS: Final = 64
_MAX_SLICE_BYTES: Final = 64 << 20
_MAX_GROUP_BYTES: Final = 4 << 30
_MAX_GROUP_VALUES: Final = 1 << 26
"""Maximum values in a row group, over all columns. An empty value needs no space in the file, but 8 bytes in memory.
Lists can have more items if they need a byte each in the file, such as the numbers of embeddings."""
_MAX_LIST_BYTES: Final = 256 << 20
_OBJECT_BYTES: Final = 256
_VALUE_BYTES: Final = 32
"""The approximate memory of a struct or list in a list, and of another value without its text."""
_NUMBER_BYTES: Final = 8
"""The same of a number, besides its bytes in Arrow. A large one needs 32, which multiplies the limit by three."""


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
    """Yield the rows of a file in slices that are small after unpacking, or have one row.

    Raises:
        ValueError: a row has too large lists.
    """
    for group in range(file.num_row_groups):  # one at a time, because Arrow does not join dictionaries in lists
        _require_readable_lists(file, group, columns)
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
            has_large_lists = _measure_lists(batch) > _MAX_LIST_BYTES
            row_count = 1 if has_large_lists else max(1, _MAX_SLICE_BYTES // max(1, batch.nbytes))
            for start in range(0, len(batch), row_count):
                rows = batch.slice(start, row_count)
                if has_large_lists:
                    require_small_lists(rows)
                yield rows


def _require_readable_lists(file: Any, group_index: int, columns: Sequence[str] | None) -> None:
    group = file.metadata.row_group(group_index)
    chunks = [group.column(i) for i in range(group.num_columns) if file.schema.column(i).max_repetition_level]
    read_chunks = [chunk for chunk in chunks if columns is None or chunk.path_in_schema.split(".")[0] in columns]
    max_items = max([_MAX_GROUP_VALUES, *(chunk.total_compressed_size for chunk in read_chunks)])
    if sum(chunk.num_values for chunk in read_chunks) > max_items:
        raise ValueError("it has lists with too many items in a row group")


def require_small_lists(rows: Any) -> None:
    """Raise `ValueError` if the lists in a record batch need too much memory after unpacking."""
    if _measure_lists(rows) > _MAX_LIST_BYTES:
        raise ValueError(f"the lists of a row need more than {_MAX_LIST_BYTES:,} bytes of memory")


def _measure_lists(rows: Any) -> int:
    arrow: Any = importlib.import_module("pyarrow")
    columns = [getattr(column, "storage", column) for column in rows.columns]
    return sum(_measure_values(arrow, column) for column in columns if arrow.types.is_nested(column.type))


def _measure_values(arrow: Any, array: Any) -> int:
    """Return the approximate memory of the values of an array after unpacking."""
    array, types = getattr(array, "storage", array), arrow.types
    if types.is_nested(array.type):
        if types.is_map(array.type):
            start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
            children = [child.slice(start, end - start) for child in (array.keys, array.items)]  # of the whole column
        else:
            children = array.flatten() if types.is_struct(array.type) else [array.flatten()]
        return _OBJECT_BYTES * len(array) + sum(_measure_values(arrow, child) for child in children)
    is_number = types.is_integer(array.type) or types.is_floating(array.type) or types.is_boolean(array.type)
    size = (_NUMBER_BYTES if is_number else _VALUE_BYTES) * len(array)
    if types.is_dictionary(array.type):
        compute = importlib.import_module("pyarrow.compute")  # the import of pyarrow does not load it
        counts = array.indices.value_counts()  # a whole row group shares the dictionary
        lengths = compute.binary_length(array.dictionary.take(counts.field("values"))).cast("int64")
        return size + int(compute.sum(compute.multiply(lengths, counts.field("counts"))).as_py() or 0)
    return size + int(array.nbytes)
