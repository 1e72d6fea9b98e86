"""The table of a corpus: a folder of Parquet parts and a manifest, on a disk or in an object store.

    part-000000.parquet ...   rows; each part appears whole or not at all
    _manifest.json            settings, the parts with their sizes and digests, and who wrote last
    _work/                    ledger, checkpoints and texts, if the folder is on a disk

`pandas.read_parquet(folder)`, DuckDB's `'folder/*.parquet'` and `datasets.load_dataset("parquet", ...)` read it as one
table: names with an underscore are left out. Columns are those of `corpus_rows.Row`; `value` and `metadata` are JSON.
If the answers have a schema, the typed columns of its properties follow (`typed_columns`).

Two runs cannot write to one table. On one machine a lock says so at once. Elsewhere the manifest does: whoever starts
last is named in it, and any other run stops at its next part.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import itertools
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

from memagent_graph.corpus.corpus_rows import Quote, Row, RowEvent, RowUsage
from memagent_graph.corpus.source_access import SourceAccess, scheme_of, shown, store_failures
from memagent_graph.corpus.typed_columns import TypedColumn, columns_of, typed_values
from memagent_graph.errors import CorpusError, DocumentError, MissingExtraError
from memagent_graph.response_format import ResponseFormat
from memagent_graph.storage.paths import data_folder
from memagent_graph.storage.private_files import private_folder

MANIFEST: Final = "_manifest.json"
WORK: Final = "_work"
_FORMAT: Final = "memagent-corpus"
_VERSION: Final = 1
_PART: Final = re.compile(r"part-(\d{6,})\.parquet")
_READ_ROWS: Final = 1024
_GROUP_ROWS: Final = 1024
_FORM: Final = "response_format"
_MOST_DIFFERENCES: Final = 12
_LONGEST_DIFFERENCE: Final = 160


@dataclass(frozen=True, slots=True)
class Part:
    """A part as the manifest has it."""

    name: str
    rows: int
    failed: int
    bytes: int
    sha256: str

    @property
    def number(self) -> int:
        """Its place."""
        found = _PART.fullmatch(self.name)
        return int(found[1]) if found else -1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the table consists of."""

    settings: Mapping[str, Any]
    input: str
    parts: tuple[Part, ...] = ()
    writer: str = ""
    """Who wrote it last."""
    format: str = _FORMAT
    version: int = _VERSION

    @property
    def rows(self) -> int:
        """Rows in all parts."""
        return sum(part.rows for part in self.parts)


