"""Corpora in tables: Parquet, JSONL, CSV and TSV with a column of texts or paths, and Hugging Face datasets.

Rows are read one batch at a time, so only a few of them are in memory.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

from memagent_corpus.source_access import CorpusDocument, SourceAccess, convert_store_errors, display_url, get_scheme
from memagent_graph.documents.allowed_paths import resolve_below
from memagent_graph.documents.decoding import find_codec
from memagent_graph.errors import DocumentError
from memagent_graph.plain_text import list_names
from memagent_graph.storage.bounded_files import read_json_file
from memagent_graph.storage.parquet_rows import iter_rows, open_parquet

TABLE_SUFFIXES: Final = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}
_MAX_LINE_BYTES: Final = 2**30
_MAX_NAMED_COLUMNS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class InputColumns:
    """The columns of a table to use. Without `text` and `path`, a row's text is in "text", or its path in "path"."""

    text: str | None = None
    path: str | None = None
    id: str | None = None
    """The documents' names. Without it, a name is the table's name and the row's number, counted from 0."""
    questions: str | None = None
    """A question, or a list of questions, about this document only."""
    copied: tuple[str, ...] = ()
    """Columns that are copied to the output rows."""

    def resolve(self, names: Sequence[str], table: str) -> InputColumns:
        """Choose the default text and path columns, and check that all columns exist.

        Args:
            names: the table's columns.
            table: the table's name in messages.

        Raises:
            DocumentError: a column is missing.
        """
        columns, all_names = self, list_names(names, _MAX_NAMED_COLUMNS) or "none"
        if self.text is None and self.path is None:
            text, path = ("text" if "text" in names else None), ("path" if "path" in names else None)
            columns = replace(self, text=text, path=path)
            if text is None and path is None:
                raise DocumentError(
                    f"{table} has neither a column 'text' nor 'path'",
                    hint=f"Choose one with --text-column or --path-column. Its columns are: {all_names}."
                    if names
                    else "Begin CSV with the columns' names; write an object in each line of JSONL; check --encoding.",
                )
        for name in columns.needed_columns:
            if name not in names:
                raise DocumentError(f"{table} has no column {name!r}", hint=f"Its columns are: {all_names}.")
        return columns

    @property
    def needed_columns(self) -> list[str]:
        """The columns to read."""
        names = (self.text, self.path, self.id, self.questions, *self.copied)
        return list(dict.fromkeys(name for name in names if name is not None))


