"""Converters: functions that take a file and yield blocks of its text, and omissions for content without text.

A package adds converters in its pyproject.toml, each under a kind of file (the suffix without the dot)::

    [project.entry-points."memagent.converters"]
    djvu = "my_package:convert"

A user's converter (`--converter path/to/file.py:convert`) gets every file that is not plain text. It may return None to
use the standard converter for a file, or change the parts that the standard converter yields. This one reads scans::

    def convert(source: SourceFile) -> Iterator[Block | Omission]:
        for part in source.convert():
            yield Block(text_of_scan(source, part.place)) if isinstance(part, Omission) else part

This module imports no other module of the package, because the conversion process has to start quickly.
"""

from __future__ import annotations

import codecs
import importlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import IO, Any, Final, TypeAlias

BLOCK_SEPARATOR: Final = "\n\n"
"""The separator that converters put between blocks."""
_MAX_NESTING: Final = 8
"""The maximum depth of files inside files."""
_OTHER_SUFFIXES: Final = {
    "text": "txt", "markdown": "md", "htm": "html", "xhtml": "html", "mht": "eml", "mhtml": "eml", "docm": "docx",
    "pptm": "pptx", "xlsm": "xlsx",
}  # fmt: skip
_BINARY_CONTROL: Final = re.compile(rb"[\x00-\x07\x0e-\x1a\x1c-\x1f]")
"""A control character that no text contains."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a document's text. The text of a document is that of its blocks, in order, without separators.

    Attributes:
        text: Markdown, or plain text.
        label: the name of the page, sheet, message or source that begins here; None if the previous label continues.
        headings: the headings above the text from here on, outermost first; None if they do not change. If a document
            has no headings, they are detected in the text.
    """

    text: str
    label: str | None = None
    headings: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Omission:
    """A part of a document that is not in its text.

    Attributes:
        what: a plural noun, such as "pages that are images".
        place: its location, such as "page 3", or a name.
        remedy: advice for the user, as a sentence.
        count: the number of omitted parts.
    """

    what: str
    place: str = ""
    remedy: str = ""
    count: int = 1


Parts: TypeAlias = Iterator[Block | Omission]
Converter: TypeAlias = Callable[["SourceFile"], "Iterable[Block | Omission] | str | None"]


class ConversionError(Exception):
    """A file that cannot be converted to text.

    Args:
        message: what happened.
        hint: the remedy.
        kind: "damaged", "unsupported", "missing" (a package; `message` is its name), "memory" or "text" (a bound).
    """

    def __init__(self, message: str = "", hint: str | None = None, *, kind: str = "damaged") -> None:
        super().__init__(message)
        self.values = {"kind": kind, "message": str(message), "hint": hint and str(hint)}


@dataclass(frozen=True)
class SourceFile:
    """A file to convert.

    Attributes:
        name: the file's name, for messages.
        kind: the suffix without the dot, such as "pdf". It comes from the first bytes of the file if they show it.
        file: the content, from the beginning. HTML is in UTF-8, except in other files.
        pages: the pages to read of a PDF file, such as "1-3,7"; empty for all.
        converters: the converter functions as "module:function", by kind.
        depth: the number of files that contain this one.
    """

    name: str
    kind: str
    file: IO[bytes]
    pages: str
    converters: Mapping[str, str]
    depth: int = 0

    def read(self) -> bytes:
        """Return the content."""
        self.file.seek(0)
        return self.file.read()

    def convert(self) -> Parts:
        """Convert the file with the converter of its kind.

        Raises:
            ConversionError: the file is damaged, there is no converter for it, or a package is missing.
        """
        if self.kind not in self.converters:
            raise ConversionError(
                f"no converter for {self.kind} files is installed, so {self.name} cannot be read",
                "Install one (memagent_graph.converters says how packages add them), pass your own with --converter, "
                "or convert the file to text.",
                kind="unsupported",
            )
        self.file.seek(0)
        module, _, function = self.converters[self.kind].partition(":")
        try:
            convert: Converter = getattr(importlib.import_module(module), function)
            yield from iter_parts(convert(self))
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

    def convert_embedded(self, name: str, data: bytes) -> Parts:
        """Convert a file inside this file. A file that cannot be converted yields an omission.

        Args:
            name: the name of the inner file, from which its kind follows, unless its first bytes show it. Text needs
                no converter.
            data: its content.
        """
        kind = find_kind_by_magic_bytes(data) or find_kind_by_suffix(name)
        heading = f"file {name}"
        is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if kind not in self.converters and (
            kind in {"txt", "md", "csv"} or is_utf16 or not _BINARY_CONTROL.search(data)
        ):
            is_utf8 = data == data.decode("utf-8", "ignore").encode()
            charset = "utf-16" if is_utf16 else "utf-8-sig" if is_utf8 else "cp1252"  # as mail programs do
            yield Block(data.decode(charset, "replace") + BLOCK_SEPARATOR, heading)
            return
        inner = SourceFile(name, kind, io.BytesIO(data), "", self.converters, self.depth + 1)
        has_label = False
        try:
            if self.depth >= _MAX_NESTING:
                raise ConversionError("it is nested too deeply in other files")
            if kind not in self.converters:
                raise ConversionError(f"there is no converter for {kind or 'its kind'}")
            for part in inner.convert():
                if isinstance(part, Block):
                    label = part.label and f"{heading}, {part.label}" if has_label else heading
                    yield replace(part, label=label)
                    has_label = True
                else:
                    yield replace(part, place=", ".join(filter(None, (heading, part.place))))
            yield Block(BLOCK_SEPARATOR)
        except ConversionError as error:
            reason = f"the package {error} is missing" if error.values["kind"] == "missing" else str(error)
            yield Omission(
                "files in it that were not read", f"{name}: {reason}", "Read them as documents of their own."
            )


def find_kind_by_suffix(name: str | os.PathLike[str]) -> str:
    """Return the kind of file for the suffix of a name; empty if it has none."""
    suffix = PurePath(name).suffix.lower().removeprefix(".")
    return _OTHER_SUFFIXES.get(suffix, suffix)


def find_kind_by_magic_bytes(data: bytes) -> str | None:
    """Return "pdf" or "rtf" if the first bytes of a file show it."""
    is_pdf = data[:1024].lstrip(b"\xef\xbb\xbf\0\t\r\n ").startswith(b"%PDF-")
    return "pdf" if is_pdf else "rtf" if data.startswith(b"{\\rtf") else None


def iter_parts(value: Any) -> Parts:
    """Yield the parts that a converter returned, with texts as blocks."""
    for part in (value,) if isinstance(value, str) else value:
        if not isinstance(part, Block | Omission | str):
            raise TypeError(f"a converter yields blocks, omissions and texts, not a {type(part).__name__}")
        yield Block(part) if isinstance(part, str) else part
