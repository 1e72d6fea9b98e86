"""Rows of data files: JSON lines, JSON lists, Parquet files, Hugging Face dataset folders, and CSV files.

JSON files are indexed by the byte offsets of their rows, so that a list of several gigabytes works like lines. One row
is in memory at a time, except of CSV files, which are read whole.
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
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeAlias

from memagent_graph.documents.allowed_paths import resolve_below
from memagent_graph.errors import DocumentError, EvaluationError
from memagent_graph.storage.bounded_files import open_regular_file, parse_json, read_json_file
from memagent_graph.storage.parquet_rows import load_pyarrow, open_parquet, require_readable_row_groups

TableRow: TypeAlias = dict[str, Any]

_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]', re.DOTALL)
"""A whole string, or a structural character. Possessive, so that a string of megabytes causes no backtracking."""
_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_WRAPPED_LIST: Final = re.compile(
    rb"\s*\{\s*(?:" + _STRING + rb"\s*:\s*(?:" + _STRING + rb'|[-+.\w]+)\s*,\s*)*+"data"\s*:\s*\[', re.DOTALL
)
_SPACE: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*")
_PARQUET: Final = b"PAR1"
_DELIMITERS: Final = {".csv": ",", ".tsv": "\t"}
_MAX_CELL_SIZE: Final = 2**31 - 1
_FORMS: Final = "Use JSON lines, a JSON list, CSV or Parquet, in UTF-8, with a row for each question."


class TableRows:
    """The rows of several files, one after another, with one numbering."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources
        self._ends = list(accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int, /) -> TableRow:
        source, row = _locate(self._ends, index)
        return self._sources[source][row]

    def location(self, index: int) -> str:
        """Return the file and line of a row, for messages."""
        source, row = _locate(self._ends, index)
        return self._sources[source].location(row)


def open_rows(paths: Sequence[Path]) -> TableRows:
    """Return the rows of files and dataset folders. The content determines the format, and for CSV the name's ending.

    Raises:
        EvaluationError: a file cannot be read, has no rows, or has an unknown format.
        MissingExtraError: a format needs pyarrow (the extra "eval").
    """
    return TableRows([_open_one(path) for path in paths])


class JsonRows:
    """The objects of a file of JSON lines, or of a JSON list, which may be in an object under "data"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts, self._ends = array("Q"), array("Q")
        with _map_file(path) as content:
            wrapped = _WRAPPED_LIST.match(content)
            begin = _end_of_space(content, 0)
            if wrapped or content[begin : begin + 1] == b"[":
                self._index_list(content, wrapped.end() if wrapped else begin + 1)
            elif content[begin : begin + 1] == b"{":
                self._index_lines(content, begin)
            else:
                beginning = content[begin : begin + 20]
                problem = (
                    f"is neither JSON lines nor a JSON list: it begins with {beginning!r}" if beginning else "is empty"
                )
                raise EvaluationError(f"{path} {problem}", hint=_FORMS)
        if not self._starts:
            raise EvaluationError(f"{path} has no rows", hint=_FORMS)

    def _index_list(self, content: mmap.mmap, begin: int) -> None:
        depth, start = 1, begin
        for token in _TOKEN.finditer(content, begin):
            mark = content[token.start()]
            depth += (mark in b"[{") - (mark in b"]}")
            if depth == 0 or (depth == 1 and mark == ord(",")):
                self._add(content, start, token.start(), last=depth == 0)
                start = token.end()
            if depth == 0:
                return
        raise EvaluationError(
            f"{self.path} is cut off after {len(self._starts)} entries", hint="Copy or download the file again."
        )

    def _add(self, content: mmap.mmap, start: int, end: int, *, last: bool) -> None:
        start = _end_of_space(content, start)
        if start < end or not last or self._starts:
            self._starts.append(start)
            self._ends.append(max(start, end))

    def _index_lines(self, content: mmap.mmap, begin: int) -> None:
        while begin < len(content):
            end = content.find(b"\n", begin)
            end = len(content) if end < 0 else end
            start = _end_of_space(content, begin)
            if start < end:
                self._starts.append(start)
                self._ends.append(end)
            begin = end + 1

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
                    json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except OSError as error:
            raise _make_unreadable_error(self.path, error) from error
        except ValueError as error:
            raise EvaluationError(
                f"{self.location(index)} is not valid JSON: {error}",
                hint="Correct or remove it; the file must be UTF-8.",
            ) from error
        if not isinstance(row, dict):
            raise EvaluationError(
                f"{self.location(index)} is not a JSON object but {type(row).__name__}", hint="Correct or remove it."
            )
        return row

    def location(self, index: int) -> str:
        """Return the file and the line."""
        with _map_file(self.path) as content:
            line, at = 1, content.find(b"\n", 0, self._starts[index])
            while at >= 0:
                line, at = line + 1, content.find(b"\n", at + 1, self._starts[index])
        return f"{self.path}, line {line}"


class ParquetRows:
    """The rows of a Parquet file; two of its row groups are in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as file:
            require_readable_row_groups(file)
            groups = map(file.metadata.row_group, range(file.num_row_groups))
            self._ends = list(accumulate(group.num_rows for group in groups))
        self._group = functools.lru_cache(maxsize=2)(self._read_group)
        if not len(self):
            raise EvaluationError(f"{path} has no rows", hint=_FORMS)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Yield the file, opened each time, because an open file is not thread-safe."""
        try:
            with open_parquet(self.path, "eval", f"reading {self.path.name}") as file:
                yield file
        except (OSError, ValueError) as error:
            raise _make_unreadable_error(self.path, error) from error

    def _read_group(self, number: int) -> Any:
        with self._opened() as file:
            return file.read_row_group(number)

    def __getitem__(self, index: int, /) -> TableRow:
        group, row = _locate(self._ends, index)
        return _read_row(self._group(group), row)

    def location(self, index: int) -> str:
        """Return the file and the row."""
        return f"{self.path}, row {index + 1}"


class DatasetRows:
    """The rows of a folder that `datasets.Dataset.save_to_disk` wrote, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        pa = load_pyarrow("eval", f"reading the dataset folder {path.name}")
        try:
            names = [part["filename"] for part in read_json_file(path / "state.json")["_data_files"]]
            files = [resolve_below(path, name, hint="Name another dataset folder.") for name in names]
            tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
            self._table = pa.concat_tables(tables)
        except (DocumentError, OSError, ValueError, KeyError, TypeError) as error:
            raise _make_unreadable_error(path, error) from error
        if not len(self):
            raise EvaluationError(f"{path} has no rows", hint="Name another dataset folder.")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int, /) -> TableRow:
        return _read_row(self._table, index)

    def location(self, index: int) -> str:
        """Return the folder and the row."""
        return f"{self.path}, row {index + 1}"


