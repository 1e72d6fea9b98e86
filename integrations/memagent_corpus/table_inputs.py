"""Corpora in tables: Parquet, JSONL, CSV and TSV with a column of texts or paths, and Hugging Face datasets.

Rows are read one batch at a time, so only a few of them are in memory.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

from memagent_corpus.corpus_documents import CorpusDocument, Total
from memagent_corpus.source_access import SourceAccess, scheme_of, shown, store_errors
from memagent_graph.errors import DocumentError, MissingExtraError

SUFFIXES: Final = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}
_TEXT, _PATH = "text", "path"
_BATCH_ROWS: Final = 64
_MAX_LINE_BYTES: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a table to use. Without `text` and `path`, it is the column "text", or else the column "path"."""

    text: str | None = None
    path: str | None = None
    id: str | None = None
    """The documents' names. Without it, a name is the table's name and the row's number, counted from 0."""
    questions: str | None = None
    """A question, or a list of questions, about this document only."""
    kept: tuple[str, ...] = ()
    """Columns that are copied to the output rows."""

    def resolve(self, known: Sequence[str], table: str) -> Columns:
        """Choose the default text or path column, and check that all columns exist.

        Args:
            known: the table's columns.
            table: the table's name in messages.

        Raises:
            DocumentError: a column is missing.
        """
        chosen = self
        if self.text is None and self.path is None:
            default = next((name for name in (_TEXT, _PATH) if name in known), None)
            if default is None:
                raise DocumentError(
                    f"{table} has neither a column {_TEXT!r} nor {_PATH!r}",
                    hint=f"Choose one with --text-column or --path-column. Its columns are: {_listed(known)}.",
                )
            chosen = replace(self, text=default) if default == _TEXT else replace(self, path=default)
        for name in chosen.needed:
            if name not in known:
                raise DocumentError(f"{table} has no column {name!r}", hint=f"Its columns are: {_listed(known)}.")
        return chosen

    @property
    def needed(self) -> list[str]:
        """The columns to read."""
        named = (self.text, self.path, self.id, self.questions, *self.kept)
        return list(dict.fromkeys(name for name in named if name is not None))


@dataclass(frozen=True)
class TableInputs:
    """The rows of one or more tables, one table after another."""

    locations: tuple[str, ...]
    access: SourceAccess
    columns: Columns = field(default_factory=Columns)

    @property
    def description(self) -> str:
        """The table's path or URL."""
        first = shown(self.locations[0])
        return f"the table {first}" if len(self.locations) == 1 else f"{len(self.locations)} tables such as {first}"

    def documents(self) -> Iterator[CorpusDocument]:
        """Yield one document for each row. An invalid row gives a document with an error.

        Raises:
            DocumentError: a table cannot be read, or lacks a column.
        """
        for location, name in zip(self.locations, self._names, strict=True):
            columns: Columns | None = None
            for number, row in enumerate(self._rows(location, None)):
                if isinstance(row, str):
                    yield CorpusDocument(name=f"{name}#{number}", error=row)
                    continue
                columns = columns or self.columns.resolve(list(row), name)
                yield document_of(row, f"{name}#{number}", columns, self.access)

    def ids(self) -> Iterator[str] | None:
        """Yield the values of the id column; None if there is no id column."""
        return self._ids(self.columns.id) if self.columns.id else None

    def _ids(self, column: str) -> Iterator[str]:
        for location in self.locations:
            for row in self._rows(location, [column]):
                if not isinstance(row, str) and row.get(column) is not None:
                    yield str(row[column])

    def total(self) -> Total:
        """Count the rows: from the metadata of Parquet files, by reading other local files; unknown for other URLs."""
        rows = 0
        for location in self.locations:
            if _kind(location) == "parquet":
                with self.access.open_file(location) as file, _table_errors(location):
                    rows += _parquet(location).ParquetFile(file).metadata.num_rows
            elif scheme_of(location):
                return Total(None, None)
            elif _kind(location) == "jsonl":
                with self.access.open_file(location) as file:
                    rows += sum(1 for line in file if not line.isspace())
            else:
                rows += sum(1 for _ in self._rows(location, []))
        return Total(rows, None)

    @property
    def _names(self) -> list[str]:
        """The tables' file names. If two are equal, all get their number as a prefix."""
        names = [PurePosixPath(shown(each).replace("\\", "/")).name for each in self.locations]
        if len(set(names)) == len(names):
            return names
        return [f"{number}/{name}" for number, name in enumerate(names)]

    def _rows(self, location: str, only: list[str] | None) -> Iterator[Mapping[str, Any] | str]:
        """Yield rows; an invalid row is an error message instead. With `only`, read these columns (maybe more)."""
        readers = {"parquet": _parquet_rows, "jsonl": _json_rows, "csv": _csv_rows, "tsv": _csv_rows}
        with self.access.open_file(location) as file, _table_errors(location):
            columns = self.columns if only is None else Columns(kept=tuple(only))
            yield from readers[_kind(location)](file, location, columns, only is not None)