@dataclass
class TableFolder:
    """A table, for reading and for writing.

    Args:
        location: the folder's path, or its URL.
        access: opens object stores.
    """

    location: str
    access: SourceAccess = field(default_factory=SourceAccess)

    def __post_init__(self) -> None:
        self._writer = secrets.token_hex(8)
        self._files: _LocalFiles | _StoreFiles = (
            _StoreFiles(self.location, self.access) if scheme_of(self.location) else _LocalFiles(Path(self.location))
        )
        self._manifest: Manifest | None = None

    @property
    def work(self) -> Path:
        """The folder on this machine for what resuming needs."""
        if isinstance(self._files, _LocalFiles):
            return self._files.folder / WORK
        return data_folder() / "corpora" / hashlib.sha256(self.location.encode()).hexdigest()[:24]

    # Reading

    def manifest(self) -> Manifest | None:
        """What the table consists of; None if there is none yet.

        Raises:
            CorpusError: the manifest cannot be read.
        """
        content = self._files.read(MANIFEST)
        if content is None:
            return None
        try:
            found = msgspec.json.decode(content, type=Manifest)
        except msgspec.DecodeError as error:
            raise CorpusError(
                f"the manifest of {shown(self.location)} cannot be read: {error}",
                hint="Name another folder with --out, or restore the manifest.",
            ) from error
        if found.format != _FORMAT or found.version > _VERSION:
            raise CorpusError(
                f"{shown(self.location)} was written by a newer version of this package", hint="Update it."
            )
        return found

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """The table's rows as plain values, a part after another.

        Args:
            columns: those that are wanted; all if it is left out.

        Raises:
            CorpusError: there is no table, or a part is missing or damaged.
        """
        manifest = self.manifest()
        if manifest is None:
            raise CorpusError(f"there is no table in {shown(self.location)}", hint="`memagent corpus` writes one.")
        for part in manifest.parts:
            yield from self.rows_of(part.name, columns)

    def rows_of(self, name: str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows of one part."""
        content = self._files.read(name)
        if content is None:
            raise CorpusError(
                f"the part {name} of {shown(self.location)} is missing", hint="Restore it, or start a new table."
            )
        arrow, parquet = _arrow("pyarrow"), _arrow("pyarrow.parquet")
        try:
            file = parquet.ParquetFile(io.BytesIO(content))
            for batch in file.iter_batches(batch_size=_READ_ROWS, columns=list(columns) if columns else None):
                yield from batch.to_pylist()
        except arrow.ArrowException as error:
            raise CorpusError(
                f"the part {name} of {shown(self.location)} is damaged: {error}", hint="Restore it from a copy."
            ) from error

    # Writing

    def take_over(self, settings: Mapping[str, Any], description: str) -> Manifest:
        """Begin to write, or continue: from here on every other run that writes to this table stops.

        Raises:
            CorpusError: the table was made with other settings; the message has the difference. Or the folder has
                other files, or cannot be written.
        """
        _arrow("pyarrow")
        found = self.manifest()
        if found is None:
            if others := [name for name in self._files.names() if name != WORK]:
                raise CorpusError(
                    f"{shown(self.location)} is not empty, and has no table: {', '.join(sorted(others)[:3])}",
                    hint="Name a new folder with --out.",
                )
            found = Manifest(settings, description)
        elif difference := differences(found.settings, settings):
            raise CorpusError(
                f"the table in {shown(self.location)} was made with other settings: {'; '.join(difference)}",
                hint="Use the same settings to add to it, or name another folder with --out.",
            )
        self._manifest = Manifest(found.settings, description, found.parts, self._writer)
        self._write_manifest()
        return self._manifest

    def unlisted(self) -> list[int]:
        """Whole parts that the manifest does not have: written by a run that was killed then."""
        listed = {part.name for part in self._current.parts}
        numbers = (_PART.fullmatch(name) for name in self._files.names() if name not in listed)
        return sorted(int(found[1]) for found in numbers if found)

    def write_part(self, number: int, rows: Iterable[Row]) -> None:
        """Write a part, or write it again, and enter it in the manifest. Without rows, no part is written.

        Raises:
            CorpusError: the disk is full, the store refuses, or another run has taken over.
        """
        columns = _typed_columns(self._current.settings)
        self._put(number, (_plain(row, columns) for row in rows))

    def remove_rows(self, number: int, ids: set[str]) -> None:
        """Write a part again without some of its rows; an empty one is removed."""
        name = part_name(number)
        if any(part.name == name for part in self._current.parts):
            self._put(number, (row for row in self.rows_of(name) if row["id"] not in ids))

    def list_part(self, number: int) -> None:
        """Enter a part in the manifest that is there."""
        self._put(number, self.rows_of(part_name(number)))

    @property
    def _current(self) -> Manifest:
        if self._manifest is None:
            raise CorpusError("the table is not open for writing", hint="Call take_over first.")
        return self._manifest

    def _put(self, number: int, rows: Iterable[dict[str, Any]]) -> None:
        self._require_mine()
        name = part_name(number)
        was_there = any(part.name == name for part in self._current.parts)
        others = [part for part in self._current.parts if part.name != name]
        with self._failures_told(), self._files.writing(name) as file:
            made = _write_parquet(rows, _typed_columns(self._current.settings), file)
            if not made.rows:
                file.discard()
        if made.rows:
            others.append(Part(name, made.rows, made.failed, file.bytes, file.digest.hexdigest()))
        parts = tuple(sorted(others, key=lambda part: part.number))
        self._manifest = Manifest(self._current.settings, self._current.input, parts, self._writer)
        self._write_manifest()
        if was_there and not made.rows:
            with self._failures_told():
                self._files.remove(name)

    def _write_manifest(self) -> None:
        content = msgspec.json.format(msgspec.json.encode(self._current), indent=1)
        with self._failures_told():
            self._files.write(MANIFEST, content + b"\n")

    def _require_mine(self) -> None:
        """Nobody else has taken over."""
        found = self.manifest()
        if found is None or found.writer != self._writer:
            raise CorpusError(
                f"another run writes to {shown(self.location)} now",
                hint="Let one run write to a table at a time. What this one has read is kept; it continues when it is "
                "started again.",
            )

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, DocumentError) as error:
            words = error.message if isinstance(error, DocumentError) else str(error)
            raise CorpusError(
                f"{shown(self.location)} cannot be written: {words}",
                hint="Make room, or check your rights there, and start the same command again: nothing that was read "
                "is lost.",
            ) from error


def part_name(number: int) -> str:
    """The name of a part."""
    return f"part-{number:06d}.parquet"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings that differ, as in "chunk_tokens: 5000 there, 2000 now"; of a schema, the parts that differ."""
    found = list(_differences(json.loads(json.dumps(before)), json.loads(json.dumps(now)), ""))
    digest, schema = f"{_FORM}.digest:", f"{_FORM}.schema."
    told = [each for each in found if not each.startswith(digest)]
    if len(told) < len(found) and not any(each.startswith(schema) for each in told):
        told.append(f"{_FORM}: the same schema there, with its parts in another order")
    shown = told[:_MOST_DIFFERENCES]
    return shown + [f"and {len(told) - len(shown)} more"] * (len(told) > len(shown))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str) -> Iterator[str]:
    for name in dict.fromkeys((*before, *now)):
        there, here = before.get(name), now.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            yield from _differences(there, here, f"{within}{name}.")
        elif there != here:
            yield f"{within}{name}: {_brief(there)} there, {_brief(here)} now"


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= _LONGEST_DIFFERENCE else f"{text[:_LONGEST_DIFFERENCE]}..."


