"""Opens a corpus by its name: a folder, a pattern, a table, a URL or a dataset."""

from __future__ import annotations

import glob
import os
import re
import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from memagent_corpus.source_access import (
    PATH_HINT,
    WEB_SCHEMES,
    CorpusDocument,
    CorpusSize,
    SourceAccess,
    convert_store_errors,
    display_url,
    get_scheme,
)
from memagent_corpus.table_folder import TableFolder
from memagent_corpus.table_inputs import (
    DatasetTable,
    FileTable,
    InputColumns,
    choose_name,
    is_table,
    make_document,
)
from memagent_graph.documents.allowed_paths import resolve_below
from memagent_graph.documents.decoding import find_codec
from memagent_graph.errors import CorpusError, DocumentError
from memagent_graph.plain_text import replace_lone_surrogates

DATASET_PREFIX: Final = "dataset:"
_VERSION_KEYS: Final = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "updated")
"""Keys of fsspec's file information whose values change with the content, in order of preference."""
_DEFAULT_ACCESS: Final = SourceAccess()
_DEFAULT_COLUMNS: Final = InputColumns()


class CorpusInputs(ABC):
    """A corpus that can be listed any number of times, with only a few documents in memory."""

    access: SourceAccess
    """Opens the documents."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The name of the corpus in messages."""

    @abstractmethod
    def iter_documents(self) -> Iterator[CorpusDocument]:
        """List all documents from the beginning; there may be none."""

    def documents(self) -> Iterator[CorpusDocument]:
        """List all documents from the beginning.

        Raises:
            DocumentError: the source cannot be read, lacks a column, or has no documents.
        """
        documents = self.iter_documents()
        first_document = next(documents, None)
        if first_document is None:
            raise DocumentError(
                f"there are no documents in {self.description}",
                hint="Check the name. Hidden files, whose names begin with a dot, are left out.",
            )
        yield first_document
        yield from documents

    def ids(self) -> Iterator[str]:
        """List the documents' names if they come from a user's column; other names cannot have duplicates."""
        return iter(())

    def total(self) -> CorpusSize:
        """Count documents and bytes, as far as possible without opening the documents.

        Raises:
            DocumentError: as `documents`.
        """
        sizes = Counter(documents=0, known=0, bytes=0)
        for document in self.documents():
            sizes.update(documents=1, known=document.size is not None, bytes=document.size or 0)
        return CorpusSize(sizes["documents"], sizes["bytes"] if sizes["known"] == sizes["documents"] else None)


def open_inputs(
    source: str,
    *,
    access: SourceAccess = _DEFAULT_ACCESS,
    columns: InputColumns = _DEFAULT_COLUMNS,
    subset: str | None = None,
    split: str = "train",
) -> CorpusInputs:
    """Open a corpus by its name. No document is read yet.

    Args:
        source: a folder; a pattern such as `filings/**/*.pdf`; a Parquet, JSONL, CSV or TSV file; any other file, which
            is a corpus of one document; a URL of any of these (s3, gs, az, http, ...); or `dataset:NAME` for a Hugging
            Face dataset.
        access: which sources may be opened. An empty `root` is replaced by the folder or URL of the input.
        columns: the columns of tables and datasets to use.
        subset: the dataset's subset.
        split: the dataset's split.

    Raises:
        DocumentError: `source` does not exist, or may not be opened; there is no such charset.
    """
    if access.encoding:
        find_codec(access.encoding)
    if source.startswith(DATASET_PREFIX):
        dataset = DatasetTable(source.removeprefix(DATASET_PREFIX), subset, split)
        folder = dataset.location if Path(dataset.location).is_dir() else ""
        return TableInputs((dataset,), _set_default_root(access, folder), columns)
    if get_scheme(source) in {"", "file"}:
        source = str(Path(os.path.expanduser(source.removeprefix("file://"))))  # noqa: PTH111  any user may follow ~
    scheme = get_scheme(source)
    # In a web page's URL, "?" begins a query.
    if glob.has_magic(source) and scheme not in WEB_SCHEMES and (scheme or not Path(source).exists()):
        root = _get_fixed_part(source)
        files = FileInputs(root, _set_default_root(access, root), source)
        if not is_table(source):
            access.open_filesystem(root)  # raises if the scheme is not allowed
            return files
        documents = list(files.documents())
        for document in documents:
            if document.error:
                raise DocumentError(document.error, hint="Name this table alone, copy it there, or remove the link.")
        tables = sorted(document.location or "" for document in documents)
        return TableInputs(tuple(FileTable(table, access) for table in tables), files.access, columns)
    if _is_folder(source, access):
        return FileInputs(source, _set_default_root(access, source))
    if is_table(source):
        folder = source.rpartition("/")[0] if scheme else str(Path(source).parent)
        return TableInputs((FileTable(source, access),), _set_default_root(access, folder), columns)
    return FileInputs(source, replace(access, root=source), is_file=True)


