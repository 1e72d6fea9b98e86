"""Corpora in tables: Parquet, JSONL and CSV with a column of texts or of paths, and Hugging Face datasets.

A row becomes a document when its turn comes; no more than a few rows of a table are in memory.
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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

from memagent_graph.corpus.corpus_documents import CorpusDocument, Total
from memagent_graph.corpus.source_access import SourceAccess, scheme_of, shown, store_failures
from memagent_graph.errors import DocumentError, MissingExtraError

SUFFIXES: Final = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}
_TEXT, _PATH = "text", "path"
_BATCH_ROWS: Final = 64
_LONGEST_LINE: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of a table are what. Without `text` and `path`: the column "text", else the column "path"."""

    text: str | None = None
    path: str | None = None
    id: str | None = None
    """Documents' names; without it they are the table's name and the row's number, from 0."""
    questions: str | None = None
    """A question, or a list of them, for that document alone."""
    kept: tuple[str, ...] = ()
    """Columns that go into the rows that are written."""

    def settled(self, known: Sequence[str], table: str) -> Columns:
        """With text or path chosen from a table's columns.

        Raises:
            DocumentError: a column is missing.
        """
        chosen = self
        if self.text is None and self.path is None:
            default = next((name for name in (_TEXT, _PATH) if name in known), None)
            if default is None:
                raise DocumentError(
                    f"{table} has neither a column {_TEXT!r} nor {_PATH!r}",
                    hint=f"Name one with --text-column or --path-column. Its columns are: {_listed(known)}.",
                )
            chosen = replace(self, text=default) if default == _TEXT else replace(self, path=default)
        for name in chosen.needed:
            if name not in known:
                raise DocumentError(f"{table} has no column {name!r}", hint=f"Its columns are: {_listed(known)}.")
        return chosen

    @property
    def needed(self) -> list[str]:
        """The columns that are read."""
        named = (self.text, self.path, self.id, self.questions, *self.kept)
        return list(dict.fromkeys(name for name in named if name is not None))


@dataclass(frozen=True)
class TableInputs:
    """The rows of one table, or of several of one kind, one after another."""

    locations: tuple[str, ...]
    access: SourceAccess
    columns: Columns = field(default_factory=Columns)

    @property
    def description(self) -> str:
        """The table's name."""
        first = shown(self.locations[0])
        return f"the table {first}" if len(self.locations) == 1 else f"{len(self.locations)} tables such as {first}"

    def documents(self) -> Iterator[CorpusDocument]:
        """A document for each row; a row that cannot be used is one with an error.

        Raises:
            DocumentError: a table cannot be read, or lacks a column.
        """
        for location, name in zip(self.locations, self._names, strict=True):
            columns: Columns | None = None
            for number, row in enumerate(self._rows(location, None)):
                if isinstance(row, str):
                    yield CorpusDocument(name=f"{name}#{number}", trouble=row)
                    continue
                columns = columns or self.columns.settled(list(row), name)
                yield document_of(row, f"{name}#{number}", columns, self.access)

    def ids(self) -> Iterator[str] | None:
        """The column of ids, if there is one."""
        return self._ids(self.columns.id) if self.columns.id else None

    def _ids(self, column: str) -> Iterator[str]:
        for location in self.locations:
            for row in self._rows(location, [column]):
                if not isinstance(row, str) and row.get(column) is not None:
                    yield str(row[column])

    def total(self) -> Total:
        """Parquet files say how many rows they have; other tables are counted by their lines."""
        rows = 0
        for location in self.locations:
            if _kind(location) == "parquet":
                with self.access.open_file(location) as file, _damage_told(location):
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
        """Each table by its file's name; by its place as well, if there are several."""
        names = [PurePosixPath(shown(each).replace("\\", "/")).name for each in self.locations]
        if len(set(names)) == len(names):
            return names
        return [f"{place}/{name}" for place, name in enumerate(names)]

    def _rows(self, location: str, only: list[str] | None) -> Iterator[Mapping[str, Any] | str]:
        """The rows, or what is wrong with one; with `only`, at least these columns."""
        readers = {"parquet": _parquet_rows, "jsonl": _json_rows, "csv": _csv_rows, "tsv": _csv_rows}
        with self.access.open_file(location) as file, _damage_told(location):
            wanted = self.columns if only is None else Columns(kept=tuple(only))
            yield from readers[_kind(location)](file, location, wanted, only is not None)