@dataclass(frozen=True)
class FileTable:
    """A table in a Parquet, JSON lines, CSV or TSV file at a path or URL, which can be read any number of times."""

    location: str
    access: SourceAccess

    def list_columns(self) -> Sequence[str]:
        """Return the names of the columns. JSON lines may have different columns, so all of them are read."""
        with self._open_file() as file:
            if self._kind == "parquet":
                return list(self._open_parquet(file).schema_arrow.names)
            if self._kind == "jsonl":
                rows = _iter_json_rows(file, self._codec)
                return list(dict.fromkeys(name for row in rows if not isinstance(row, str) for name in row))
            with self._read_csv(file) as reader:
                return list(reader.fieldnames or ())

    def iter_rows(self, columns: list[str]) -> Iterator[Mapping[str, Any] | str]:
        """Yield the rows with these columns, where a row has them. An invalid row is an error message instead."""
        with self._open_file() as file:
            if self._kind == "parquet":
                for batch in iter_rows(self._open_parquet(file), columns):
                    yield from batch.to_pylist()
            elif self._kind == "jsonl":
                yield from _iter_json_rows(file, self._codec)
            else:
                with self._read_csv(file) as reader:
                    for row in reader:
                        has_surplus = any(map(str.strip, row.pop(None, ())))  # the cells beyond the header
                        yield f"line {reader.line_num} has more cells than the header" if has_surplus else row

    def count_rows(self) -> int | None:
        """Count the rows: from the metadata of Parquet files, by reading other local files; unknown for other URLs."""
        if self._kind != "parquet":
            return None if get_scheme(self.location) else sum(1 for _ in self.iter_rows([]))
        with self._open_file() as file:
            return int(self._open_parquet(file).metadata.num_rows)

    @property
    def _kind(self) -> str:
        return TABLE_SUFFIXES[PurePosixPath(display_url(self.location)).suffix.lower()]

    @property
    def _codec(self) -> str:
        """The codec of the charset, as browsers read it. A byte order mark of UTF-8 is left out."""
        codec = find_codec(self.access.encoding or "utf-8")
        return "utf-8-sig" if codec == "utf-8" else codec

    def _open_parquet(self, file: Any) -> Any:
        return open_parquet(file, "corpus", f"reading {display_url(self.location)}")

    @contextmanager
    def _read_csv(self, file: Any) -> Iterator[csv.DictReader[str]]:
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
        text_file = io.TextIOWrapper(file, encoding=self._codec, newline="")
        try:
            reader = csv.DictReader(text_file, delimiter="\t" if self._kind == "tsv" else ",", strict=True)
            yield reader
        except csv.Error as error:
            raise csv.Error(f"line {reader.reader.line_num}: {error}") from error
        finally:
            text_file.detach()

    @contextmanager
    def _open_file(self) -> Iterator[Any]:
        """Open the file, and convert the errors of its parser to a `DocumentError`."""
        try:
            with self.access.open_file(self.location) as file:
                yield file
        except UnicodeDecodeError as error:
            raise DocumentError(
                f"{display_url(self.location)} is not a table in {self.access.encoding or 'UTF-8'}: {error}",
                hint="Name its charset with --encoding, as in --encoding latin-1.",
            ) from error
        except Exception as error:
            is_from_arrow, is_from_csv = type(error).__module__.startswith("pyarrow"), isinstance(error, csv.Error)
            # Dates of Arrow can be out of Python's range.
            if is_from_arrow or is_from_csv or isinstance(error, ValueError | OverflowError | LookupError):
                raise DocumentError(
                    f"{display_url(self.location)} cannot be read as a table: {error}",
                    hint="A cell that begins with a quote must end with one, and have quotes in it doubled."
                    if is_from_csv
                    else "Check whether the file is damaged.",
                ) from error
            raise


@dataclass(frozen=True)
class DatasetTable:
    """A split of a Hugging Face dataset: streamed from the hub, or loaded from a folder that it was saved to."""

    location: str
    subset: str | None = None
    split: str = "train"

    def list_columns(self) -> Sequence[str]:
        """Return the names of the columns; for a stream without this information, those of the first row."""
        with convert_store_errors(self.location):
            return list(self._dataset.column_names or next(_iter_dataset_rows(self._dataset), ()))

    def iter_rows(self, columns: list[str]) -> Iterator[Mapping[str, Any] | str]:
        """Yield rows with these columns."""
        with convert_store_errors(self.location):
            yield from _iter_dataset_rows(self._dataset.select_columns(columns))

    def count_rows(self) -> int | None:
        """Return the number of rows, if the dataset contains it."""
        try:
            return len(self._dataset)
        except TypeError:
            split = (getattr(self._dataset.info, "splits", None) or {}).get(self.split)
            return split.num_examples if split else None

    @cached_property
    def _dataset(self) -> Any:
        try:
            datasets: Any = importlib.import_module("datasets")
        except ImportError:
            raise DocumentError(
                f"reading the dataset {self.location} needs the package datasets, which is not installed",
                hint="Install it with: pip install datasets",
            ) from None
        folder = Path(self.location)
        try:
            if (folder / "dataset_dict.json").is_file():
                folder = resolve_below(folder, self.split, hint="Choose another --split.", allow_any_kind=True)
            if (folder / "state.json").is_file():
                for part in read_json_file(folder / "state.json")["_data_files"]:
                    resolve_below(folder, part["filename"], hint="Correct its state.json.")
                return datasets.load_from_disk(str(folder))
            if folder.is_dir():  # its README could name files and addresses elsewhere
                raise ValueError("it is not a saved dataset (`save_to_disk`); name the files in the folder instead")
            return datasets.load_dataset(self.location, self.subset, split=self.split, streaming=True)
        except Exception as error:  # the library raises many kinds of exceptions
            raise DocumentError(
                f"the dataset {self.location} cannot be loaded ({type(error).__name__}): {str(error)[:300]}",
                hint="Check the name, --subset and --split, and your connection to the hub.",
            ) from error


