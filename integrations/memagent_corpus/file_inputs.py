"""Corpora of files: a folder, a pattern, a single file, objects in a store, and the files in a zip archive."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from memagent_corpus.corpus_documents import CorpusDocument, Total
from memagent_corpus.source_access import SourceAccess, members_of, scheme_of, shown, store_errors
from memagent_graph.errors import DocumentError, RefusedSourceError

_VERSIONS: Final = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "updated")
"""Keys in the file information of fsspec whose value changes with the content, in order of preference."""


class _FileInputs(ABC):
    """Files, each named by its path."""

    @abstractmethod
    def documents(self) -> Iterator[CorpusDocument]:
        """List the files."""

    def ids(self) -> None:
        """Return None, because paths are unique."""
        return

    def total(self) -> Total:
        """Count the files by listing them."""
        count, size, known = 0, 0, True
        for each in self.documents():
            count += 1
            known = known and each.size is not None
            size += each.size or 0
        return Total(count, size if known else None)


@dataclass(frozen=True)
class FolderInputs(_FileInputs):
    """All files in a local folder and its subfolders, except hidden ones, whose names begin with a dot.

    A link must point to a file below the folder. Otherwise the document has an error.
    """

    folder: Path
    access: SourceAccess

    @property
    def description(self) -> str:
        """The folder's path."""
        return f"the folder {self.folder}"

    def documents(self) -> Iterator[CorpusDocument]:
        """List the files, in the order of the file system.

        Raises:
            DocumentError: a folder cannot be listed.
        """
        root = self.folder.resolve()
        folders = [self.folder]
        while folders:
            folder = folders.pop()
            with store_errors(str(folder)), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    elif document := local_file(Path(entry.path), self.folder, root):
                        yield document


@dataclass(frozen=True)
class PatternInputs(_FileInputs):
    """Local files that match a pattern with `*`, `?`, `[...]`, and `**` for any number of folders."""

    pattern: str
    access: SourceAccess

    @property
    def description(self) -> str:
        """The pattern."""
        return f"the files {self.pattern}"

    @property
    def root(self) -> Path:
        """The folder that contains all matching files."""
        return fixed_root(self.pattern)

    def documents(self) -> Iterator[CorpusDocument]:
        """List the matching files.

        Raises:
            DocumentError: no file matches.
        """
        base, count = self.root, 0
        root = base.resolve()
        for found in glob.iglob(self.pattern, recursive=True):  # noqa: PTH207  Path.glob takes no absolute pattern
            path = Path(found)
            if path.is_dir():
                continue
            if document := local_file(path, base, root):
                count += 1
                yield document
        if not count:
            raise DocumentError(f"no file matches {self.pattern}", hint="Check the pattern, and put it in quotes.")


@dataclass(frozen=True)
class SingleFile(_FileInputs):
    """A corpus of one document."""

    location: str
    access: SourceAccess

    @property
    def description(self) -> str:
        """The file's path or URL."""
        return f"the file {shown(self.location)}"

    def documents(self) -> Iterator[CorpusDocument]:
        """List the one document."""
        if scheme_of(self.location):
            name = PurePosixPath(shown(self.location)).name or "document"
            yield CorpusDocument(name=name, location=self.location)
        elif document := local_file(Path(self.location), Path(self.location).parent, None):
            yield document


@dataclass(frozen=True)
class StoreInputs(_FileInputs):
    """The objects in a store that are below a URL, or that match a URL with a pattern."""

    url: str
    access: SourceAccess

    @property
    def description(self) -> str:
        """The URL."""
        return shown(self.url)

    def documents(self) -> Iterator[CorpusDocument]:
        """List the objects, folder by folder.

        Raises:
            DocumentError: the store cannot be listed, or there are no objects.
        """
        scheme = scheme_of(self.url)
        base = _fixed_url(self.url)
        filesystem, root = self.access.filesystem(base)
        _, path = self.access.filesystem(self.url)
        matches = _matcher(path) if base.rstrip("/") != self.url.rstrip("/") else None
        count = 0
        with store_errors(self.url):
            for _, _, files in filesystem.walk(root, detail=True):
                for info in files.values():
                    name = str(info["name"]).removeprefix(root.rstrip("/")).lstrip("/")
                    hidden = any(part.startswith(".") for part in name.split("/"))
                    if not name or (matches and not matches(str(info["name"]))) or (hidden and not matches):
                        continue
                    count += 1
                    yield CorpusDocument(
                        name=name,
                        version=_version(info),
                        size=info.get("size"),
                        location=f"{scheme}://{str(info['name']).lstrip('/')}",
                    )
        if not count:
            raise DocumentError(f"there is nothing at {shown(self.url)}", hint="Check the bucket name and the path.")


