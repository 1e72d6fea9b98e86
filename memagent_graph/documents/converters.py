"""The converting program: a PDF, DOCX or HTML file on standard input, its text on standard output, within limits.

`conversion.py` starts it as a new interpreter, so that any damage by a hostile file ends with this process. It imports
nothing from the package, to start quickly; the package imports only its constants.

Standard output has parts: a line of JSON, `["page 3", 120]`, and that many bytes of UTF-8. The last line is `{}`, or an
object with the error's `kind`, `message` and `hint`. If it is missing, the process was stopped.

PDF is read by pdfium, page by page; DOCX by mammoth; HTML becomes Markdown by markdownify. They were chosen over
all-in-one converters for their weight (12 MB installed, against 97 and 257) and their licences (BSD, Apache, MIT).
"""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, Final

GAP: Final = "\n\n"
"""The separator between two pages."""
PART_CHARACTERS: Final = 1 << 20
_UNREAD_ELEMENTS: Final = ("script", "style", "noscript", "template", "svg", "iframe")
_SLACK_BYTES: Final = 1 << 20
_TEXT, _MEMORY, _DAMAGED, _UNSUPPORTED = "text", "memory", "damaged", "unsupported"


class ConversionError(Exception):
    """Why there is no text: `kind` is text, memory, damaged or unsupported."""

    def __init__(self, kind: str, message: str = "", hint: str | None = None) -> None:
        super().__init__(message)
        self.told = {"kind": kind, "message": message, "hint": hint}


def main(kind: str, name: str, seconds: float, memory_bytes: int, text_bytes: int, pages: str = "") -> None:
    """Convert standard input. `kind` is pdf, docx or html; HTML comes as UTF-8. `pages` are those of a PDF, or all."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a converter's own output is not text of the document
    end: dict[str, Any] = {}
    try:
        _bound(seconds, memory_bytes, text_bytes)
        with os.fdopen(os.dup(0), "rb") as file:
            file.seek(0)
            parts = _pdf(name, file, pages) if kind == "pdf" else _CONVERTERS[kind](name, file)
            _write(parts, out, text_bytes)
    except ConversionError as failure:
        end = failure.told
    except MemoryError:
        end = ConversionError(_MEMORY).told
    out.write(json.dumps(end).encode() + b"\n")
    out.close()


def _bound(seconds: float, memory_bytes: int, text_bytes: int) -> None:
    """Let the operating system enforce the limits, if it can; the parent process checks the time."""
    try:
        import resource  # noqa: PLC0415  not on Windows
    except ImportError:
        return
    bounds = {
        resource.RLIMIT_CPU: int(seconds) + 2,  # in case the parent process no longer exists
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: text_bytes + text_bytes // 8 + _SLACK_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for which, bound in bounds.items():
        _, hard = resource.getrlimit(which)
        allowed = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        try:
            resource.setrlimit(which, (allowed, allowed))
        except (OSError, ValueError):
            continue  # macOS has some of them by name only


def _write(parts: Iterator[tuple[str | None, str]], out: IO[bytes], text_bytes: int) -> None:
    written = 0
    for label, text in parts:
        for at in range(0, max(len(text), 1), PART_CHARACTERS):
            data = text[at : at + PART_CHARACTERS].encode("utf-8", "surrogatepass")
            written += len(data)
            if written > text_bytes:
                raise ConversionError(_TEXT)
            out.write(json.dumps([None if at else label, len(data)]).encode() + b"\n")
            out.write(data)


def _pdf(name: str, file: IO[bytes], pages: str) -> Iterator[tuple[str | None, str]]:
    pypdfium2: Any = importlib.import_module("pypdfium2")
    try:
        document = pypdfium2.PdfDocument(file)
        count = len(document)
    except pypdfium2.PdfiumError as error:
        raise ConversionError(
            _DAMAGED,
            f"the PDF file {name} cannot be opened: {error}",
            "It may be damaged or protected by a password; save an unprotected copy first.",
        ) from error
    chosen = _chosen(name, pages, count)
    found_text = False
    for number in chosen:
        try:
            text = _page_text(document, number).replace("\r\n", "\n").replace("\x00", "")
        except pypdfium2.PdfiumError as error:
            raise ConversionError(
                _DAMAGED,
                f"page {number + 1} of the PDF file {name} cannot be read: {error}",
                "The file is damaged: repair it (qpdf rewrites what it can), or remove the page.",
            ) from error
        found_text = found_text or bool(text.strip())
        yield f"page {number + 1}", text if number == chosen[-1] else text + GAP
    if not found_text:
        without = (
            f"the pages {pages} of the PDF file {name} have" if pages else f"the PDF file {name} has {count} pages and"
        )
        raise ConversionError(
            _UNSUPPORTED,
            f"{without} no text: they are most likely scans",
            "Run optical character recognition on it first, for example with ocrmypdf.",
        )


def _chosen(name: str, pages: str, count: int) -> list[int]:
    """Return the numbers from 0 of the pages that are named, in the document's order; all where none is."""
    if not pages:
        return list(range(count))
    chosen: set[int] = set()
    for part in pages.split(","):
        first, dash, last = part.partition("-")
        begin, end = int(first), int(last) if last else count if dash else int(first)
        if max(begin, end) > count:
            raise ConversionError(
                _DAMAGED,
                f"the PDF file {name} has {count} pages, and {part} was asked for",
                f"Choose pages from 1 to {count}; {min(begin, count)}- goes to the end.",
            )
        chosen.update(range(begin - 1, end))
    return sorted(chosen)


def _page_text(document: Any, number: int) -> str:
    page = document[number]
    try:
        textpage = page.get_textpage()
        try:
            return str(textpage.get_text_range())
        finally:
            textpage.close()
    finally:
        page.close()


def _docx(name: str, file: IO[bytes]) -> Iterator[tuple[str | None, str]]:
    mammoth: Any = importlib.import_module("mammoth")
    try:
        # If the file has a name, mammoth looks for images next to it.
        content = io.BytesIO(file.read())
        html = mammoth.convert_to_html(content, convert_image=mammoth.images.img_element(lambda _: {})).value
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can make the converter raise anything
        raise ConversionError(
            _DAMAGED, f"the DOCX file {name} cannot be converted: {error}", "Save it again."
        ) from error
    yield None, _markdown(name, html)


def _html(name: str, file: IO[bytes]) -> Iterator[tuple[str | None, str]]:
    yield None, _markdown(name, file.read().decode("utf-8", "surrogatepass"))


def _markdown(name: str, html: str) -> str:
    bs4: Any = importlib.import_module("bs4")
    markdownify: Any = importlib.import_module("markdownify")
    try:
        soup = bs4.BeautifulSoup(html, "html.parser")
    except MemoryError:
        raise
    except Exception as error:  # the standard library's parser and bs4 raise several kinds
        raise ConversionError(
            _DAMAGED, f"the HTML of {name} cannot be parsed: {error}", "Convert it to plain text first."
        ) from error
    for element in soup(_UNREAD_ELEMENTS):
        element.decompose()
    for comment in soup.find_all(string=lambda text: isinstance(text, bs4.Comment)):
        comment.extract()
    converter = markdownify.MarkdownConverter(
        heading_style=markdownify.ATX, bullets="-", strip=["img"], escape_asterisks=False, escape_underscores=False
    )
    try:
        return str(converter.convert_soup(soup)).strip() + "\n"
    except RecursionError as error:
        raise ConversionError(
            _DAMAGED,
            f"the HTML of {name} is nested too deeply to be converted",
            "Convert it to plain text first.",
        ) from error


_CONVERTERS: Final = {"docx": _docx, "html": _html}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:7])
