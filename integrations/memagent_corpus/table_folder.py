"""The table of a corpus: a folder of Parquet parts and a manifest, on a disk or in an object store.

    part-000000.parquet ...   rows; each part is written atomically
    _manifest.json            settings, the parts with their sizes and digests, and the id of the last writer
    _work/                    ledger, checkpoints and texts, if the folder is on a disk

`pandas.read_parquet(folder)`, DuckDB's `'folder/*.parquet'` and `datasets.load_dataset("parquet", ...)` read it as one
table and skip the names that begin with an underscore. The columns are the fields of `corpus_rows.Row`; `value` and
`metadata` are JSON. If the answers have a schema, its typed columns follow (see `typed_columns`).

Two runs cannot write to the same table. On one machine, a lock refuses the second run at once. On several machines,
the manifest contains the id of the run that started last, and any other run stops before its next part.
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
from typing import IO, Any, Final

import msgspec

from memagent_corpus.corpus_rows import Quote, Row, RowEvent, RowUsage
from memagent_corpus.source_access import SourceAccess, scheme_of, shown, store_errors
from memagent_corpus.typed_columns import TypedColumn, columns_of, typed_values
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
_MAX_DIFFERENCES: Final = 12
_MAX_VALUE_LENGTH: Final = 160


@dataclass(frozen=True, slots=True)
class Part:
    """One part in the manifest."""

    name: str
    rows: int
    failed: int
    bytes: int
    sha256: str

    @property
    def number(self) -> int:
        """The part's number; -1 if the name has none."""
        match = _PART.fullmatch(self.name)
        return int(match[1]) if match else -1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The settings and parts of a table."""

    settings: Mapping[str, Any]
    input: str
    """The description of the input."""
    parts: tuple[Part, ...] = ()
    writer: str = ""
    """The id of the run that last started to write."""
    format: str = _FORMAT
    version: int = _VERSION

    @property
    def rows(self) -> int:
        """The number of rows in all parts."""
        return sum(part.rows for part in self.parts)


@dataclass
class TableFolder:
    """Reads and writes a table.

    Args:
        location: the folder's path or URL.
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
        """The work folder on this machine, with the files that resuming needs."""
        if isinstance(self._files, _LocalFiles):
            return self._files.folder / WORK
        return data_folder() / "corpora" / hashlib.sha256(self.location.encode()).hexdigest()[:24]

    # Reading

    def manifest(self) -> Manifest | None:
        """Return the manifest; None if there is no table yet.

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
                hint="Use another folder with --out, or restore the manifest.",
            ) from error
        if found.format != _FORMAT or found.version > _VERSION:
            raise CorpusError(
                f"{shown(self.location)} was written by a newer version of this package",
                hint="Update memagent-graph.",
            )
        return found

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the table's rows as dictionaries, part by part.

        Args:
            columns: the columns to read; all by default.

        Raises:
            CorpusError: there is no table, or a part is missing or damaged.
        """
        manifest = self.manifest()
        if manifest is None:
            raise CorpusError(f"there is no table in {shown(self.location)}", hint="Create one with `memagent corpus`.")
        for part in manifest.parts:
            yield from self.rows_of(part.name, columns)

    def rows_of(self, name: str, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of one part."""
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
        """Start to write to the table. Every other run that writes to it stops before its next part.

        Args:
            settings: the settings of the rows.
            description: the description of the input.

        Raises:
            CorpusError: the table has other settings (the message lists them), the folder has other files, or the
                folder cannot be written.
        """
        _arrow("pyarrow")
        found = self.manifest()
        if found is None:
            if others := [name for name in self._files.names() if name != WORK]:
                raise CorpusError(
                    f"{shown(self.location)} is not empty and has no table: {', '.join(sorted(others)[:3])}",
                    hint="Use a new folder with --out.",
                )
            found = Manifest(settings, description)
        elif difference := differences(found.settings, settings):
            raise CorpusError(
                f"the table in {shown(self.location)} has other settings: {'; '.join(difference)}",
                hint="Use the same settings to add to it, or use another folder with --out.",
            )
        self._manifest = Manifest(found.settings, description, found.parts, self._writer)
        self._write_manifest()
        return self._manifest

    def unlisted_parts(self) -> list[int]:
        """Return the numbers of parts that are not in the manifest, because their run was killed after writing them."""
        listed = {part.name for part in self._current.parts}
        numbers = (_PART.fullmatch(name) for name in self._files.names() if name not in listed)
        return sorted(int(found[1]) for found in numbers if found)

    def write_part(self, number: int, rows: Iterable[Row]) -> None:
        """Write or replace a part, and add it to the manifest. A part without rows is not written.

        Raises:
            CorpusError: the part cannot be written, or another run has taken over.
        """
        columns = _typed_columns(self._current.settings)
        self._put(number, (_plain(row, columns) for row in rows))

    def remove_rows(self, number: int, ids: set[str]) -> None:
        """Rewrite a part without some of its rows. If no rows are left, the part is removed."""
        name = part_name(number)
        if any(part.name == name for part in self._current.parts):
            self._put(number, (row for row in self.rows_of(name) if row["id"] not in ids))

    def add_to_manifest(self, number: int) -> None:
        """Add a part to the manifest whose file already exists."""
        self._put(number, self.rows_of(part_name(number)))

    @property
    def _current(self) -> Manifest:
        if self._manifest is None:
            raise CorpusError("the table is not open for writing", hint="Call `take_over` first.")
        return self._manifest

    def _put(self, number: int, rows: Iterable[dict[str, Any]]) -> None:
        self._check_writer()
        name = part_name(number)
        existed = any(part.name == name for part in self._current.parts)
        parts = [part for part in self._current.parts if part.name != name]
        with self._as_corpus_error(), self._files.writing(name) as file:
            count, failed = _write_rows(rows, _typed_columns(self._current.settings), file)
            file.is_discarded = not count
        if count:
            parts.append(Part(name, count, failed, file.bytes, file.digest.hexdigest()))
        parts.sort(key=lambda part: part.number)
        self._manifest = Manifest(self._current.settings, self._current.input, tuple(parts), self._writer)
        self._write_manifest()
        if existed and not count:
            with self._as_corpus_error():
                self._files.remove(name)

    def _write_manifest(self) -> None:
        content = msgspec.json.format(msgspec.json.encode(self._current), indent=1)
        with self._as_corpus_error():
            self._files.write(MANIFEST, content + b"\n")

    def _check_writer(self) -> None:
        """Raise if another run has taken over."""
        found = self.manifest()
        if found is None or found.writer != self._writer:
            raise CorpusError(
                f"another run writes to {shown(self.location)} now",
                hint="Only one run at a time can write to a table. Finished rows are kept. To continue this run, wait "
                "until the other one ends and run the same command again.",
            )

    @contextmanager
    def _as_corpus_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, DocumentError) as error:
            reason = error.message if isinstance(error, DocumentError) else str(error)
            raise CorpusError(
                f"{shown(self.location)} cannot be written: {reason}",
                hint="Free some disk space or check your permissions, then run the same command again. Finished rows "
                "are not lost.",
            ) from error


def part_name(number: int) -> str:
    """Return the file name of a part."""
    return f"part-{number:06d}.parquet"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the settings that differ, as in "chunk_tokens: 5000 in the table, 2000 now".

    For schemas, the properties that differ are listed. The list has at most 12 differences.
    """
    found = list(_differences(json.loads(json.dumps(before)), json.loads(json.dumps(now)), ""))
    digest, schema = f"{_FORM}.digest:", f"{_FORM}.schema."
    listed = [each for each in found if not each.startswith(digest)]
    if len(listed) < len(found) and not any(each.startswith(schema) for each in listed):
        listed.append(f"{_FORM}: the table has the same schema with its properties in another order")
    more = len(listed) - _MAX_DIFFERENCES
    return listed[:_MAX_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str) -> Iterator[str]:
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{within}{name}.")
        elif old != new:
            yield f"{within}{name}: {_brief(old)} in the table, {_brief(new)} now"


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


class _NewFile(io.RawIOBase):
    """A file that is being written; it counts its bytes and hashes them."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.bytes = 0
        self.digest = hashlib.sha256()
        self.is_discarded = False
        """Whether it should not be kept."""

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._raw.write(content)
        self.digest.update(content)
        size = memoryview(content).nbytes
        self.bytes += size
        return size


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
            raise CorpusError(f"{self.folder / name} cannot be read: {error}", hint="Check its permissions.") from error

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically, and flush it to disk."""
        with self.writing(name) as file:
            file.write(content)

    @contextmanager
    def writing(self, name: str) -> Iterator[_NewFile]:
        """Open a file that appears when the block ends, whole and on disk; not if it raises or discards the file."""
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
        with suppress(OSError):  # some file systems cannot open folders
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


class _StoreFiles:
    """A folder in an object store, where uploads are atomic."""

    def __init__(self, url: str, access: SourceAccess) -> None:
        self._url = url
        self._filesystem, path = access.filesystem(url)
        self._path = path.rstrip("/")

    def names(self) -> Iterable[str]:
        with store_errors(self._url):
            self._filesystem.invalidate_cache()
            try:
                return [
                    str(each).rstrip("/").rpartition("/")[2] for each in self._filesystem.ls(self._path, detail=False)
                ]
            except FileNotFoundError:
                return []

    def read(self, name: str) -> bytes | None:
        with store_errors(self._url):
            self._filesystem.invalidate_cache()
            try:
                return bytes(self._filesystem.cat_file(f"{self._path}/{name}"))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        with store_errors(self._url):
            self._filesystem.pipe_file(f"{self._path}/{name}", content)

    @contextmanager
    def writing(self, name: str) -> Iterator[_NewFile]:
        """Open a file that is uploaded when the block ends; not if it raises or discards the file."""
        with tempfile.NamedTemporaryFile(prefix="memagent-part-") as raw:
            file = _NewFile(raw)
            yield file
            raw.flush()
            if not file.is_discarded:
                with store_errors(self._url):
                    self._filesystem.put_file(raw.name, f"{self._path}/{name}")

    def remove(self, name: str) -> None:
        with store_errors(self._url), suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._path}/{name}")


