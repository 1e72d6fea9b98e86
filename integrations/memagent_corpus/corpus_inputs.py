"""Opens a corpus by its name: a folder, a pattern, a table, an archive, a URL or a dataset."""

from __future__ import annotations

import glob
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from memagent_corpus.corpus_documents import CorpusDocument, Total
from memagent_corpus.file_inputs import (
    ArchiveInputs,
    FolderInputs,
    PatternInputs,
    SingleFile,
    StoreInputs,
    fixed_root,
    is_pattern,
    require_listable,
)
from memagent_corpus.source_access import WEB, SourceAccess, scheme_of, shown
from memagent_corpus.table_inputs import Columns, DatasetInputs, TableInputs, is_table
from memagent_graph.errors import DocumentError

DATASET: Final = "dataset:"
_ZIP: Final = "zip://"


class Inputs(Protocol):
    """A corpus that can be listed any number of times, with only a few documents in memory."""

    @property
    def description(self) -> str:
        """The name of the corpus in messages."""
        ...

    @property
    def access(self) -> SourceAccess:
        """Opens the documents."""
        ...

    def documents(self) -> Iterator[CorpusDocument]:
        """List all documents from the beginning.

        Raises:
            DocumentError: the source cannot be read, or lacks a column.
        """
        ...

    def ids(self) -> Iterator[str] | None:
        """List the documents' names if they come from a user's column; None if they cannot have duplicates."""
        ...

    def total(self) -> Total:
        """Count documents and bytes, as far as possible without opening the documents.

        Raises:
            DocumentError: the source cannot be read, or lacks a column.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """How a corpus is opened. An empty `access.root` is replaced by the folder or URL of the input."""

    access: SourceAccess = field(default_factory=SourceAccess)
    columns: Columns = field(default_factory=Columns)
    subset: str | None = None
    split: str = "train"


def open_inputs(given: str, options: InputOptions | None = None) -> Inputs:
    """Open a corpus by its name. No document is read yet.

    Args:
        given: a folder; a pattern such as `filings/**/*.pdf`; a Parquet, JSONL, CSV, TSV or ZIP file; any other file,
            which is a corpus of one document; a URL of any of these (s3, gs, az, http, ...); `zip://PATTERN::ARCHIVE`;
            or `dataset:NAME` for a Hugging Face dataset.
        options: the columns to use, and which sources may be opened.

    Raises:
        DocumentError: `given` does not exist, or may not be opened.
    """
    options = options or InputOptions()
    if given.startswith(DATASET):
        name = given.removeprefix(DATASET)
        return DatasetInputs(name, options.access, options.columns, options.subset, options.split)
    if given.startswith(_ZIP):
        pattern, separator, archive = given.removeprefix(_ZIP).partition("::")
        if not separator:
            return ArchiveInputs(pattern, options.access)
        if "::" in archive and not options.access.allow_chained:
            options.access.filesystem(archive)  # refuses the chain
        return ArchiveInputs(archive, options.access, pattern)
    return _at_url(given, options) if scheme_of(given) else _at_path(given, options)


def _at_url(url: str, options: InputOptions) -> Inputs:
    scheme = scheme_of(url)
    if scheme == "file":
        return _at_path(url.partition("://")[2], options)
    options.access.filesystem(url.partition("*")[0] if "::" not in url else url)
    if is_table(url):
        access = _with_root(options.access, url.rpartition("/")[0])
        locations = (url,) if not is_pattern(url) else _matching_tables(url, access)
        return TableInputs(locations, access, options.columns)
    if url.lower().split("?")[0].endswith(".zip"):
        return ArchiveInputs(url, options.access)
    if scheme in WEB:
        return SingleFile(url, options.access)
    if is_pattern(url) or url.endswith("/"):
        return StoreInputs(url, _with_root(options.access, url))
    filesystem, path = options.access.filesystem(url)
    try:
        is_file = filesystem.isfile(path)
    except Exception as error:  # each client library has its own exceptions
        raise DocumentError(
            f"{shown(url)} cannot be read ({type(error).__name__})", hint="Check the name and your permissions."
        ) from error
    return SingleFile(url, options.access) if is_file else StoreInputs(url, _with_root(options.access, url))


def _at_path(given: str, options: InputOptions) -> Inputs:
    path = Path(given).expanduser()
    if path.is_dir():
        require_listable(path)
        return FolderInputs(path, _with_root(options.access, str(path)))
    if path.exists():
        if is_table(str(path)):
            return TableInputs((str(path),), _with_root(options.access, str(path.parent)), options.columns)
        if path.suffix.lower() == ".zip":
            return ArchiveInputs(str(path), options.access)
        return SingleFile(str(path), _with_root(options.access, str(path.parent)))
    if is_pattern(given):
        pattern = str(path)
        access = _with_root(options.access, str(fixed_root(pattern)))
        if is_table(pattern):
            found = tuple(sorted(glob.iglob(pattern, recursive=True)))  # noqa: PTH207  Path.glob takes no absolute pattern
            if not found:
                raise DocumentError(f"no file matches {given}", hint="Check the pattern, and put it in quotes.")
            return TableInputs(found, access, options.columns)
        return PatternInputs(pattern, access)
    raise DocumentError(
        f"there is no file or folder {given}",
        hint="Use a folder, a pattern in quotes, a table, an archive, a URL, or dataset:NAME.",
    )


def _with_root(access: SourceAccess, root: str) -> SourceAccess:
    return access if access.root else replace(access, root=root)


def _matching_tables(url: str, access: SourceAccess) -> tuple[str, ...]:
    """Return the URLs of the tables in an object store that match a pattern."""
    return tuple(sorted(each.location for each in StoreInputs(url, access).documents() if each.location))


def require_unique_ids(inputs: Inputs) -> None:
    """Check that no two documents have the same id. The ids are compared on disk, so memory use does not grow.

    Raises:
        DocumentError: two rows have the same id.
    """
    ids = inputs.ids()
    if ids is None:
        return
    with tempfile.NamedTemporaryFile(prefix="memagent-ids-") as file:
        connection = sqlite3.connect(file.name)
        try:
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("CREATE TABLE ids (id TEXT PRIMARY KEY, row INTEGER) WITHOUT ROWID")
            for number, each in enumerate(ids):
                name = each.encode("utf-8", "replace").decode()
                try:
                    connection.execute("INSERT INTO ids VALUES (?, ?)", (name, number))
                except sqlite3.IntegrityError:
                    (first,) = connection.execute("SELECT row FROM ids WHERE id = ?", (name,)).fetchone()
                    raise DocumentError(
                        f"rows {first} and {number} of {inputs.description} have the same id {name[:100]!r}",
                        hint="Ids must be unique. Choose another column with --id-column, or omit the option.",
                    ) from None
        finally:
            connection.close()
