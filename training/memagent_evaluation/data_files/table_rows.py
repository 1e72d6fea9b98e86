"""Rows of data files: JSON lines, JSON lists, Parquet files, Hugging Face dataset folders, and CSV files.

JSON files are indexed by the byte offsets of their rows, so that a list of several gigabytes is read like JSON lines.
One row is in memory at a time; only CSV files are loaded completely.
"""

from __future__ import annotations

import csv
import functools
import json
import mmap
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, Final, TypeAlias

from memagent_graph.documents.allowed_paths import resolve_below
from memagent_graph.errors import DocumentError, EvaluationError
from memagent_graph.plain_text import format_count
from memagent_graph.storage.bounded_files import open_regular_file, parse_json, read_json_file
from memagent_graph.storage.parquet_rows import (
    load_pyarrow,
    open_parquet,
    require_readable_row_groups,
    require_small_lists,
)

TableRow: TypeAlias = dict[str, Any]

_JSON_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]', re.DOTALL)
"""A string or a structural character. Possessive, so that a string of megabytes causes no backtracking."""
_JSON_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_WRAPPED_LIST: Final = re.compile(
    rb"\s*\{\s*(?:" + _JSON_STRING + rb"\s*:\s*(?:" + _JSON_STRING + rb'|[-+.\w]+)\s*,\s*)*+"data"\s*:\s*\[', re.DOTALL
)
_LEADING_SPACE: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*")
_PARQUET_MAGIC: Final = b"PAR1"
_DELIMITERS: Final = {".csv": ",", ".tsv": "\t"}
_MAX_CELL_CHARACTERS: Final = 2**31 - 1
_FORMAT_HINT: Final = "Use JSON lines, a JSON list, CSV or Parquet, in UTF-8, with a row for each question."


