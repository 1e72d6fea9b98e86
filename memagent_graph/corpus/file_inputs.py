"""Corpora of files: a folder, a pattern, one file, what is below a URL, and the members of a zip archive."""

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

from memagent_graph.corpus.corpus_documents import CorpusDocument, Total
from memagent_graph.corpus.source_access import SourceAccess, members_of, scheme_of, shown, store_failures
from memagent_graph.errors import DocumentError, RefusedSourceError

_VERSIONS: Final = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "updated")
"""Where filesystems of fsspec have what changes with an object's content, the best first."""


class _Files(ABC):
    """Files by their paths, no two of which are equal."""

    @abstractmethod
    def documents(self) -> Iterator[CorpusDocument]:
        """The files."""

    def ids(self) -> None:
        """None: no two files have one path."""
        return

    def total(self) -> Total:
        """Counted by listing them."""
        count, size, known = 0, 0, True
        for each in self.documents():
            count += 1
            known = known and each.size is not None
            size += each.size or 0
        return Total(count, size if known else None)


@dataclass(frozen=True)
class FolderInputs(_Files):
    """All files in a local folder and below it; hidden files (their name begins with a dot) are left out.

    Links are followed to files that are below the folder as well; others are documents with an error.
    """

    folder: Path
    access: SourceAccess

    @property
    def description(self) -> str:
        """The folder."""
        return f"the folder {self.folder}"

    def documents(self) -> Iterator[CorpusDocument]:
        """Its files, in the order of the file system.

        Raises:
            DocumentError: a folder cannot be listed.
        """
        root = self.folder.resolve()
        waiting = [self.folder]
        while waiting:
            folder = waiting.pop()
            with store_failures(str(folder)), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    elif document := local_file(Path(entry.path), self.folder, root):
                        yield document


@dataclass(frozen=True)
class PatternInputs(_Files):
    """Local files that match a pattern: `*`, `?`, `[...]`, and `**` for any folders."""

    pattern: str
    access: SourceAccess

    @property
    def description(self) -> str:
        """The pattern."""
        return f"the files {self.pattern}"

    @property
    def root(self) -> Path:
        """The folder above the first part with a sign of a pattern."""
        return fixed_root(self.pattern)

    def documents(self) -> Iterator[CorpusDocument]:
        """The files that match.

        Raises:
            DocumentError: there are none.
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
            raise DocumentError(f"no file matches {self.pattern}", hint="Check the pattern; put it in quotes.")


@dataclass(frozen=True)
class OneFile(_Files):
    """A corpus of one document."""

    location: str
    access: SourceAccess

    @property
    def description(self) -> str:
        """The file."""
        return f"the file {shown(self.location)}"

    def documents(self) -> Iterator[CorpusDocument]:
        """The document."""
        if scheme_of(self.location):
            name = PurePosixPath(shown(self.location)).name or "document"
            yield CorpusDocument(name=name, location=self.location)
        elif document := local_file(Path(self.location), Path(self.location).parent, None):
            yield document


@dataclass(frozen=True)
class StoreInputs(_Files):
    """What is below a URL of an object store, or matches a pattern there."""

    url: str
    access: SourceAccess

    @property
    def description(self) -> str:
        """The URL."""
        return shown(self.url)

    def documents(self) -> Iterator[CorpusDocument]:
        """The objects, a folder after another.

        Raises:
            DocumentError: the store cannot be listed, or nothing is there.
        """
        scheme = scheme_of(self.url)
        base = _fixed_part(self.url)
        filesystem, root = self.access.filesystem(base)
        _, path = self.access.filesystem(self.url)
        matches = _matcher(path) if base.rstrip("/") != self.url.rstrip("/") else None
        count = 0
        with store_failures(self.url):
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
            raise DocumentError(f"there is nothing at {shown(self.url)}", hint="Check the bucket and the path.")


@dataclass(frozen=True)
class ArchiveInputs(_Files):
    """The files in a zip archive, at a path or URL."""

    location: str
    access: SourceAccess
    pattern: str = ""
    """Of members' names; all if it is empty."""

    @property
    def description(self) -> str:
        """The archive."""
        return f"the archive {shown(self.location)}"

    def documents(self) -> Iterator[CorpusDocument]:
        """Its files. One whose name leads out of the archive's own folder is a document with an error.

        Raises:
            DocumentError: it is not a zip archive, or holds more than is allowed.
        """
        seen: set[str] = set()
        for each in members_of(self.access, self.location):
            name, trouble = each.filename.replace("\\", "/"), None
            parts = PurePosixPath(name).parts
            if self.pattern and not fnmatch.fnmatch(name, self.pattern):
                continue
            if any(part.startswith(".") and part != ".." for part in parts) or "__MACOSX" in parts:
                continue
            if name.startswith("/") or ".." in parts or re.match(r"[A-Za-z]:", name):
                name = "/".join(part for part in parts if part not in {"/", ".."})
                trouble = "its name leads out of the archive"
            if name in seen:
                raise DocumentError(
                    f"the archive {shown(self.location)} has two files {name!r}",
                    hint="Unpack it, and read its folder.",
                )
            seen.add(name)
            yield CorpusDocument(
                name=name,
                version=f"{each.CRC:08x}-{each.file_size}",
                size=each.file_size,
                location=self.location,
                member=each.filename,
                trouble=trouble,
            )


