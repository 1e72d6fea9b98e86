"""A run's page as a file, which takes the place of nothing but an older page."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Final

_MARK: Final = b'<meta name="generator" content="memagent-graph">'
_MARK_WITHIN_BYTES: Final = 1024


def write_page(page: str, path: Path, *, force: bool = False) -> None:
    """Write what `render_page` gave, whole or not at all, for its owner alone. A link is never followed.

    Args:
        page: the page.
        path: the file; a page that is there is replaced.
        force: replace another file, or a link, too.

    Raises:
        FileExistsError: there is something else of that name; the message says what, without the name.
        OSError: it cannot be written.
    """
    if (what := _in_the_way(path, force=force)) is not None:
        raise FileExistsError(what)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(page)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _in_the_way(path: Path, *, force: bool) -> str | None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        return "is not a file"
    if force:
        return None
    if stat.S_ISLNK(mode):
        return "is a link"
    with path.open("rb") as file:
        return None if _MARK in file.read(_MARK_WITHIN_BYTES) else "is there, and is not a page of this command's"