@dataclass(frozen=True)
class ArchiveInputs(_FileInputs):
    """The files in a zip archive at a path or URL."""

    location: str
    access: SourceAccess
    pattern: str = ""
    """A pattern for file names inside the archive; empty for all files."""

    @property
    def description(self) -> str:
        """The archive's path or URL."""
        return f"the archive {shown(self.location)}"

    def documents(self) -> Iterator[CorpusDocument]:
        """List the files, except hidden ones. A name that points outside the archive gives a document with an error.

        Raises:
            DocumentError: the file is not a zip archive, exceeds the limits, or has two files with the same name.
        """
        seen: set[str] = set()
        for each in members_of(self.access, self.location):
            name, error = each.filename.replace("\\", "/"), None
            parts = PurePosixPath(name).parts
            if self.pattern and not fnmatch.fnmatch(name, self.pattern):
                continue
            if any(part.startswith(".") and part != ".." for part in parts) or "__MACOSX" in parts:
                continue
            if name.startswith("/") or ".." in parts or re.match(r"[A-Za-z]:", name):
                name = "/".join(part for part in parts if part not in {"/", ".."})
                error = "its name points outside the archive"
            if name in seen:
                raise DocumentError(
                    f"the archive {shown(self.location)} has two files named {name!r}",
                    hint="Unpack the archive, and read the folder.",
                )
            seen.add(name)
            yield CorpusDocument(
                name=name,
                version=f"{each.CRC:08x}-{each.file_size}",
                size=each.file_size,
                location=self.location,
                member=each.filename,
                error=error,
            )


def local_file(path: Path, base: Path, root: Path | None) -> CorpusDocument | None:
    """Return a file as a document; None if the path is neither a file nor a link.

    Args:
        path: the file.
        base: the folder that the document's name is relative to.
        root: the folder that the file must be in after links are resolved; None for a file that the user named.
    """
    name, error = path.relative_to(base).as_posix(), None
    try:
        if root is not None and path.is_symlink() and root not in path.resolve(strict=True).parents:
            error = f"{name} is a link to a file outside the input's folder"
        found = path.stat()
    except FileNotFoundError:
        return CorpusDocument(name=_text(name), error=f"{name} is a broken link") if path.is_symlink() else None
    except (OSError, RuntimeError):
        return CorpusDocument(name=_text(name), error=f"{name} cannot be opened")
    if not path.is_file():
        return None
    version = f"{found.st_size}-{found.st_mtime_ns}"
    return CorpusDocument(name=_text(name), version=version, size=found.st_size, location=str(path), error=error)


def is_pattern(location: str) -> bool:
    """Whether a path or URL contains wildcards. A `?` in an http URL begins a query and is not a wildcard."""
    return glob.has_magic(re.sub(r"^[^?]*\?.*$", "", location) if location.startswith("http") else location)


def fixed_root(pattern: str) -> Path:
    """Return the part of a pattern before the first folder or file name with wildcards."""
    parts = Path(pattern).parts
    fixed = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed]) if fixed else Path()


def _fixed_url(url: str) -> str:
    """Return the part of a URL before the first segment with wildcards."""
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    fixed = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return f"{scheme}://{'/'.join(parts[:fixed])}"


def _matcher(pattern: str) -> Any:
    """Return a function that matches paths against a pattern. `*` does not match a slash, `**` does."""
    parts = re.split(r"(\*\*/?|\*|\?)", pattern)
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(wildcards.get(part, re.escape(part)) for part in parts)).fullmatch


def _version(info: Mapping[str, Any]) -> str:
    """Return a version from an object's size and its ETag, checksum or time; empty if it has none of these."""
    return next((f"{info.get('size')}-{info[name]}" for name in _VERSIONS if info.get(name)), "")


def _text(name: str) -> str:
    """Return a file name as valid Unicode. Python represents undecodable bytes as half surrogate pairs."""
    if name.isascii():
        return name
    fixed = re.sub("[\ud800-\udfff]", "\ufffd", name)
    if fixed != name:  # the bytes are appended, because two names could become equal
        fixed += f"~{name.encode('utf-8', 'surrogateescape').hex()[-16:]}"
    return fixed


def require_listable(folder: Path) -> None:
    """Check early that a folder can be listed.

    Raises:
        DocumentError: the folder cannot be listed.
    """
    try:
        with os.scandir(folder):
            return
    except OSError as error:
        raise RefusedSourceError(f"{folder} cannot be listed: {error}", hint="Check its permissions.") from error