@dataclass(frozen=True)
class DatasetInputs:
    """A split of a Hugging Face dataset: streamed from the hub, or loaded from a folder that it was saved to."""

    name: str
    access: SourceAccess
    columns: Columns = field(default_factory=Columns)
    subset: str | None = None
    split: str = "train"

    @property
    def description(self) -> str:
        """The dataset's name."""
        return f"the dataset {self.name}"

    def documents(self) -> Iterator[CorpusDocument]:
        """Yield one document for each row.

        Raises:
            DocumentError: the dataset cannot be loaded, or lacks a column.
        """
        columns: Columns | None = None
        name = PurePosixPath(self.name).name
        with store_errors(self.name):
            for number, row in enumerate(self._loaded()):
                columns = columns or self.columns.resolve(list(row), self.name)
                yield document_of(row, f"{name}#{number}", columns, self.access)

    def ids(self) -> Iterator[str] | None:
        """Yield the values of the id column; None if there is no id column."""
        return self._ids(self.columns.id) if self.columns.id else None

    def _ids(self, column: str) -> Iterator[str]:
        loaded = self._loaded()
        if loaded.column_names and column not in loaded.column_names:
            self.columns.resolve(loaded.column_names, self.name)
        for row in loaded.select_columns([column]):
            yield str(row[column])

    def total(self) -> Total:
        """Return the number of rows, if the dataset contains it."""
        loaded = self._loaded()
        try:
            return Total(len(loaded), None)
        except TypeError:
            info = getattr(loaded.info, "splits", None) or {}
            known = info.get(self.split)
            return Total(known.num_examples if known else None, None)

    def _loaded(self) -> Any:
        try:
            datasets: Any = importlib.import_module("datasets")
        except ImportError:
            raise DocumentError(
                f"reading the dataset {self.name} needs the package datasets, which is not installed",
                hint="Install it with: pip install datasets",
            ) from None
        folder = Path(self.name)
        try:
            if (folder / "state.json").is_file():
                return datasets.load_from_disk(str(folder))
            if (folder / "dataset_dict.json").is_file():
                return datasets.load_from_disk(str(folder))[self.split]
            return datasets.load_dataset(self.name, self.subset, split=self.split, streaming=True)
        except Exception as error:  # the library raises many kinds of exceptions
            raise DocumentError(
                f"the dataset {self.name} cannot be loaded ({type(error).__name__}): {str(error)[:300]}",
                hint="Check the name, --subset and --split, and your connection to the hub.",
            ) from error


