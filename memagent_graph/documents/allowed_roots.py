"""Which files a language model may name.

When a model chooses a tool's arguments, a text that the model has read can influence the path. So a path is accepted
only if the file that it leads to, with all links followed, is below a folder that the user has named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from memagent_graph.errors import RefusedSourceError
from memagent_graph.plain_text import in_one_line

_MOST_LISTED = 20
"""How many names of a folder's contents an error lists."""
_LONGEST_NAME = 100
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class AllowedRoots:
    """Folders below which files may be read, and how large a document may be.

    Args:
        roots: the folders (or single files); links in them are resolved once, now. If there are none, no file may be
            read.
        max_bytes: the largest file, and the longest text.

    Raises:
        FileNotFoundError: a root does not exist.
    """

    def __init__(self, roots: Iterable[Path | str] = (), *, max_bytes: int = 256 * 2**20) -> None:
        self.roots = tuple(Path(root).expanduser().resolve(strict=True) for root in roots)
        self.max_bytes = max_bytes

    def resolve(self, given: str) -> Path:
        """The regular file that a path leads to. A relative path is looked up below each root in turn.

        Raises:
            RefusedSourceError: it is not a path, leads outside the roots, does not exist, is not a regular file, or is
                too large. The message is written for a model: it says what would work, and nothing about files outside.
        """
        shown = given if len(given) <= 200 else given[:200] + "..."
        if _SCHEME.match(given):
            raise RefusedSourceError(f"{shown!r} is an address, and only paths are accepted here", hint=self._remedy())
        if not given.strip() or "\0" in given:
            raise RefusedSourceError(f"{shown!r} is not a path", hint=self._remedy())
        for root in self.roots:
            found = self._below(root, given)
            if found is not None:
                return self._checked(found, shown)
        # The same message for a missing file and for one outside the roots: a model must not learn the difference.
        raise RefusedSourceError(f"there is no file {shown!r} that may be read", hint=self._remedy())

    def require_text(self, text: str, what: str) -> None:
        """As `require_size`, for the size of a text in UTF-8."""
        # Characters first, so that a text that is far too long is not encoded.
        self.require_size(len(text), what)
        self.require_size(len(text.encode("utf-8", "surrogatepass")), what)

    def require_size(self, size: int, what: str) -> None:
        """Raise `RefusedSourceError` if there are more bytes than may be read, from any source."""
        if size > self.max_bytes:
            raise RefusedSourceError(
                f"{what} has {size:,} bytes, more than the {self.max_bytes:,} that are allowed",
                hint="Read something smaller, or a part of it.",
            )

    def _below(self, root: Path, given: str) -> Path | None:
        try:
            found = (root / given).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            return None
        return found if found == root or root in found.parents else None

    def _checked(self, path: Path, shown: str) -> Path:
        if path.is_dir():
            raise RefusedSourceError(f"{shown!r} is a folder, not a file", hint=self._inside(path))
        if not path.is_file():
            raise RefusedSourceError(f"{shown!r} is not a regular file", hint="Name one file.")
        self.require_size(path.stat().st_size, repr(shown))
        return path

    def _inside(self, folder: Path) -> str:
        """What to name instead of a folder: the files and folders in it that may be read, except hidden ones."""
        try:
            names = sorted(
                in_one_line(entry.name, _LONGEST_NAME) + ("/" if entry.is_dir() else "")
                for entry in folder.iterdir()
                if not entry.name.startswith(".") and self._is_readable(entry)
            )
        except OSError:
            names = []
        if not names:
            return "There is nothing in it that may be read; " + self._remedy()
        more = f" and {len(names) - _MOST_LISTED:,} more" if len(names) > _MOST_LISTED else ""
        return f"Read its files one by one; it contains {', '.join(names[:_MOST_LISTED])}{more}."

    def _is_readable(self, entry: Path) -> bool:
        """Whether a name in a folder leads to a file or a folder below a root."""
        found = next((found for root in self.roots if (found := self._below(root, str(entry)))), None)
        return found is not None and (found.is_file() or found.is_dir())

    def _remedy(self) -> str:
        if not self.roots:
            return "No files may be read; pass the text itself."
        return "Name a file below " + ", ".join(str(root) for root in self.roots) + "."