def local_file(path: Path, base: Path, root: Path | None) -> CorpusDocument | None:
    """A file as a document, named by its path below `base`; None if it is neither a file nor a link.

    Args:
        path: the file.
        base: what its name is relative to.
        root: where it has to be, links followed; None if it may be anywhere, as one that the user names.
    """
    name, trouble = path.relative_to(base).as_posix(), None
    try:
        if root is not None and path.is_symlink() and root not in path.resolve(strict=True).parents:
            trouble = f"{name} is a link that leads out of the input's folder"
        found = path.stat()
    except FileNotFoundError:
        return CorpusDocument(name=_text(name), trouble=f"{name} is a link to nothing") if path.is_symlink() else None
    except (OSError, RuntimeError):
        return CorpusDocument(name=_text(name), trouble=f"{name} cannot be opened")
    if not path.is_file():
        return None
    version = f"{found.st_size}-{found.st_mtime_ns}"
    return CorpusDocument(name=_text(name), version=version, size=found.st_size, location=str(path), trouble=trouble)


def is_pattern(location: str) -> bool:
    """Whether a path or URL has a sign of a pattern."""
    return glob.has_magic(re.sub(r"^[^?]*\?.*$", "", location) if location.startswith("http") else location)


def fixed_root(pattern: str) -> Path:
    """The folder above the first part of a pattern with a sign of one."""
    parts = Path(pattern).parts
    fixed = next((place for place, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed]) if fixed else Path()


def _fixed_part(url: str) -> str:
    """A URL up to the first part with a sign of a pattern."""
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    fixed = next((place for place, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return f"{scheme}://{'/'.join(parts[:fixed])}"


def _matcher(pattern: str) -> Any:
    """Whether a path matches: `*` stays within a folder, `**` does not."""
    parts = re.split(r"(\*\*/?|\*|\?)", pattern)
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(signs.get(part, re.escape(part)) for part in parts)).fullmatch


def _version(info: Mapping[str, Any]) -> str:
    return next((f"{info.get('size')}-{info[name]}" for name in _VERSIONS if info.get(name)), "")


def _text(name: str) -> str:
    """A file's name without the half surrogate pairs in which Python holds bytes that are not text."""
    if name.isascii():
        return name
    fixed = re.sub("[\ud800-\udfff]", "\ufffd", name)
    if fixed != name:  # two such names may become equal, so the bytes go with it
        fixed += f"~{name.encode('utf-8', 'surrogateescape').hex()[-16:]}"
    return fixed


def require_listable(folder: Path) -> None:
    """Say at once that a folder cannot be listed.

    Raises:
        DocumentError: it cannot.
    """
    try:
        with os.scandir(folder):
            return
    except OSError as error:
        raise RefusedSourceError(f"{folder} cannot be listed: {error}", hint="Check your rights there.") from error
