"""The table of a corpus: a folder of Parquet parts and a manifest, on a disk or in an object store.

    part-000000.parquet ...   rows; a part is written at once and never changes
    _manifest.json            settings, the parts with their sizes and digests, and the id of the last writer
    _work/                    ledger, checkpoints and texts, if the folder is on a disk

`pandas.read_parquet(folder)`, DuckDB's `'folder/*.parquet'` and `datasets.load_dataset("parquet", ...)` read it as one
table and skip the names that begin with an underscore. The columns are the fields of `corpus_rows.CorpusRow`; `value`
and `metadata` are JSON. If the answers have a schema, its typed columns follow (see `typed_columns`).

Two runs cannot write to the same table. On one machine, a lock refuses the second run at once. On several machines,
the manifest contains the id of the run that started last, and any other run stops before its next part.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, Any, Final, TypeAlias, cast

import msgspec

from memagent_corpus.corpus_rows import CorpusRow, make_arrow_schema
from memagent_corpus.source_access import SourceAccess, convert_store_errors, display_url, get_scheme
from memagent_corpus.typed_columns import TypedColumn
from memagent_graph.errors import CorpusError, DocumentError
from memagent_graph.plain_text import replace_lone_surrogates
from memagent_graph.settings import iter_differences
from memagent_graph.storage.parquet_rows import iter_rows, load_pyarrow, open_parquet
from memagent_graph.storage.private_files import (
    UNFINISHED_PREFIX,
    create_private_folder,
    get_data_folder,
    open_atomically,
)

MANIFEST: Final = "_manifest.json"
WORK_FOLDER: Final = "_work"
_TABLE_FORMAT: Final = "memagent-corpus"
_VERSION: Final = 1
_PART_NAME: Final = re.compile(r"part-\d{6,}\.parquet")
_BATCH_ROWS: Final = 1024
_MAX_MANIFEST_BYTES: Final = 64 << 20
_KEY_COLUMNS: Final = ("id", "document", "question")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_RESPONSE_FORMAT: Final = "response_format"
_MAX_DIFFERENCES: Final = 12
_MAX_VALUE_LENGTH: Final = 160


@dataclass(frozen=True, slots=True)
class TablePart:
    """One part in the manifest."""

    number: _Count
    rows: _Count
    failed: _Count
    bytes: _Count
    sha256: str

    @property
    def name(self) -> str:
        """The name of the part's file."""
        return f"part-{self.number:06d}.parquet"