class _NewFile(io.RawIOBase):
    """A file that is being written, from its beginning to its end; its size and digest are known then."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.bytes = 0
        self.digest = hashlib.sha256()
        self.is_discarded = False

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._raw.write(content)
        self.digest.update(content)
        size = memoryview(content).nbytes
        self.bytes += size
        return size

    def discard(self) -> None:
        """It is not to be there."""
        self.is_discarded = True


class _LocalFiles:
    """A folder on a disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> Iterable[str]:
        return [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CorpusError(
                f"{self.folder / name} cannot be read: {error}", hint="Check your rights there."
            ) from error

    def write(self, name: str, content: bytes) -> None:
        """Whole and on disk, or not at all."""
        with self.writing(name) as file:
            file.write(content)

    @contextmanager
    def writing(self, name: str) -> Iterator[_NewFile]:
        """A file that is there, whole and on disk, when the block ends; not at all if it raises, or discards it."""
        if not self.folder.is_dir():
            private_folder(self.folder)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as raw:
                file = _NewFile(raw)
                yield file
                raw.flush()
                os.fsync(raw.fileno())
            if file.is_discarded:
                Path(temporary).unlink()
                return
            Path(temporary).replace(self.folder / name)
        except BaseException:
            with suppress(OSError):
                Path(temporary).unlink()
            raise
        with suppress(OSError):  # a file system on which folders cannot be opened
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


class _StoreFiles:
    """A folder in an object store, where an upload is whole or not there at all."""

    def __init__(self, url: str, access: SourceAccess) -> None:
        self._url = url
        self._filesystem, path = access.filesystem(url)
        self._path = path.rstrip("/")

    def names(self) -> Iterable[str]:
        with store_failures(self._url):
            self._filesystem.invalidate_cache()
            try:
                return [
                    str(each).rstrip("/").rpartition("/")[2] for each in self._filesystem.ls(self._path, detail=False)
                ]
            except FileNotFoundError:
                return []

    def read(self, name: str) -> bytes | None:
        with store_failures(self._url):
            self._filesystem.invalidate_cache()
            try:
                return bytes(self._filesystem.cat_file(f"{self._path}/{name}"))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        with store_failures(self._url):
            self._filesystem.pipe_file(f"{self._path}/{name}", content)

    @contextmanager
    def writing(self, name: str) -> Iterator[_NewFile]:
        """A file that is uploaded when the block ends; not at all if it raises, or discards it."""
        with tempfile.NamedTemporaryFile(prefix="memagent-part-") as raw:
            file = _NewFile(raw)
            yield file
            raw.flush()
            if not file.is_discarded:
                with store_failures(self._url):
                    self._filesystem.put_file(raw.name, f"{self._path}/{name}")

    def remove(self, name: str) -> None:
        with store_failures(self._url), suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._path}/{name}")