def document_of(  # noqa: PLR0911  one return for each kind of error
    row: Mapping[str, Any], name: str, columns: Columns, access: SourceAccess
) -> CorpusDocument:
    """Convert a row of a table to a document. An invalid row gives a document with an `error`."""
    if columns.id is not None:
        if (given := row.get(columns.id)) is None or not str(given).strip():
            return CorpusDocument(name=name, error=f"the column {columns.id!r} has no value")
        name = str(given)
    metadata = {each: _json_ready(row.get(each)) for each in columns.kept}
    try:
        questions = _questions(row.get(columns.questions)) if columns.questions else ()
    except TypeError:
        return CorpusDocument(
            name=name, metadata=metadata, error=f"the column {columns.questions!r} has neither a string nor a list"
        )
    make = partial(CorpusDocument, name=name, questions=questions, metadata=metadata)
    if columns.text is not None:
        text = row.get(columns.text)
        if not isinstance(text, str):
            found = "no value" if text is None else f"a value of type {type(text).__name__}, not a string"
            return make(error=f"the column {columns.text!r} has {found}")
        data = text.encode("utf-8", "surrogatepass")
        return make(version=hashlib.sha256(data).hexdigest()[:32], size=len(data), text=text)
    given = row.get(columns.path or "")
    if not isinstance(given, str):
        return make(error=f"the column {columns.path!r} has no path")
    try:
        location = access.below_root(given)
    except DocumentError as error:
        return make(error=str(error))
    if scheme_of(location):
        return make(location=location)
    status = Path(location).stat()
    version = f"{status.st_size}-{status.st_mtime_ns}"
    return make(version=version, size=status.st_size, location=location)


def is_table(location: str) -> bool:
    """Whether the suffix of a path, pattern or URL is that of a table."""
    return PurePosixPath(shown(location)).suffix.lower() in SUFFIXES


def _parquet_rows(file: Any, location: str, columns: Columns, only: bool) -> Iterator[Mapping[str, Any]]:
    parquet = _parquet(location).ParquetFile(file)
    known = parquet.schema_arrow.names
    if not only:
        columns = columns.resolve(known, PurePosixPath(shown(location)).name)
    elif missing := [name for name in columns.kept if name not in known]:
        Columns(id=missing[0], text=known[0] if known else None).resolve(known, PurePosixPath(shown(location)).name)
    for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=columns.needed):
        yield from batch.to_pylist()


def _json_rows(file: Any, location: str, columns: Columns, only: bool) -> Iterator[Mapping[str, Any] | str]:
    reader = io.BufferedReader(file, 2**20) if isinstance(file, io.RawIOBase) else file
    for number in itertools.count():
        line = reader.readline(_MAX_LINE_BYTES)
        if not line:
            return
        if line.isspace():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 0 else "utf-8"))
        except (ValueError, RecursionError) as error:
            yield f"line {number + 1} of {PurePosixPath(shown(location)).name} is not JSON: {error}"
            continue
        yield row if isinstance(row, dict) else f"line {number + 1} is not a JSON object"


def _csv_rows(file: Any, location: str, columns: Columns, only: bool) -> Iterator[Mapping[str, Any] | str]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        reader = csv.DictReader(text, delimiter="\t" if _kind(location) == "tsv" else ",")
        name = PurePosixPath(shown(location)).name
        if not only:
            columns.resolve(reader.fieldnames or [], name)
        for row in reader:
            yield {key: value for key, value in row.items() if isinstance(key, str)}
    finally:
        text.detach()


def _kind(location: str) -> str:
    return SUFFIXES[PurePosixPath(shown(location)).suffix.lower()]


def _parquet(location: str) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtraError("corpus", f"reading {shown(location)}") from None


@contextmanager
def _table_errors(location: str) -> Iterator[None]:
    """Convert errors of the table parsers to a `DocumentError`."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("pyarrow") or isinstance(error, csv.Error | UnicodeDecodeError):
            raise DocumentError(
                f"{shown(location)} cannot be read as a table: {error}", hint="Check whether the file is damaged."
            ) from error
        raise


def _questions(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(each for each in value if each.strip())
    raise TypeError(type(value).__name__)


def _json_ready(value: Any) -> Any:
    """Convert a cell to a JSON-serializable value. Dates and other types become strings."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json_ready(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(each) for each in value]
    return str(value)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(str, names[:20])) + (", ..." if len(names) > 20 else "") or "none"
