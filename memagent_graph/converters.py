"""What a converter is: a function that takes a file and yields blocks of its text, and what it left out.

A package adds converters in its pyproject.toml, by the kind of file, which is the suffix without its dot::

    [project.entry-points."memagent.converters"]
    djvu = "my_package:convert"

One that a user names (`--converter path/to/file.py:convert`) gets every file that is not plain text. It may return None
for a file that it leaves to the standard converter, or change what that one yields. This one reads scanned pages::

    def convert(source: SourceFile) -> Iterator[Block | Omission]:
        for part in source.standard():
            yield Block(text_of_scan(source, part.place)) if isinstance(part, Omission) else part

This module imports nothing else, as the conversion process has to start quickly.
"""

from __future__ import annotations

import importlib
import io
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import IO, Any, Final, TypeAlias

GAP: Final = "\n\n"
"""The separator of two blocks that converters use."""
CPU_LIMIT_SIGNAL: Final = getattr(signal, "SIGPROF", 0)
"""The signal that ends a conversion at a step of `limit_cpu_time`."""
_MAX_NESTING: Final = 8
"""The maximum depth of files in files."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a document's text. A document is the text of its blocks, in order, one directly after the other.

    Attributes:
        text: Markdown, or plain text.
        label: the name of the page, sheet, message or source that begins here; None if it is still the same one.
        headings: the headings that it stands under, outermost first, from here on; None if they are still the same. In
            a document without any, they are looked for in the text.
    """

    text: str
    label: str | None = None
    headings: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Omission:
    """Something in a document that is not in its text.

    Attributes:
        what: what it is, in the plural: "pages that are images".
        place: where it is: "page 3", or a name.
        remedy: what to do about it, as a sentence.
        count: how many there are.
    """

    what: str
    place: str = ""
    remedy: str = ""
    count: int = 1


Parts: TypeAlias = Iterator[Block | Omission]
Converter: TypeAlias = Callable[["SourceFile"], "Iterable[Block | Omission] | str | None"]


class ConversionError(Exception):
    """Why a file has no text.

    Args:
        message: what happened.
        hint: what to do about it.
        kind: "damaged", "unsupported", "missing" (a package; `message` is its name), "memory" or "text" (a bound).
    """

    def __init__(self, message: str = "", hint: str | None = None, *, kind: str = "damaged") -> None:
        super().__init__(message)
        self.values = {"kind": kind, "message": message, "hint": hint}


@dataclass(frozen=True)
class SourceFile:
    """A file to convert.

    Attributes:
        name: its name, for messages.
        kind: its suffix without the dot, as in "pdf"; what its first bytes say counts more than its name.
        file: its content, from the beginning. HTML is UTF-8.
        pages: those to read of a PDF file, as in "1-3,7"; empty for all.
        converters: by kind, where its function is: "module:function".
        depth: how many files it is in.
    """

    name: str
    kind: str
    file: IO[bytes]
    pages: str
    converters: Mapping[str, str]
    depth: int = 0

    def read(self) -> bytes:
        """Return the whole content."""
        self.file.seek(0)
        return self.file.read()

    def standard(self) -> Parts:
        """Convert it with the converter of its kind.

        Raises:
            ConversionError: the file is damaged, there is no converter for it, or a package is missing.
        """
        if self.kind not in self.converters:
            raise ConversionError(f"there is no converter for {self.name}", "Convert it first.", kind="unsupported")
        self.file.seek(0)
        module, _, function = self.converters[self.kind].partition(":")
        try:
            convert: Converter = getattr(importlib.import_module(module), function)
            yield from as_parts(convert(self))
        except ModuleNotFoundError as error:
            raise ConversionError(error.name or str(error), kind="missing") from error
        except (ConversionError, MemoryError):
            raise
        except RecursionError as error:
            raise ConversionError(f"{self.name} is nested too deeply to be converted", "Save it as text.") from error
        except Exception as error:  # a damaged file can make a converter raise anything
            raise ConversionError(
                f"the file {self.name} cannot be converted: {type(error).__name__}: {error}",
                "It may be damaged: save it again, or convert it to plain text.",
            ) from error

    def embedded(self, name: str, data: bytes, kind: str | None = None) -> Parts:
        """Convert a file that is in this one; what cannot be converted is an omission.

        Args:
            name: its name.
            data: its content.
            kind: as `kind`; by its name if left out. Of kinds without a converter, "txt" and "md" are taken as text.
        """
        kind = kind or PurePath(name).suffix.lower().removeprefix(".")
        heading = f"file {name}"
        if kind in {"txt", "md", "csv"}:
            charset = "utf-8" if data == data.decode("utf-8", "ignore").encode() else "cp1252"  # as mail readers do
            yield Block(data.decode(charset, "replace") + GAP, heading)
            return
        inner = SourceFile(name, kind, io.BytesIO(data), "", self.converters, self.depth + 1)
        labelled = False
        try:
            if self.depth >= _MAX_NESTING:
                raise ConversionError("it is nested too deeply in other files")
            if kind not in self.converters:
                raise ConversionError(f"there is no converter for {kind or 'its kind'}")
            for part in inner.standard():
                if isinstance(part, Block):
                    label = part.label and f"{heading}, {part.label}" if labelled else heading
                    yield replace(part, label=label)
                    labelled = True
                else:
                    yield replace(part, place=", ".join(filter(None, (heading, part.place))))
            yield Block(GAP)
        except ConversionError as error:
            reason = f"the package {error} is missing" if error.values["kind"] == "missing" else str(error)
            yield Omission(
                "files in it that were not read", f"{name}: {reason}", "Read them as documents of their own."
            )


def as_parts(value: Any) -> Parts:
    """Yield what a converter returned, which may also be text or pieces of text."""
    for part in (value,) if isinstance(value, str) else value:
        if not isinstance(part, Block | Omission | str):
            raise TypeError(f"a converter yields blocks, omissions and texts, not a {type(part).__name__}")
        yield Block(part) if isinstance(part, str) else part


@contextmanager
def limit_cpu_time(seconds: float) -> Iterator[None]:
    """Kill this process if the block takes more processor time, on systems with `setitimer`."""
    if CPU_LIMIT_SIGNAL:
        signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        if CPU_LIMIT_SIGNAL:
            signal.setitimer(signal.ITIMER_PROF, 0)