class TableRows:
    """The rows of several files, one after another, under one index."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources
        self._source_ends = list(accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self._source_ends[-1]

    def __getitem__(self, index: int, /) -> TableRow:
        source_index, row_index = _locate(self._source_ends, index)
        try:
            return self._sources[source_index][row_index]
        except (ValueError, OverflowError) as error:  # a text that is not UTF-8, or a date out of Python's range
            raise _make_unreadable_error(self.get_location(index), error) from error

    def get_location(self, index: int) -> str:
        """Return the file and line of a row, for messages."""
        source_index, row_index = _locate(self._source_ends, index)
        return self._sources[source_index].get_location(row_index)


def open_rows(paths: Sequence[Path]) -> TableRows:
    """Return the rows of files and dataset folders. The content shows the format; CSV files are known by their suffix.

    Raises:
        EvaluationError: a file cannot be read, has no rows, or has an unknown format.
        MissingExtraError: a format needs pyarrow (the extra "eval").
    """
    sources = [_open_source(path) for path in paths]
    for path, source in zip(paths, sources, strict=True):
        if not len(source):
            raise EvaluationError(f"{path} has no rows", hint=_EMPTY_HINTS.get(type(source), _FORMAT_HINT))
    return TableRows(sources)


class JSONRows:
    """The objects of a file of JSON lines, or of a JSON list, which may be in an object under "data"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts, self._ends = array("Q"), array("Q")
        with _map_file(path) as content:
            start = _skip_space(content, 0)
            wrapper = None if _has_second_object(content, start) else _WRAPPED_LIST.match(content, start)
            if wrapper or content[start : start + 1] == b"[":
                self._index_list(content, wrapper.end() if wrapper else start + 1)
            elif content[start : start + 1] == b"{":
                self._index_lines(content, start)
            else:
                first_bytes = content[start : start + 20]
                problem = (
                    f"is neither JSON lines nor a JSON list: it begins with {first_bytes!r}"
                    if first_bytes
                    else "is empty"
                )
                raise EvaluationError(f"{path} {problem}", hint=_FORMAT_HINT)

    def _index_list(self, content: mmap.mmap, start: int) -> None:
        depth, entry_start = 1, start
        for token in _JSON_TOKEN.finditer(content, start):
            character = content[token.start()]
            depth += (character in b"[{") - (character in b"]}")
            if depth == 0 or (depth == 1 and character == ord(",")):
                row_start, end = _skip_space(content, entry_start), token.start()
                if row_start < end or depth > 0 or self._starts:
                    self._starts.append(row_start)
                    self._ends.append(max(row_start, end))
                entry_start = token.end()
            if depth == 0:
                end = _skip_space(content, token.end())
                if content[end : end + 1] not in {b"", b",", b"}"}:
                    raise EvaluationError(f"{self.path} has text after its list", hint=_FORMAT_HINT)
                return
        raise EvaluationError(
            f"{self.path} is cut off after {format_count(len(self._starts), 'entry', 'entries')}",
            hint="Copy or download the file again.",
        )

    def _index_lines(self, content: mmap.mmap, line_start: int) -> None:
        while line_start < len(content):
            end = content.find(b"\n", line_start)
            end = len(content) if end < 0 else end
            row_start = _skip_space(content, line_start)
            if row_start < end:
                self._starts.append(row_start)
                self._ends.append(end)
            line_start = end + 1

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int, /) -> TableRow:
        start, end = self._starts[index], self._ends[index]
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                content = file.read(end - start)
                row = parse_json(content)
                if b"\\ud" in content.lower():
                    json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair cannot be encoded
        except OSError as error:
            raise _make_unreadable_error(self.path, error) from error
        except ValueError as error:
            raise EvaluationError(
                f"{self.get_location(index)} is not valid JSON: {error}",
                hint="Correct or remove it; the file must be UTF-8.",
            ) from error
        if not isinstance(row, dict):
            raise EvaluationError(
                f"{self.get_location(index)} is not a JSON object but {type(row).__name__}",
                hint="Correct or remove it.",
            )
        return row

    def get_location(self, index: int) -> str:
        """Return the file and the line."""
        with _map_file(self.path) as content:
            line, newline = 1, content.find(b"\n", 0, self._starts[index])
            while newline >= 0:
                line, newline = line + 1, content.find(b"\n", newline + 1, self._starts[index])
        return f"{self.path}, line {line}"


class ParquetRows:
    """The rows of a Parquet file; two of its row groups are in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            require_readable_row_groups(file)
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            self._group_ends = list(accumulate(group.num_rows for group in groups))
        self._group = functools.lru_cache(maxsize=2)(self._read_group)

    def __len__(self) -> int:
        return self._group_ends[-1] if self._group_ends else 0

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """Yield the file, opened each time, because an open file is not thread-safe."""
        try:
            with open_parquet(self.path, "eval", f"reading {self.path.name}") as file:
                yield file
        except (OSError, ValueError) as error:
            raise _make_unreadable_error(self.path, error) from error

    def _read_group(self, group_index: int) -> Any:
        with self._open() as file:
            return file.read_row_group(group_index)

    def __getitem__(self, index: int, /) -> TableRow:
        group_index, row_index = _locate(self._group_ends, index)
        return _read_row(self._group(group_index), row_index)

    def get_location(self, index: int) -> str:
        """Return the file and the row."""
        return f"{self.path}, row {index + 1}"


class DatasetRows:
    """The rows of a folder that `datasets.Dataset.save_to_disk` wrote, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        pa = load_pyarrow("eval", f"reading the dataset folder {path.name}")
        try:
            names = [data_file["filename"] for data_file in read_json_file(path / "state.json")["_data_files"]]
            files = [resolve_below(path, name, hint="Choose another dataset folder.") for name in names]
            tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
            self._table = pa.concat_tables(tables)
        except (DocumentError, OSError, ValueError, KeyError, TypeError) as error:
            raise _make_unreadable_error(path, error) from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int, /) -> TableRow:
        return _read_row(self._table, index)

    def get_location(self, index: int) -> str:
        """Return the folder and the row."""
        return f"{self.path}, row {index + 1}"