@dataclass(frozen=True, slots=True)
class TableManifest:
    """The settings and parts of a table."""

    settings: Mapping[str, Any]
    input: str
    """The description of the input."""
    parts: tuple[TablePart, ...] = ()
    writer: str = ""
    """The id of the run that last started to write."""
    format: str = _TABLE_FORMAT
    version: int = _VERSION


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
        self.display_name = display_url(self.location)
        """The location for messages."""
        self._writer = secrets.token_hex(8)
        self._has_taken_over = False
        self._folder = None if get_scheme(self.location) else Path(self.location).absolute()
        """The folder, if it is on a disk."""
        self._filesystem, path = self.access.open_filesystem(self.location)
        self._path = path.rstrip("/")
        self.work_folder = Path(self.location) / WORK_FOLDER
        """The work folder on this machine, with the files that resuming needs."""
        if self._folder is None:
            self.work_folder = get_data_folder() / "corpora" / hashlib.sha256(self.location.encode()).hexdigest()[:24]

    # Reading

    def manifest(self) -> TableManifest | None:
        """Return the manifest; None if there is no table yet.

        Raises:
            CorpusError: the manifest cannot be read.
        """
        content = self._read_file(MANIFEST, _MAX_MANIFEST_BYTES)  # the JSON of a larger one is cut off
        if content is None:
            return None
        try:
            manifest = msgspec.json.decode(content, type=TableManifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CorpusError(
                f"the manifest of {self.display_name} cannot be read: {error}",
                hint="Use another folder with --out, or restore the manifest.",
            ) from error
        if manifest.format != _TABLE_FORMAT:
            raise CorpusError(
                f"{self.display_name} has the manifest of another program", hint="Use another folder with --out."
            )
        if manifest.version > _VERSION:
            raise CorpusError(
                f"{self.display_name} was written by a newer version of this package", hint="Update memagent-graph."
            )
        return manifest

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the table's rows as dictionaries, part by part.

        Args:
            columns: the columns to read; all by default.

        Raises:
            CorpusError: there is no table, or a part is missing or differs from what was written.
        """
        manifest = self.manifest()
        if manifest is None:
            raise CorpusError(f"there is no table in {self.display_name}", hint="Create one with `memagent corpus`.")
        for part in manifest.parts:
            yield from self.read_part_rows(part, columns)

    def read_part_rows(self, part: TablePart, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of one part."""
        content = self._read_file(part.name)
        if content is None or hashlib.sha256(content).hexdigest() != part.sha256:
            raise CorpusError(
                f"the part {part.name} of {self.display_name} is missing or damaged",
                hint="Restore it from a copy, or run the same command with --retry-failed.",
            )
        arrow = load_pyarrow("corpus", "reading and writing tables")
        try:
            file = open_parquet(io.BytesIO(content), "corpus", "reading tables")
            if missing_columns := {*CorpusRow.__struct_fields__} - {*file.schema_arrow.names}:
                raise arrow.ArrowInvalid(f"it has no column {min(missing_columns)}")
            for batch in iter_rows(file, list(columns) if columns else None):
                for row in batch.to_pylist():
                    for name in row.keys() & _KEY_COLUMNS:
                        if not isinstance(row[name], str):
                            raise ValueError(f"the {name} of a row is not a text")
                    yield row
        except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise CorpusError(
                f"the part {part.name} of {self.display_name} is not one that `memagent corpus` wrote: {error}",
                hint="Use another folder with --out.",
            ) from error

    def find_damaged_parts(self, parts: Iterable[TablePart]) -> list[TablePart]:
        """Return the parts that are missing or differ from what was written.

        On a disk, contents are compared. In a store, which checks contents itself, only sizes are compared.
        """
        sizes = self._list_sizes()

        def is_intact(part: TablePart) -> bool:
            if sizes.get(part.name) != part.bytes:
                return False
            if self._folder is None:
                return True
            if not (self._folder / part.name).is_file():
                return False
            with (self._folder / part.name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == part.sha256

        with self._convert_errors("read"):
            return [part for part in parts if not is_intact(part)]

    # Writing

    def take_over(self, settings: Mapping[str, Any], description: str) -> TableManifest:
        """Start to write to the table. Every other run that writes to it stops before its next part.

        Args:
            settings: the settings of the rows.
            description: the description of the input.

        Raises:
            CorpusError: the table has other settings (the message lists them), the folder has other files, or the
                folder cannot be written.
        """
        load_pyarrow("corpus", "reading and writing tables")
        manifest = self.manifest()
        if manifest is None:
            if other_files := [
                name for name in self._list_sizes() if name != WORK_FOLDER and not name.startswith(UNFINISHED_PREFIX)
            ]:
                raise CorpusError(
                    f"{self.display_name} is not empty and has no table: {', '.join(sorted(other_files)[:3])}",
                    hint="Use a new folder with --out.",
                )
            manifest = TableManifest(settings, description)
        elif differences := describe_differences(manifest.settings, settings):
            raise CorpusError(
                f"the table in {self.display_name} has other settings: {'; '.join(differences)}",
                hint="Use the same settings to add to it, or use another folder with --out.",
            )
        manifest = replace(manifest, input=replace_lone_surrogates(description), writer=self._writer)
        self._write_manifest(manifest)
        self._has_taken_over = True
        return manifest

    def write_part(
        self, part_number: int, rows: Iterable[Mapping[str, Any]], columns: Sequence[TypedColumn]
    ) -> TablePart | None:
        """Write a part, one row group at a time. It belongs to the table once it is published.

        Args:
            part_number: the number of the part.
            rows: values by column (`corpus_rows.list_column_values`).
            columns: the typed columns; empty if the answers have no schema.

        Returns:
            The part; None, and no file, if there are no rows.

        Raises:
            CorpusError: the part cannot be written, or another run has taken over.
        """
        self._require_writer()
        arrow = load_pyarrow("corpus", "reading and writing tables")
        schema = make_arrow_schema(columns, {"memagent.format": f"{_TABLE_FORMAT} {_VERSION}"})
        row_iterator, row_count, failed_count = iter(rows), 0, 0
        batch = list(itertools.islice(row_iterator, _BATCH_ROWS))
        if not batch:
            return None
        with self._convert_errors(), self._create_file(TablePart(part_number, 0, 0, 0, "").name) as file:
            with arrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:
                while batch:
                    writer.write_table(_make_arrow_table(arrow, batch, schema))
                    row_count += len(batch)
                    failed_count += sum(row["error"] is not None for row in batch)
                    batch = list(itertools.islice(row_iterator, _BATCH_ROWS))
            byte_count = file.seek(0, os.SEEK_END)
            file.seek(0)
            digest = hashlib.file_digest(cast("io.BufferedRandom", file), "sha256").hexdigest()
        arrow.default_memory_pool().release_unused()  # otherwise the pool keeps the memory of the largest part
        return TablePart(part_number, row_count, failed_count, byte_count, digest)

    def publish(self, parts: Sequence[TablePart]) -> None:
        """Write the manifest with exactly these parts.

        Raises:
            CorpusError: the manifest cannot be written, or another run has taken over.
        """
        manifest = self._require_writer()
        self._write_manifest(replace(manifest, parts=tuple(sorted(parts, key=lambda part: part.number))))

    def remove_unlisted_files(self) -> None:
        """Remove the files of parts that are not in the manifest, and those that a killed run was writing."""
        part_names = {part.name for part in self._require_writer().parts}
        with self._convert_errors():
            for name in self._list_sizes():
                if name.startswith(UNFINISHED_PREFIX) or (_PART_NAME.fullmatch(name) and name not in part_names):
                    self._filesystem.rm_file(f"{self._path}/{name}")

    def _write_manifest(self, manifest: TableManifest) -> None:
        content = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        with self._convert_errors(), self._create_file(MANIFEST) as file:
            file.write(content + b"\n")

    def _require_writer(self) -> TableManifest:
        """Return the manifest. Raise if `take_over` was not called, or another run has taken over since."""
        if not self._has_taken_over:
            raise CorpusError("the table is not open for writing", hint="Call `take_over` first.")
        manifest = self.manifest()
        if manifest is None or manifest.writer != self._writer:
            raise CorpusError(
                f"another run is writing to {self.display_name}",
                hint="Only one run at a time can write to a table. Finished rows are kept. To continue this run, wait "
                "until the other one ends and run the same command again.",
            )
        return manifest

    # Files

    def _list_sizes(self) -> dict[str, int | None]:
        """Return the names in the folder with their sizes in bytes."""
        with self._convert_errors("read"), convert_store_errors(self.location), suppress(FileNotFoundError):
            self._filesystem.invalidate_cache()
            entries = self._filesystem.ls(self._path, detail=True)
            return {str(entry["name"]).rstrip("/").rpartition("/")[2]: entry.get("size") for entry in entries}
        return {}

    def _read_file(self, name: str, max_bytes: int | None = None) -> bytes | None:
        """Return a file's content, or only its beginning of `max_bytes`; None if it does not exist."""
        with self._convert_errors("read"), convert_store_errors(f"{self.location}/{name}"):
            self._filesystem.invalidate_cache()
            if self._folder is not None and (self._folder / name).exists() and not (self._folder / name).is_file():
                raise DocumentError(f"{name} is not a regular file", hint="Remove it, or choose a new folder.")
            with suppress(FileNotFoundError):
                limits = {} if max_bytes is None else {"start": 0, "end": max_bytes}
                return bytes(self._filesystem.cat_file(f"{self._path}/{name}", **limits))
        return None

    @contextmanager
    def _create_file(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file that appears, complete and synced to disk, when the block ends; not if the block raises."""
        if self._folder is None:
            with tempfile.NamedTemporaryFile(prefix="memagent-part-") as file:
                yield file
                file.flush()
                with convert_store_errors(self.location):
                    self._filesystem.put_file(file.name, f"{self._path}/{name}")
            return
        if not self._folder.is_dir():
            create_private_folder(self._folder)
        with open_atomically(self._folder / name) as file:
            yield file
        with suppress(OSError):  # some file systems cannot open folders
            descriptor = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @contextmanager
    def _convert_errors(self, action: str = "written") -> Iterator[None]:
        try:
            yield
        except (OSError, DocumentError) as error:
            if isinstance(error, DocumentError):
                reason, remedy = error.message, error.hint or "Check the folder."
            else:
                causes = "your permissions and the free disk space" if action == "written" else "your permissions"
                reason, remedy = str(error), f"Check {causes}."
            raise CorpusError(
                f"{self.display_name} cannot be {action}: {reason}",
                hint=f"{remedy} Then run the same command again. Finished rows are not lost.",
            ) from error


def _make_arrow_table(arrow: Any, rows: Sequence[Mapping[str, Any]], schema: Any) -> Any:
    try:
        return arrow.Table.from_pylist(rows, schema=schema)
    except (ValueError, TypeError, OverflowError) as error:
        raise CorpusError(
            f"a row of the ledger or of an older part does not fit the table: {error}",
            hint="They were not written by `memagent corpus`: remove the ledger, or use another folder with --out.",
        ) from error


def describe_differences(table_settings: Mapping[str, Any], run_settings: Mapping[str, Any]) -> list[str]:
    """Describe the settings that differ, as in "chunk_tokens: 5000 in the table, 2000 now".

    For schemas, the properties that differ are listed. The list has at most 12 differences.
    """
    differences = [
        f"{name}: {_shorten(table_value)} in the table, {_shorten(run_value)} now"
        for name, table_value, run_value in iter_differences(table_settings, run_settings)
    ]
    digest_prefix, schema_prefix = f"{_RESPONSE_FORMAT}.digest:", f"{_RESPONSE_FORMAT}.schema."
    selection = [difference for difference in differences if not difference.startswith(digest_prefix)]
    if len(selection) < len(differences) and not any(difference.startswith(schema_prefix) for difference in selection):
        selection.append(f"{_RESPONSE_FORMAT}: the table has the same schema with its properties in another order")
    omitted_count = len(selection) - _MAX_DIFFERENCES
    return selection[:_MAX_DIFFERENCES] + ([f"and {omitted_count} more"] if omitted_count > 0 else [])


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."