@dataclass(frozen=True)
class DatasetInputs:
    """A split of a Hugging Face dataset: by its name on the hub, which is streamed, or a folder it was saved to."""

    name: str
    access: SourceAccess
    columns: Columns = field(default_factory=Columns)
    subset: str | None = None
    split: str = "train"

    @property
    def description(self) -> str:
        """The dataset."""
        return f"the dataset {self.name}"

    def documents(self) -> Iterator[CorpusDocument]:
        """A document for each row.

        Raises:
            DocumentError: the dataset cannot be loaded, or lacks a column.
        """
        columns: Columns | None = None
        name = PurePosixPath(self.name).name
        with store_failures(self.name):
            for number, row in enumerate(self._loaded()):
                columns = columns or self.columns.settled(list(row), self.name)
                yield document_of(row, f"{name}#{number}", columns, self.access)

    def ids(self) -> Iterator[str] | None:
        """The column of ids, if there is one."""
        return self._ids(self.columns.id) if self.columns.id else None

    def _ids(self, column: str) -> Iterator[str]:
        loaded = self._loaded()
        if loaded.column_names and column not in loaded.column_names:
            self.columns.settled(loaded.column_names, self.name)
        for row in loaded.select_columns([column]):
            yield str(row[column])

    def total(self) -> Total:
        """Known where the dataset says it."""
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
        except Exception as error:  # the library raises many kinds
            raise DocumentError(
                f"the dataset {self.name} cannot be loaded ({type(error).__name__}): {str(error)[:300]}",
                hint="Check its name, --subset and --split, and whether the hub can be reached.",
            ) from error


def document_of(  # noqa: PLR0911  one return for each way in which a row can be wrong
    row: Mapping[str, Any], name: str, columns: Columns, access: SourceAccess
) -> CorpusDocument:
    """A table's row as a document; what is wrong with it is its `trouble`."""
    if columns.id is not None:
        if (given := row.get(columns.id)) is None or not str(given).strip():
            return CorpusDocument(name=name, trouble=f"it has no value in the column {columns.id!r}")
        name = str(given)
    metadata = {each: _json_ready(row.get(each)) for each in columns.kept}
    try:
        questions = _questions(row.get(columns.questions)) if columns.questions else ()
    except TypeError:
        return CorpusDocument(
            name=name, metadata=metadata, trouble=f"the column {columns.questions!r} has neither a text nor a list"
        )
    made = partial(CorpusDocument, name=name, questions=questions, metadata=metadata)
    if columns.text is not None:
        text = row.get(columns.text)
        if not isinstance(text, str):
            kind = "nothing" if text is None else type(text).__name__
            return made(trouble=f"the column {columns.text!r} has {kind} where a text should be")
        data = text.encode("utf-8", "surrogatepass")
        return made(version=hashlib.sha256(data).hexdigest()[:32], size=len(data), text=text)
    given = row.get(columns.path or "")
    if not isinstance(given, str):
        return made(trouble=f"the column {columns.path!r} has no path")
    try:
        location = access.below_root(given)
    except DocumentError as error:
        return made(trouble=str(error))
    if scheme_of(location):
        return made(location=location)
    found = Path(location).stat()
    version = f"{found.st_size}-{found.st_mtime_ns}"
    return made(version=version, size=found.st_size, location=location)


def is_table(location: str) -> bool:
    """Whether a path, pattern or URL names tables by its suffix."""
    return PurePosixPath(shown(location)).suffix.lower() in SUFFIXES


def _parquet_rows(file: Any, location: str, columns: Columns, only: bool) -> Iterator[Mapping[str, Any]]:
    parquet = _parquet(location).ParquetFile(file)
    known = parquet.schema_arrow.names
    if not only:
        columns = columns.settled(known, PurePosixPath(shown(location)).name)
    elif missing := [name for name in columns.kept if name not in known]:
        Columns(id=missing[0], text=known[0] if known else None).settled(known, PurePosixPath(shown(location)).name)
    for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=columns.needed):
        yield from batch.to_pylist()


def _json_rows(file: Any, location: str, columns: Columns, only: bool) -> Iterator[Mapping[str, Any] | str]:
    reader = io.BufferedReader(file, 2**20) if isinstance(file, io.RawIOBase) else file
    for number in itertools.count():
        line = reader.readline(_LONGEST_LINE)
        if not line:
            return
        if line.isspace():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 0 else "utf-8"))
        except (ValueError, RecursionError) as error:
            yield f"line {number + 1} of {PurePosixPath(shown(location)).name} is not JSON: {error}"
            continue
        yield row if isinstance(row, dict) else f"line {number + 1} is JSON, but not an object"


def _csv_rows(file: Any, location: str, columns: Columns, only: bool) -> Iterator[Mapping[str, Any] | str]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        reader = csv.DictReader(text, delimiter="\t" if _kind(location) == "tsv" else ",")
        name = PurePosixPath(shown(location)).name
        if not only:
            columns.settled(reader.fieldnames or [], name)
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


class _damage_told:  # noqa: N801  used as a function
    """What parsers of tables raise, as a `DocumentError`."""

    def __init__(self, location: str) -> None:
        self._location = location

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        arrow = type(error).__module__.startswith("pyarrow") if error is not None else False
        if arrow or isinstance(error, csv.Error | UnicodeDecodeError):
            raise DocumentError(
                f"{shown(self._location)} cannot be read as a table: {error}", hint="Is it damaged?"
            ) from error


def _questions(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(each for each in value if each.strip())
    raise TypeError(type(value).__name__)


def _json_ready(value: Any) -> Any:
    """A cell as JSON can hold it: dates and other values as text."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json_ready(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(each) for each in value]
    return str(value)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(str, names[:20])) + (", ..." if len(names) > 20 else "") or "none"