class CsvRows:
    """The rows of a CSV or TSV file with a header row. A cell that is a JSON list, such as ["a", "b"], is a list."""

    def __init__(self, path: Path) -> None:
        self.path = path
        csv.field_size_limit(_MAX_CELL_SIZE)
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, delimiter=_DELIMITERS[path.suffix.lower()], strict=True)
                self._rows = [(reader.line_num, row) for row in reader]
        except (OSError, ValueError, csv.Error) as error:
            raise _make_unreadable_error(path, error) from error
        if not self._rows:
            raise EvaluationError(f"{path} has no rows", hint="Begin it with a header row.")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> TableRow:
        return {name: _parse_cell(value) for name, value in self._rows[index][1].items() if name is not None}

    def location(self, index: int) -> str:
        """Return the file and the row's last line."""
        return f"{self.path}, line {self._rows[index][0]}"


RowSource: TypeAlias = JsonRows | ParquetRows | DatasetRows | CsvRows
"""The rows of one file, in a fixed order. Each row is read when it is requested."""


def _parse_cell(text: str | None) -> Any:
    if text is not None and text.startswith("["):
        try:
            return parse_json(text)
        except ValueError:
            return text
    return text


def _open_one(path: Path) -> RowSource:
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            raise EvaluationError(
                f"{path} holds several splits of a dataset",
                hint=f"Name one: {', '.join(str(state.parent) for state in sorted(path.glob('*/state.json')))}.",
            )
        return DatasetRows(path)
    try:
        with open_regular_file(path) as file:
            beginning = file.read(len(_PARQUET))
    except OSError as error:
        raise _make_unreadable_error(path, error) from error
    if beginning == _PARQUET:
        return ParquetRows(path)
    return CsvRows(path) if path.suffix.lower() in _DELIMITERS else JsonRows(path)


@contextmanager
def _map_file(path: Path) -> Iterator[mmap.mmap]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content
    except OSError as error:
        raise _make_unreadable_error(path, error) from error
    except ValueError as error:  # an empty file cannot be mapped
        raise EvaluationError(f"{path} is empty", hint=_FORMS) from error


def _end_of_space(content: mmap.mmap, start: int) -> int:
    match = _SPACE.match(content, start)
    return match.end() if match else start


def _locate(ends: Sequence[int], index: int) -> tuple[int, int]:
    """Return the part that an index is in, and the index within that part; `ends` are the ends of the parts."""
    part = bisect_right(ends, index)
    return part, index - (ends[part - 1] if part else 0)


def _read_row(table: Any, index: int) -> TableRow:
    row: TableRow = table.slice(index, 1).to_pylist()[0]
    return row


def _make_unreadable_error(path: Path, error: Exception) -> EvaluationError:
    return EvaluationError(f"{path} cannot be read: {error}", hint="Check the path and that the file is whole.")