def _typed_columns(settings: Mapping[str, Any]) -> tuple[TypedColumn, ...]:
    """The typed columns of a table with these settings; none if its answers have no schema."""
    form = settings.get(_FORM)
    return columns_of(ResponseFormat("answer", json.dumps(form["schema"])), Row.__struct_fields__) if form else ()


def _plain(row: Row, columns: Sequence[TypedColumn]) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(row)
    values |= typed_values(columns, values["value"]).values
    values["value"] = None if row.value is None else json.dumps(values["value"], ensure_ascii=False)
    values["metadata"] = json.dumps(values["metadata"], ensure_ascii=False) if row.metadata else None
    return values


def row_from(values: Mapping[str, Any]) -> Row:
    """The row from a table's plain values; typed columns are left out, as `value` has them."""
    known = {name: values[name] for name in Row.__struct_fields__ if name in values}
    known["value"] = None if known.get("value") is None else json.loads(known["value"])
    known["metadata"] = json.loads(known["metadata"]) if known.get("metadata") else {}
    return msgspec.convert(known, Row)


def arrow_table(rows: Iterable[Row], columns: Sequence[TypedColumn] = ()) -> Any:
    """Rows as a `pyarrow.Table` with the columns of the table's parts.

    Args:
        rows: the rows.
        columns: the typed columns, if the answers have a schema.
    """
    arrow = _arrow("pyarrow")
    return arrow.Table.from_pylist([_plain(row, columns) for row in rows], schema=_schema(arrow, columns))


class _Made(NamedTuple):
    rows: int
    failed: int


def _write_parquet(rows: Iterable[dict[str, Any]], columns: Sequence[TypedColumn], file: _NewFile) -> _Made:
    """Write rows as a Parquet file, a row group at a time; no more of them is held."""
    arrow, parquet = _arrow("pyarrow"), _arrow("pyarrow.parquet")
    schema, count, failed = _schema(arrow, columns), 0, 0
    source = iter(rows)
    with parquet.ParquetWriter(arrow.PythonFile(file, "w"), schema, compression="zstd") as writer:
        while batch := list(itertools.islice(source, _GROUP_ROWS)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
            failed += sum(row["error"] is not None for row in batch)
    return _Made(count, failed)


def _schema(arrow: Any, typed: Sequence[TypedColumn]) -> Any:
    text, number, real = arrow.string(), arrow.int64(), arrow.float64()
    kinds: dict[str, Any] = {"str": text, "str | None": text, "int": number, "int | None": number, "float": real}

    def struct(kind: type[msgspec.Struct]) -> Any:
        return arrow.struct(
            [(each.name, kinds[str(kind.__annotations__[each.name])]) for each in msgspec.structs.fields(kind)]
        )

    special = {
        "evidence": arrow.list_(struct(Quote)),
        "events": arrow.list_(struct(RowEvent)),
        "usage": struct(RowUsage),
        "value": text,
        "metadata": text,
    }
    columns = [(name, special.get(name) or kinds[str(kind)]) for name, kind in Row.__annotations__.items()]
    columns += [(each.name, each.arrow_type(arrow)) for each in typed]
    return arrow.schema(columns, metadata={"memagent.format": f"{_FORMAT} {_VERSION}"})


def _arrow(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingExtraError("corpus", "writing and reading tables") from None
