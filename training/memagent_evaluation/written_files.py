"""Files that an evaluation writes: they appear when complete or stay unchanged, and errors are reported in one way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memagent_graph.errors import EvaluationError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `EvaluationError` if a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise EvaluationError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="Make room, or name another folder (--out); what was written is kept, and --resume continues.",
        ) from error


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary path to write a file to; at the end it replaces the file. Raises EvaluationError like `writing`."""
    with writing(path):
        new = path.with_name(f".{path.name}.new")
        yield new
        new.replace(path)