def _typed_columns(settings: Mapping[str, Any]) -> tuple[TypedColumn, ...]:
    """Return the typed columns of a table with these settings; none if the answers have no schema."""
    form = settings.get(_FORM)
    return columns_of(ResponseFormat("answer", json.dumps(form["schema"])), Row.__struct_fields__) if form else ()


def _plain(row: Row, columns: Sequence[TypedColumn]) -> dict[str, Any]:
    """Return a row's values by column, as they are written to Parquet."""
    values: dict[str, Any] = msgspec.to_builtins(row)
    values |= typed_values(columns, values["value"]).values
    values["value"] = None if row.value is None else json.dumps(values["value"], ensure_ascii=False)
    values["metadata"] = json.dumps(values["metadata"], ensure_ascii=False) if row.metadata else None
    return values


def row_from(values: Mapping[str, Any]) -> Row:
    """Convert a table row to a `Row`. Typed columns are ignored, because `value` contains the same data."""
    known = {name: values[name] for name in Row.__struct_fields__ if name in values}
    known["value"] = None if known.get("value") is None else json.loads(known["value"])
    known["metadata"] = json.loads(known["metadata"]) if known.get("metadata") else {}
    return msgspec.convert(known, Row)


def arrow_table(rows: Iterable[Row], columns: Sequence[TypedColumn] = ()) -> Any:
    """Convert rows to a `pyarrow.Table` with the columns of the table's parts.

    Args:
        rows: the rows.
        columns: the typed columns, if the answers have a schema.
    """
    arrow = _arrow("pyarrow")
    return arrow.Table.from_pylist([_plain(row, columns) for row in rows], schema=_schema(arrow, columns))


def _write_rows(rows: Iterable[dict[str, Any]], columns: Sequence[TypedColumn], file: _NewFile) -> tuple[int, int]:
    """Write rows as a Parquet file, one row group at a time; the numbers of rows and of rows with an error."""
    arrow, parquet = _arrow("pyarrow"), _arrow("pyarrow.parquet")
    schema, count, failed = _schema(arrow, columns), 0, 0
    source = iter(rows)
    with parquet.ParquetWriter(arrow.PythonFile(file, "w"), schema, compression="zstd") as writer:
        while batch := list(itertools.islice(source, _GROUP_ROWS)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
            failed += sum(row["error"] is not None for row in batch)
    arrow.default_memory_pool().release_unused()  # or it keeps what the largest part needed
    return count, failed


def _schema(arrow: Any, typed: Sequence[TypedColumn]) -> Any:
    """Return the Arrow schema of a part: the fields of `Row`, then the typed columns."""
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
        raise MissingExtraError("corpus", "reading and writing tables") from None