def make_document(  # noqa: PLR0911  one return for each kind of error
    row: Mapping[str, Any], name: str, columns: InputColumns, access: SourceAccess
) -> CorpusDocument:
    """Convert a row of a table to a document. An invalid row gives a document with an `error`."""
    if columns.id is not None:
        default_name, name = name, choose_name(row.get(columns.id), name)
        if name == default_name:
            return CorpusDocument(name=name, error=f"the column {columns.id!r} has no value")
    metadata = {column: _to_json(row.get(column)) for column in columns.copied}
    try:
        questions = _parse_questions(row.get(columns.questions)) if columns.questions else ()
    except TypeError:
        return CorpusDocument(
            name=name, metadata=metadata, error=f"the column {columns.questions!r} has neither a string nor a list"
        )
    make_from_row = partial(CorpusDocument, name=name, questions=questions, metadata=metadata)
    text = None if columns.text is None else row.get(columns.text)
    path = None if columns.path is None else row.get(columns.path)
    if isinstance(text, str):
        encoded_text = text.encode("utf-8", "surrogatepass")
        return make_from_row(version=hashlib.sha256(encoded_text).hexdigest()[:32], size=len(encoded_text), text=text)
    if columns.text is not None and (text is not None or path is None):
        problem = "no value" if text is None else f"a value of type {type(text).__name__}, not a string"
        return make_from_row(error=f"the column {columns.text!r} has {problem}")
    if not isinstance(path, str):
        return make_from_row(error=f"the column {columns.path!r} has no path")
    try:
        location = access.resolve_below_root(path)
    except DocumentError as error:
        return make_from_row(error=str(error))
    if get_scheme(location):
        return make_from_row(location=location)
    file_status = Path(location).stat()
    version = f"{file_status.st_size}-{file_status.st_mtime_ns}"
    return make_from_row(version=version, size=file_status.st_size, location=location)


def choose_name(value: object, default: str) -> str:
    """Return the name of a document with this value in the id column; `default` if there is no value."""
    name = "" if value is None else str(value)
    return name if name.strip() else default


def is_table(location: str) -> bool:
    """Return whether a path, pattern or URL has the suffix of a table."""
    return PurePosixPath(display_url(location)).suffix.lower() in TABLE_SUFFIXES


def _iter_dataset_rows(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """Yield rows without decoding images, sounds and the like, which would open the file or address that they name."""
    if features := dataset.features:  # a copy; without them, nothing is decoded
        _stop_decoding(features)
        dataset.info.features = type(features)(features)  # a new object, because it notes which columns are decoded
    yield from dataset.with_format(None)


def _stop_decoding(feature: Any) -> None:
    """Make the types in a dataset's features yield what is stored, except JSON, whose decoding opens no file."""
    if isinstance(feature, Mapping | list):
        for part in feature.values() if isinstance(feature, Mapping) else feature:
            _stop_decoding(part)
    elif hasattr(feature, "feature"):
        _stop_decoding(feature.feature)
    elif hasattr(feature, "decode") and type(feature).__name__ != "Json":
        feature.decode = False


def _iter_json_rows(file: Any, codec: str) -> Iterator[Mapping[str, Any] | str]:
    reader = io.BufferedReader(file, 2**20) if isinstance(file, io.RawIOBase) else file
    for line_number, line in enumerate(iter(partial(reader.readline, _MAX_LINE_BYTES), b""), 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line.decode(codec))
        except (ValueError, RecursionError) as error:
            yield f"line {line_number} is not JSON: {error}"
            continue
        yield row if isinstance(row, dict) else f"line {line_number} is not a JSON object"


def _parse_questions(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    if isinstance(value, list | tuple) and all(isinstance(question, str) for question in value):
        return tuple(question for question in value if question.strip())
    raise TypeError(type(value).__name__)


def _to_json(value: Any) -> Any:
    """Convert a cell to a JSON-serializable value. Dates and other types become strings."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return str(value)
