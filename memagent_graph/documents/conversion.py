"""Converts PDF, DOCX and HTML to text in a separate process, which has limits and can be stopped at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, TypeVar

from memagent_graph.documents import converters
from memagent_graph.documents.sources import DOCX, HTML, PDF
from memagent_graph.errors import DocumentError, MissingExtraError, UnsupportedDocumentError

T = TypeVar("T")

_MB: Final = 1_000_000
_LONGEST_HEADER: Final = 1 << 16
_KINDS: Final = {PDF: "PDF", DOCX: "DOCX", HTML: "HTML"}
_MODULES: Final = {PDF: ("pypdfium2",), DOCX: ("mammoth", "bs4", "markdownify"), HTML: ("bs4", "markdownify")}


@dataclass(frozen=True, slots=True)
class ConversionBounds:
    """Limits for the conversion of one PDF, DOCX or HTML file. Plain text is not converted.

    Attributes:
        seconds: from its start to its end.
        memory_mb: the address space of the converting process, in megabytes; the operating system enforces it, on
            Linux.
        text_mb: the resulting text, in megabytes of UTF-8.
    """

    seconds: float = 120.0
    memory_mb: float = 2_000.0
    text_mb: float = 500.0

    def __post_init__(self) -> None:
        for name in _VARIABLES:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}")

    @classmethod
    def from_environment(cls) -> ConversionBounds:
        """Return the defaults, changed by `MEMAGENT_CONVERSION_SECONDS`, `_MEMORY_MB` and `_TEXT_MB`.

        Raises:
            DocumentError: one of them is not a number above 0.
        """
        given = {name: os.environ.get(variable) for name, variable in _VARIABLES.items()}
        values: dict[str, float] = {}
        for name, value in given.items():
            if value:
                try:
                    values[name] = float(value)
                    cls(**{name: values[name]})
                except ValueError:
                    raise DocumentError(
                        f"{_VARIABLES[name]} is {value!r}, which is not a number above 0",
                        hint=f"Set it to a number such as {getattr(cls(), name):g}, or leave it unset.",
                    ) from None
        return cls(**values)


_VARIABLES: Final = {
    "seconds": "MEMAGENT_CONVERSION_SECONDS",
    "memory_mb": "MEMAGENT_CONVERSION_MEMORY_MB",
    "text_mb": "MEMAGENT_CONVERSION_TEXT_MB",
}


class ConversionCancellation:
    """Cancels a conversion from another thread, when its result is no longer needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """Kill the running conversion, and let no other begin."""
        with self._lock:
            self.cancelled = True
            if self._process is not None:
                self._process.kill()

    @contextlib.contextmanager
    def watching(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Kill this process when cancelled; at the end it is killed in any case."""
        with self._lock:
            self._process = process
            if self.cancelled:
                process.kill()
        try:
            yield
        finally:
            with self._lock:
                self._process = None
                process.kill()
            process.wait()


async def in_thread(work: Callable[[ConversionCancellation], T]) -> T:
    """Work in a thread; if the caller is cancelled, its conversion ends too."""
    cancellation = ConversionCancellation()
    try:
        return await asyncio.to_thread(work, cancellation)
    except asyncio.CancelledError:
        cancellation.cancel()
        raise


def converted(
    name: str,
    kind: str,
    file: IO[bytes],
    bounds: ConversionBounds,
    cancellation: ConversionCancellation,
    *,
    pages: str = "",
) -> Iterator[tuple[str | None, str]]:
    """Yield a file's text, in order; each part with the name of the page that begins there, if any.

    Args:
        name: the document's name, for messages.
        kind: the media type: PDF, DOCX or HTML; HTML has to be UTF-8.
        file: the file, from its beginning.
        bounds: limits of its conversion.
        cancellation: ends it early.
        pages: those of a PDF file to convert, as `str(PageRanges)`; empty for all.

    Raises:
        DocumentError: it cannot be converted within the limits, does not have all of these pages, or was cancelled.
        MissingExtraError: the extra `files` is not installed.
    """
    for module in _MODULES[kind]:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError("files", f"reading the {_KINDS[kind]} file {name}")
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(_on_disk(file))
        result = stack.enter_context(tempfile.TemporaryFile())
        code = _run(name, kind, source, result, bounds, cancellation, pages)
        result.seek(0)
        yield from _parts(name, kind, result, bounds, code)


@contextlib.contextmanager
def _on_disk(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield the file itself if it has a file descriptor, otherwise a copy that has one."""
    try:
        file.fileno()
    except OSError:
        with tempfile.TemporaryFile() as copy:
            file.seek(0)
            while piece := file.read(_MB):
                copy.write(piece)
            copy.flush()
            yield copy
        return
    file.flush()
    yield file


def _run(
    name: str,
    kind: str,
    source: IO[bytes],
    result: IO[bytes],
    bounds: ConversionBounds,
    cancellation: ConversionCancellation,
    pages: str,
) -> int:
    """Convert in a fresh interpreter, and return its exit code."""
    limits = [bounds.seconds, int(bounds.memory_mb * _MB), int(bounds.text_mb * _MB)]
    process = subprocess.Popen(
        # -P: the program's folder is not searched for modules, as some there have the names of others.
        [sys.executable, "-P", converters.__file__, _KINDS[kind].lower(), _argument(name), *map(str, limits), pages],
        stdin=source,
        stdout=result,
        stderr=subprocess.DEVNULL,
        cwd=Path(converters.__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with cancellation.watching(process):
        try:
            code = process.wait(bounds.seconds)
        except subprocess.TimeoutExpired:
            raise _beyond(name, kind, f"takes more than {bounds.seconds:g} seconds", "seconds", bounds) from None
    if cancellation.cancelled:
        raise DocumentError(f"the conversion of {name} was cancelled", hint="Read it again.")
    return code


def _argument(name: str) -> str:
    """Return a name in a form that a command line can contain."""
    return name.replace("\0", "\ufffd").encode("utf-8", "replace").decode()[:1000]


def _parts(
    name: str, kind: str, result: IO[bytes], bounds: ConversionBounds, code: int
) -> Iterator[tuple[str | None, str]]:
    """Yield what the process wrote. It may have read a hostile file, so nothing in its output is trusted."""
    left = int(bounds.text_mb * _MB)
    while header := result.readline(_LONGEST_HEADER):
        try:
            part = json.loads(header)
        except ValueError:
            break
        if isinstance(part, dict):
            if not part:
                return
            raise _failure(name, kind, part, bounds)
        label, size = part
        data = result.read(min(size, left))
        left -= size
        if len(data) < size:
            break
        yield label, data.decode("utf-8", "surrogatepass")
    raise DocumentError(
        f"the conversion of the {_KINDS[kind]} file {name} failed (exit code {code})",
        hint="The file is damaged, or needs more memory than the "
        f"{bounds.memory_mb:g} MB that {_VARIABLES['memory_mb']} allows; save it again, or convert it to plain text.",
    )


def _failure(name: str, kind: str, told: dict[str, str], bounds: ConversionBounds) -> DocumentError:
    match told.get("kind"):
        case "memory":
            return _beyond(name, kind, f"needs more than {bounds.memory_mb:g} MB of memory", "memory_mb", bounds)
        case "text":
            return _beyond(name, kind, f"gives more than {bounds.text_mb:g} MB of text", "text_mb", bounds)
        case "unsupported":
            return UnsupportedDocumentError(told["message"], hint=told["hint"])
    return DocumentError(told["message"], hint=told["hint"])


def _beyond(name: str, kind: str, what: str, bound: str, bounds: ConversionBounds) -> DocumentError:
    return DocumentError(
        f"the conversion of the {_KINDS[kind]} file {name} {what}",
        hint=f"If you trust the file, raise the bound: {_VARIABLES[bound]}={getattr(bounds, bound) * 4:g}, or "
        f"ConversionBounds({bound}=...) for DocumentStore; otherwise convert it to plain text first.",
    )