class CSVRows:
    """The rows of a CSV or TSV file with a header row. A cell that is a JSON list, such as ["a", "b"], is a list."""

    def __init__(self, path: Path) -> None:
        self.path = path
        csv.field_size_limit(_MAX_CELL_CHARACTERS)
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, delimiter=_DELIMITERS[path.suffix.lower()], strict=True)
                self._names = next(reader, [])
                self._rows = [(reader.line_num, cells) for cells in reader if cells]
        except csv.Error as error:
            raise _make_unreadable_error(f"{path}, line {reader.line_num},", error) from error
        except (OSError, ValueError) as error:
            raise _make_unreadable_error(path, error) from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> TableRow:
        cells = self._rows[index][1]
        if any(map(str.strip, cells[len(self._names) :])):
            raise EvaluationError(
                f"{self.get_location(index)} has more cells than the header",
                hint="Put quotes around cells with commas.",
            )
        return {name: _parse_cell(cell) for name, cell in zip_longest(self._names, cells[: len(self._names)])}

    def get_location(self, index: int) -> str:
        """Return the file and the row's last line."""
        return f"{self.path}, line {self._rows[index][0]}"


RowSource: TypeAlias = JSONRows | ParquetRows | DatasetRows | CSVRows
"""The rows of one file, in a fixed order. Each row is read when it is requested."""
_EMPTY_HINTS: Final[dict[type, str]] = {
    DatasetRows: "Choose another dataset folder.",
    CSVRows: "Begin it with a header row.",
}


def _parse_cell(text: str | None) -> Any:
    if text is not None and text.startswith("["):
        try:
            return parse_json(text)
        except ValueError:
            return text
    return text


def _open_source(path: Path) -> RowSource:
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            raise EvaluationError(
                f"{path} holds several splits of a dataset",
                hint=f"Choose one: {', '.join(str(state.parent) for state in sorted(path.glob('*/state.json')))}.",
            )
        return DatasetRows(path)
    try:
        with open_regular_file(path) as file:
            first_bytes = file.read(len(_PARQUET_MAGIC))
    except OSError as error:
        raise _make_unreadable_error(path, error) from error
    if first_bytes == _PARQUET_MAGIC:
        return ParquetRows(path)
    return CSVRows(path) if path.suffix.lower() in _DELIMITERS else JSONRows(path)


@contextmanager
def _map_file(path: Path) -> Iterator[mmap.mmap]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content
    except OSError as error:
        raise _make_unreadable_error(path, error) from error
    except ValueError as error:  # an empty file cannot be mapped
        raise EvaluationError(f"{path} is empty", hint=_FORMAT_HINT) from error


def _has_second_object(content: mmap.mmap, start: int) -> bool:
    """Return whether the line at `start` ends with an object, and another one begins in the next lines."""
    line_end = content.find(b"\n", start)
    if line_end < 0 or not content[max(start, line_end - 8) : line_end].rstrip().endswith(b"}"):
        return False
    next_start = _skip_space(content, line_end)
    return content[next_start : next_start + 1] == b"{"


def _skip_space(content: mmap.mmap, start: int) -> int:
    match = _LEADING_SPACE.match(content, start)
    return match.end() if match else start


def _locate(ends: Sequence[int], index: int) -> tuple[int, int]:
    """Return the index of the part that has a row, and the row's index in it; `ends` are the ends of the parts."""
    part_index = bisect_right(ends, index)
    return part_index, index - (ends[part_index - 1] if part_index else 0)


def _read_row(table: Any, index: int) -> TableRow:
    table_row = table.slice(index, 1)
    for batch in table_row.to_batches():
        require_small_lists(batch)
    row: TableRow = table_row.to_pylist()[0]
    return row


def _make_unreadable_error(path: Path | str, error: Exception) -> EvaluationError:
    return EvaluationError(f"{path} cannot be read: {error}", hint="Check the path, and that the file is complete.")