@dataclass(frozen=True)
class FileInputs(CorpusInputs):
    """The files in a folder and its subfolders, those that match a pattern, or one file, on a disk or in a store.

    Each file is named by its path below the folder. Hidden files and folders, whose names begin with a dot, are left
    out unless the pattern names them; folders that `memagent corpus` wrote, unless it is a pattern of tables. A link to
    a file in the folder is followed; links to other folders in it are not, because their files are listed anyway. A
    link that leads out of the folder is a document with an error.
    """

    location: str
    """The folder or file; with a pattern, the part of the pattern before the first wildcard."""
    access: SourceAccess
    pattern: str = ""
    """A path or URL with `*`, `?`, `[...]`, and `**` for any number of folders."""
    is_file: bool = False
    """Whether `location` is a file."""

    @property
    def description(self) -> str:
        """The path or URL."""
        kind = "" if get_scheme(self.location) else "the file " if self.is_file else "the folder "
        return f"the files {display_url(self.pattern)}" if self.pattern else f"{kind}{display_url(self.location)}"

    def iter_documents(self) -> Iterator[CorpusDocument]:
        """List the files, folder by folder."""
        scheme = get_scheme(self.location)
        filesystem, root = self.access.open_filesystem(self.location)
        if self.is_file:
            name = PurePosixPath(display_url(self.location)).name or "document"
            file_info: Mapping[str, Any] = {}
            if scheme not in WEB_SCHEMES:
                with convert_store_errors(self.location):
                    file_info = filesystem.info(root)
                if file_info["type"] != "file":
                    raise DocumentError(
                        f"{display_url(self.location)} is not a regular file", hint="Save it in a file first."
                    )
            yield _make_document(name, self.location if scheme else root, file_info)
            return
        root = root.rstrip("/")
        for file_info in self._iter_files(filesystem, root):
            path = str(file_info["name"])
            name = path.removeprefix(root).lstrip("/")
            if scheme:
                yield _make_document(name, f"{scheme}://{path.lstrip('/')}", file_info)
            elif file_info["type"] == "file":
                yield _make_document(name, path, file_info)
            elif file_info["islink"]:
                try:
                    target_path = resolve_below(Path(root or "/"), name, hint=PATH_HINT, allow_any_kind=True)
                except DocumentError as error:
                    name = _to_valid_unicode(name)
                    yield CorpusDocument(name=name, error=f"{name} is a link, and {error.message}")
                    continue
                if target_path.is_file():
                    target_status = target_path.stat()
                    yield _make_document(name, path, {"size": target_status.st_size, "mtime": target_status.st_mtime})

    def _iter_files(self, filesystem: Any, root: str) -> Iterator[Mapping[str, Any]]:
        """Yield the information of all files that match, without following links to folders."""
        pattern = self.access.open_filesystem(self.pattern)[1] if self.pattern else ""
        relative_pattern = pattern.removeprefix(root).lstrip("/")
        is_match, shows_hidden = _compile_matcher(pattern), re.search(r"(^|/)\.", relative_pattern) is not None
        max_depth = relative_pattern.count("/") if relative_pattern and "**" not in relative_pattern else None
        folders = [(root, 0)]
        while folders:
            folder, depth = folders.pop()
            for file_info in _list_entries(filesystem, folder, self.location):
                path = str(file_info["name"]).rstrip("/")
                if path == folder or (path.rpartition("/")[2].startswith(".") and not shows_hidden):
                    continue
                if file_info["type"] != "directory":
                    if is_match(path):
                        yield file_info
                elif (max_depth is None or depth < max_depth) and (is_table(self.pattern) or not self._is_output(path)):
                    folders.append((path, depth + 1))

    def _is_output(self, folder: str) -> bool:
        """Return whether a folder is a table that `memagent corpus` writes or wrote."""
        scheme = get_scheme(self.location)
        with suppress(CorpusError):  # the manifest is another program's
            return TableFolder(f"{scheme}://{folder}" if scheme else folder, self.access).manifest() is not None
        return False


