"""Checks paths from a language model, a table or a client: the target must be below a root.

Such a path is not trusted. It is accepted only if it leads to a regular file below a folder that the user has named.
Links are followed at every level.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from unicodedata import normalize

from memagent_graph.documents.sources import Document
from memagent_graph.errors import DocumentError, RefusedSourceError
from memagent_graph.plain_text import list_names, make_one_line

_MAX_LISTED_NAMES = 20
"""Maximum number of file names in an error."""
_MAX_NAME_CHARACTERS = 100
shorten_name = partial(make_one_line, max_characters=200)
"""Shortens a name for an error: a caller may have passed a long text as a path."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def resolve_below(root: Path, path: str, *, hint: str, allow_any_kind: bool = False) -> Path:
    """Return the regular file that a path leads to, with links followed at every level.

    Use this for tables and folders of the user. For a language model use `AllowedRoots`, whose errors do not show which
    files exist outside the roots.

    Args:
        root: the folder that the target must be below, or the target itself.
        path: the path; a relative path is relative to the root.
        hint: the remedy in the error.
        allow_any_kind: whether the path may also lead to a folder, a pipe or a device.

    Raises:
        DocumentError: the path does not exist.
        RefusedSourceError: the text is not a path, or the path leads out of the root, or to no regular file.
    """
    if not _is_valid_path(path):
        raise RefusedSourceError(f"{shorten_name(path)!r} is not a path", hint=hint)
    try:
        root = root.resolve(strict=True)
        target = (root / path).resolve(strict=True)
    except FileNotFoundError:
        raise DocumentError(f"the file {shorten_name(path)} does not exist", hint=hint) from None
    except (OSError, RuntimeError, ValueError) as error:
        raise RefusedSourceError(f"{shorten_name(path)!r} cannot be resolved", hint=hint) from error
    if not target.is_relative_to(root):
        raise RefusedSourceError(f"{shorten_name(path)!r} is outside the folder {root.name}", hint=hint)
    if not allow_any_kind and not target.is_file():
        raise RefusedSourceError(f"{shorten_name(path)!r} is not a regular file", hint=hint)
    return target


class AllowedRoots:
    """Folders below which a language model may name files, and the maximum size of a document.

    Args:
        roots: the folders (or single files); links in them are resolved once, here. Without roots, no file may be read.
        max_bytes: the maximum size of a file or text.

    Raises:
        FileNotFoundError: a root does not exist.
    """

    def __init__(self, roots: Iterable[Path | str] = (), *, max_bytes: int = 256 * 2**20) -> None:
        self.roots = tuple(Path(root).expanduser().resolve(strict=True) for root in roots)
        self.max_bytes = max_bytes

    def within(self, paths: Iterable[Path]) -> AllowedRoots:
        """Return the folders and files that are below both these roots and `paths`, which must be resolved."""
        pairs = [(path, root) for root in self.roots for path in paths]
        inner = [path for path, root in pairs if path.is_relative_to(root)]
        outer = [root for path, root in pairs if root.is_relative_to(path)]
        return AllowedRoots(dict.fromkeys([*inner, *outer]), max_bytes=self.max_bytes)

    def find_document(self, path: str) -> Document:
        """Return the document at a path to a regular file. A relative path is looked up below each root in turn.

        The file is checked again when it is opened, because it may have been replaced.

        Raises:
            RefusedSourceError: the path is not valid, leads outside the roots, does not exist, is not a regular file,
                or is too large. The message is for a model: it says what would work, and nothing about files or
                folders outside.
        """
        name = shorten_name(path)
        if not _is_valid_path(path):
            raise RefusedSourceError(f"{name!r} is not a path", hint=self._make_hint())
        root, target = self._find_target(path)
        if target is None and _SCHEME.match(path):
            raise RefusedSourceError(f"{name!r} is an address, and only paths are accepted", hint=self._make_hint())
        if target is None:
            # The same message for a missing file and for one outside the roots: a model must not learn the difference.
            raise RefusedSourceError(f"there is no file {name!r} that may be read", hint=self._make_hint())
        if target.is_dir():
            raise RefusedSourceError(f"{name!r} is a folder, not a file", hint=self._describe_contents(target))
        if not target.is_file():
            raise RefusedSourceError(f"{name!r} is not a regular file", hint="Name one file.")
        self.require_size(target.stat().st_size, repr(name))
        return replace(Document.from_path(target), root=root)

    def require_text(self, text: str, name: str) -> None:
        """Raise `RefusedSourceError` if a text has more than `max_bytes` bytes in UTF-8."""
        # Count characters first, so that an overlong text is not encoded.
        self.require_size(len(text), name)
        self.require_size(len(text.encode("utf-8", "surrogatepass")), name)

    def require_size(self, size: int, name: str) -> None:
        """Raise `RefusedSourceError` if a source has more than `max_bytes` bytes."""
        if size > self.max_bytes:
            raise RefusedSourceError(
                f"{name} has {size:,} bytes, more than the {self.max_bytes:,} that are allowed",
                hint="Read something smaller, or a part of it.",
            )

    def _find_target(self, path: str) -> tuple[Path, Path] | tuple[None, None]:
        """Return a root, and the target of a path if it exists and is below this root.

        The path may begin with the root's own name, because errors show only this part of the root.
        """
        forms = dict.fromkeys((path, normalize("NFC", path), normalize("NFD", path)))  # names from a Mac are NFD
        for root in self.roots:
            for folder, form in product((root, root.parent), forms):
                with contextlib.suppress(OSError, RuntimeError, ValueError):
                    target = (folder / form).resolve(strict=True)
                    if target.is_relative_to(root):
                        return root, target
        return None, None

    def _describe_contents(self, folder: Path) -> str:
        """Return a hint for a folder: the names of readable files and folders in it, except hidden ones."""
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = sorted(
                make_one_line(entry.name, _MAX_NAME_CHARACTERS) + ("/" if entry.is_dir() else "")
                for entry in folder.iterdir()
                if not entry.name.startswith(".")
                and (target := self._find_target(str(entry))[1])
                and (target.is_file() or target.is_dir())
            )
        if not names:
            return "There is nothing in it that may be read; " + self._make_hint()
        return f"Read its files one by one; it contains {list_names(names, _MAX_LISTED_NAMES)}."

    def _make_hint(self) -> str:
        if not self.roots:
            return "No files may be read; pass the text itself."
        names = list(dict.fromkeys(root.name if root.is_file() else f"{root.name}/" for root in self.roots))
        return f"Name {names[0]}." if names == [self.roots[0].name] else f"Name a file below {', '.join(names)}."


def _is_valid_path(path: str) -> bool:
    return bool(path.strip()) and "\0" not in path
