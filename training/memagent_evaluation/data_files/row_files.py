"""Rows of data files, one in memory at a time: JSON lines, JSON lists, Parquet files, Hugging Face dataset folders.

JSON files are indexed by the byte offsets of their rows, so that a list of several gigabytes works like lines.
"""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from memagent_evaluation.extra_modules import extra_module
from memagent_graph.errors import EvaluationError

Row: TypeAlias = dict[str, Any]

_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]', re.DOTALL)
"""A whole string, or a structural character. Possessive, so that a string of megabytes causes no backtracking."""
_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_WRAPPED_LIST: Final = re.compile(
    rb"\s*\{\s*(?:" + _STRING + rb"\s*:\s*(?:" + _STRING + rb'|[-+.\w]+)\s*,\s*)*+"data"\s*:\s*\[', re.DOTALL
)
_SPACE: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*")
_PARQUET: Final = b"PAR1"


class Rows(Protocol):
    """Rows in a fixed order; each is read on request."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row:
        """The row.

        Raises:
            EvaluationError: it is damaged; the file and line are named.
        """
        ...

    def place(self, index: int) -> str:
        """Its place, for messages."""
        ...


def open_rows(paths: Sequence[Path]) -> Rows:
    """The rows of files and dataset folders, one after another. The content determines the format, not the name.

    Raises:
        EvaluationError: a file cannot be read, has no rows, or has an unknown format.
        MissingExtraError: a format needs pyarrow (the extra "eval").
    """
    parts = [_open_one(path) for path in paths]
    return parts[0] if len(parts) == 1 else ChainedRows(parts)


class JsonRows:
    """The objects of a file of JSON lines, or of a JSON list, which may be in an object under "data"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts, self._ends = array("Q"), array("Q")
        with _mapped(path) as content:
            wrapped = _WRAPPED_LIST.match(content)
            begin = _end_of_space(content, 0)
            if wrapped or content[begin : begin + 1] == b"[":
                self._index_list(content, wrapped.end() if wrapped else begin + 1)
            elif content[begin : begin + 1] == b"{":
                self._index_lines(content, begin)
            else:
                raise EvaluationError(
                    f"{path} is neither JSON lines nor a JSON list: it begins with {content[begin : begin + 20]!r}",
                    hint="Name the data file as it was published, unpacked.",
                )
        if not self._starts:
            raise EvaluationError(f"{path} has no rows", hint="Name the data file as it was published, unpacked.")

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

    def __getitem__(self, index: int, /) -> Row:
        start, end = self._starts[index], self._ends[index]
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                row = json.loads(file.read(end - start))
        except OSError as error:
            raise _unreadable(self.path, error) from error
        except ValueError as error:
            raise EvaluationError(
                f"{self.place(index)} is not valid JSON: {error}",
                hint="Correct or remove it, or download the file again.",
            ) from error
        if not isinstance(row, dict):
            raise EvaluationError(
                f"{self.place(index)} is not a JSON object but {type(row).__name__}", hint="Correct or remove it."
            )
        return row

    def place(self, index: int) -> str:
        """The file and the line."""
        with _mapped(self.path) as content:
            line, at = 1, content.find(b"\n", 0, self._starts[index])
            while at >= 0:
                line, at = line + 1, content.find(b"\n", at + 1, self._starts[index])
        return f"{self.path}, line {line}"


class Parts:
    """Items in several parts, one after another, with one numbering."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def part(self, index: int) -> tuple[int, int]:
        """The part of an item, and its index there."""
        part = bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)


class ParquetRows(Parts):
    """The rows of a Parquet file; two of its row groups are in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as file:
            groups = file.metadata
        super().__init__(groups.row_group(each).num_rows for each in range(groups.num_row_groups))
        self._group = functools.lru_cache(maxsize=2)(self._read_group)
        if not len(self):
            raise EvaluationError(f"{path} has no rows", hint="Name the data file as it was published.")

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The file, opened each time, because an open one is not for several threads."""
        parquet = extra_module("pyarrow.parquet", f"reading {self.path.name}")
        try:
            with parquet.ParquetFile(self.path) as file:
                yield file
        except (OSError, ValueError) as error:
            raise _unreadable(self.path, error) from error

    def _read_group(self, number: int) -> Any:
        with self._opened() as file:
            return file.read_row_group(number)

    def __getitem__(self, index: int, /) -> Row:
        group, within = self.part(index)
        return _first(self._group(group), within)

    def place(self, index: int) -> str:
        """The file and the row."""
        return f"{self.path}, row {index + 1}"


class DatasetRows:
    """The rows of a folder that `datasets.Dataset.save_to_disk` wrote, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        pa = extra_module("pyarrow", f"reading the dataset folder {path.name}")
        try:
            names = [each["filename"] for each in json.loads((path / "state.json").read_text("utf-8"))["_data_files"]]
            tables = [pa.ipc.open_stream(pa.memory_map(str(path / name))).read_all() for name in names]
            self._table = pa.concat_tables(tables)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(path, error) from error
        if not len(self):
            raise EvaluationError(f"{path} has no rows", hint="Name another dataset folder.")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int, /) -> Row:
        return _first(self._table, index)

    def place(self, index: int) -> str:
        """The folder and the row."""
        return f"{self.path}, row {index + 1}"


class ChainedRows(Parts):
    """The rows of several files."""

    def __init__(self, files: Sequence[Rows]) -> None:
        super().__init__(map(len, files))
        self._files = files

    def __getitem__(self, index: int, /) -> Row:
        file, within = self.part(index)
        return self._files[file][within]

    def place(self, index: int) -> str:
        """As the file's own."""
        file, within = self.part(index)
        return self._files[file].place(within)


def _open_one(path: Path) -> Rows:
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            raise EvaluationError(
                f"{path} holds several splits of a dataset",
                hint=f"Name one: {', '.join(str(each.parent) for each in sorted(path.glob('*/state.json')))}.",
            )
        return DatasetRows(path)
    try:
        with path.open("rb") as file:
            beginning = file.read(len(_PARQUET))
    except OSError as error:
        raise _unreadable(path, error) from error
    return ParquetRows(path) if beginning == _PARQUET else JsonRows(path)


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:  # an empty file cannot be mapped
        raise EvaluationError(f"{path} is empty", hint="Copy or download the file again.") from error


def _end_of_space(content: mmap.mmap, start: int) -> int:
    match = _SPACE.match(content, start)
    return match.end() if match else start


def _first(table: Any, index: int) -> Row:
    row: Row = table.slice(index, 1).to_pylist()[0]
    return row


def _unreadable(path: Path, error: Exception) -> EvaluationError:
    return EvaluationError(f"{path} cannot be read: {error}", hint="Check the path and that the file is whole.")