@dataclass(frozen=True)
class TableInputs(CorpusInputs):
    """The rows of one or more tables, one table after another."""

    tables: tuple[FileTable | DatasetTable, ...]
    access: SourceAccess
    columns: InputColumns = field(default_factory=InputColumns)

    @property
    def description(self) -> str:
        """The table's path, URL or name."""
        first_table, table_count = display_url(self.tables[0].location), len(self.tables)
        return f"the table {first_table}" if table_count == 1 else f"{table_count} tables such as {first_table}"

    def iter_documents(self) -> Iterator[CorpusDocument]:
        """Yield one document for each row. An invalid row gives a document with an error."""
        for table, name in zip(self.tables, self._names, strict=True):
            columns = self.columns.resolve(table.list_columns(), name)
            for row_number, row in enumerate(table.iter_rows(columns.needed_columns)):
                if isinstance(row, str):
                    yield CorpusDocument(name=f"{name}#{row_number}", error=row)
                else:
                    yield make_document(row, f"{name}#{row_number}", columns, self.access)

    def ids(self) -> Iterator[str]:
        """Yield the names of all documents; none if there is no id column, because row numbers are unique."""
        if (column := self.columns.id) is None:
            return
        for table, name in zip(self.tables, self._names, strict=True):
            self.columns.resolve(table.list_columns(), name)
            for row_number, row in enumerate(table.iter_rows([column])):
                yield choose_name("" if isinstance(row, str) else row.get(column), f"{name}#{row_number}")

    def total(self) -> CorpusSize:
        """Count the rows, if all tables know their number."""
        counts = [table.count_rows() for table in self.tables]
        known_counts = [count for count in counts if count is not None]
        return CorpusSize(sum(known_counts) if len(known_counts) == len(counts) else None, None)

    @property
    def _names(self) -> list[str]:
        """The tables' file names. If two are equal, all get their number as a prefix."""
        names = [PurePosixPath(display_url(table.location).replace("\\", "/")).name for table in self.tables]
        return names if len(set(names)) == len(names) else [f"{number}/{name}" for number, name in enumerate(names)]


def _is_folder(location: str, access: SourceAccess) -> bool:
    """Return whether a location is a folder. A web page never is, and a missing location is an error."""
    filesystem, path = access.open_filesystem(location)
    if get_scheme(location) in WEB_SCHEMES:
        return False
    with convert_store_errors(location):
        if filesystem.isdir(path) or (get_scheme(location) and location.endswith("/")):
            return True
        if filesystem.exists(path):
            return False
    raise DocumentError(
        f"there is no file or folder {display_url(location)}",
        hint="Use a folder, a pattern in quotes, a table, a URL, or dataset:NAME.",
    )


def _set_default_root(access: SourceAccess, root: str) -> SourceAccess:
    return access if access.root else replace(access, root=root)


def _get_fixed_part(pattern: str) -> str:
    """Return the part of a pattern before the first folder or file name with wildcards."""
    scheme, separator, path = pattern.rpartition("://")
    parts = path.split("/")
    fixed_count = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    default = "/" if path.startswith("/") else "" if scheme else "."
    return f"{scheme}{separator}{'/'.join(parts[:fixed_count]) or default}"


def _list_entries(filesystem: Any, folder: str, location: str) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of a folder; none if the folder has just disappeared."""
    with convert_store_errors(location), suppress(FileNotFoundError):
        if get_scheme(location):
            yield from filesystem.ls(folder, detail=True)
            return
        with os.scandir(folder or "/") as entries:  # one at a time, because a folder can have millions of files
            for entry in entries:
                with suppress(FileNotFoundError):  # it has just disappeared
                    yield filesystem.info(entry)


def _compile_matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that matches paths against a pattern. All paths match an empty pattern."""
    from fsspec.utils import glob_translate  # noqa: PLC0415  an optional dependency

    if not pattern:
        return lambda path: True
    try:
        return re.compile(glob_translate(pattern)).match
    except ValueError as error:
        problem = f"{display_url(pattern)} is not a pattern: {error}"
        raise DocumentError(problem, hint="Check the pattern, and put it in quotes.") from error


def _make_document(name: str, location: str, file_info: Mapping[str, Any]) -> CorpusDocument:
    """Return a file. Its version is its size with its ETag, checksum or time; empty if the store has none of these."""
    size = file_info.get("size")
    version = next((f"{size}-{file_info[key]}" for key in _VERSION_KEYS if file_info.get(key)), "")
    return CorpusDocument(name=_to_valid_unicode(name), version=version, size=size, location=location)


def _to_valid_unicode(name: str) -> str:
    """Return a file name as valid Unicode. Python represents undecodable bytes as lone surrogates."""
    valid_name = replace_lone_surrogates(name)
    if valid_name != name:  # the bytes are appended, because two names could become equal
        valid_name += f"~{name.encode('utf-8', 'surrogateescape').hex()[-16:]}"
    return valid_name


def require_unique_ids(inputs: CorpusInputs) -> None:
    """Check that no two documents have the same id. The ids are compared on disk, so memory use does not grow.

    Raises:
        DocumentError: two rows have the same id.
    """
    with closing(sqlite3.connect("")) as connection:  # a temporary file that SQLite removes
        connection.execute("CREATE TABLE ids (id TEXT PRIMARY KEY, row INTEGER) WITHOUT ROWID")
        for row_number, document_id in enumerate(inputs.ids()):
            name = document_id.encode("utf-8", "replace").decode()
            try:
                connection.execute("INSERT INTO ids VALUES (?, ?)", (name, row_number))
            except sqlite3.IntegrityError:
                (first_row,) = connection.execute("SELECT row FROM ids WHERE id = ?", (name,)).fetchone()
                raise DocumentError(
                    f"rows {first_row} and {row_number} of {inputs.description} have the same id {name[:100]!r}",
                    hint="Ids must be unique. Choose another column with --id-column, or omit the option.",
                ) from None
