"""From a source to its text, piece by piece: decoding, and converters for HTML, PDF and DOCX (the extra `files`).

PDF is read by pdfium, page by page; DOCX by mammoth; HTML becomes Markdown by markdownify. They were chosen over
all-in-one converters for their weight (12 MB installed, against 97 and 257) and their licences (BSD, Apache, MIT).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from memagent_graph.documents.decoding import SAMPLE_BYTES, Errors, byte_order_mark, decoded
from memagent_graph.documents.sources import DOCX, HTML, PDF, TEXT, Document, Section
from memagent_graph.errors import DocumentError, MissingExtraError, UnsupportedDocumentError

READ_BYTES = 1 << 20
_SECTION_GAP = "\n\n"
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([a-zA-Z0-9_:.-]+)", re.IGNORECASE)
_UNREAD_ELEMENTS = ("script", "style", "noscript", "template", "svg", "iframe")
_PDFIUM = threading.Lock()
"""pdfium is not safe for threads."""

LabelledText = tuple[str | None, str]
"""A piece of text, and the name of the section that it begins, if it begins one."""


@contextlib.contextmanager
def opened(document: Document, *, replace: bool = False) -> Iterator[tuple[str, Iterator[LabelledText]]]:
    """Open a document that is not live: its true media type, and its text in order, little of it held at a time.

    Args:
        document: The source. Its first bytes tell a PDF or DOCX file whatever its name says.
        replace: Put U+FFFD where bytes cannot be decoded, whatever the document says.

    Raises:
        DocumentError: It cannot be opened or read, or is of another kind.
        MissingExtraError: Its kind needs the extra `files`.
    """
    errors: Errors = "replace" if replace else document.errors
    content = document.content
    with contextlib.ExitStack() as stack:
        if isinstance(content, str):
            yield TEXT, ((None, content[at : at + READ_BYTES]) for at in range(0, len(content), READ_BYTES))
        elif isinstance(content, tuple):
            yield TEXT, _joined(content)
        elif callable(content):
            yield TEXT, content()
        elif isinstance(content, bytes):
            yield _from_binary(document, io.BytesIO(content), errors)
        elif isinstance(content, Path) and not content.is_fifo() and not content.is_char_device():
            yield _from_binary(document, stack.enter_context(_open(content)), errors)
        else:
            file = stack.enter_context(_open(content)) if isinstance(content, Path) else content
            first = _read(document.name, file)
            if isinstance(first, str):
                yield TEXT, ((None, piece) for piece in _rest(document.name, first, file))
            else:
                # It cannot be read twice, which finding its charset may need.
                copy = stack.enter_context(tempfile.TemporaryFile())
                copy.writelines(_rest(document.name, first, file))
                copy.seek(0)
                yield _from_binary(document, copy, errors)


def labelled_text(document: Document, *, replace: bool = False) -> Iterator[LabelledText]:
    """The text of a document that is not live; see `opened`."""
    with opened(document, replace=replace) as (_, pieces):
        yield from pieces


def _open(path: Path) -> IO[bytes]:
    hint = None
    try:
        return path.open("rb")
    except FileNotFoundError:
        reason, hint = "does not exist", "Check the path; to read a text itself use Document.from_text."
    except IsADirectoryError:
        reason, hint = "is a directory", "Pass one file, or read each of its files by itself."
    except PermissionError:
        reason, hint = "may not be read by this user", "Change its permissions, or copy it to where you may read it."
    except (OSError, ValueError) as error:
        reason = f"cannot be opened: {error}"
    raise DocumentError(f"the file {path} {reason}", hint=hint)


def _joined(sections: tuple[Section, ...]) -> Iterator[LabelledText]:
    for index, section in enumerate(sections):
        if index:
            yield None, _SECTION_GAP
        yield section.label, section.text


def _read(name: str, file: IO[Any]) -> str | bytes:
    try:
        piece: str | bytes = file.read(READ_BYTES)
    except OSError as error:
        raise DocumentError(
            f"{name} cannot be read: {error}", hint="Copy it to where it can be, and read that."
        ) from error
    except ValueError as error:
        raise DocumentError(
            f"the open file {name} cannot be read: {error}",
            hint="A text file is decoded by whoever opened it: open it in binary mode, or pass its path.",
        ) from error
    return piece


def _rest(name: str, first: Any, file: IO[Any]) -> Iterator[Any]:
    piece = first
    while piece:
        yield piece
        piece = _read(name, file)


def _kind(document: Document, file: IO[bytes]) -> str:
    start = file.tell()
    sample = file.read(1024)
    file.seek(start)
    if sample.startswith(b"%PDF-"):
        return PDF
    if sample.startswith(b"PK\x03\x04"):
        try:
            names = zipfile.ZipFile(file).namelist()
        except (zipfile.BadZipFile, OSError):
            names = []
        file.seek(start)
        if "word/document.xml" in names:
            return DOCX
        if document.media_type == DOCX:
            raise UnsupportedDocumentError(f"{document.name} is a damaged DOCX file, or none at all")
    elif document.media_type in (PDF, DOCX):
        kind = "PDF" if document.media_type == PDF else "DOCX"
        raise UnsupportedDocumentError(
            f"{document.name} is called {kind} but does not begin as such a file does",
            hint="It may be damaged; if it is plain text, rename it or pass media_type='text/plain'.",
        )
    return document.media_type


def _from_binary(document: Document, file: IO[bytes], errors: Errors) -> tuple[str, Iterator[LabelledText]]:
    kind = _kind(document, file)
    if kind == PDF:
        return kind, _pdf_pages(document.name, file)
    if kind == DOCX:
        return kind, iter([(None, _docx_text(document.name, file))])
    if kind == HTML:
        return kind, iter([(None, _html_text(document, file, errors))])
    reopen = partial(_pieces, document.name, file, file.tell())
    texts = decoded(document.name, reopen, encoding=document.encoding, errors=errors)
    return kind, ((None, text) for text in texts)


def _pieces(name: str, file: IO[bytes], start: int) -> Iterator[bytes]:
    file.seek(start)
    while piece := _read(name, file):
        yield cast("bytes", piece)


def _extra(module: str, needed_for: str) -> Any:
    """An optional dependency of the extra `files`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError("files", needed_for) from error


def _pdf_pages(name: str, file: IO[bytes]) -> Iterator[LabelledText]:
    pypdfium2 = _extra("pypdfium2", f"reading the PDF file {name}")
    with _PDFIUM:
        try:
            pdf = pypdfium2.PdfDocument(file)
            count = len(pdf)
        except pypdfium2.PdfiumError as error:
            raise DocumentError(
                f"the PDF file {name} cannot be opened: {error}",
                hint="It may be damaged or protected by a password; save an unprotected copy first.",
            ) from error
    found_text = False
    try:
        for number in range(count):
            try:
                with _PDFIUM:
                    text = _page_text(pdf, number).replace("\r\n", "\n").replace("\x00", "")
            except pypdfium2.PdfiumError as error:
                raise DocumentError(
                    f"page {number + 1} of the PDF file {name} cannot be read: {error}",
                    hint="The file is damaged: have it repaired (qpdf rewrites what it can), or leave the page out.",
                ) from error
            found_text = found_text or bool(text.strip())
            yield f"page {number + 1}", text if number == count - 1 else text + _SECTION_GAP
    finally:
        with _PDFIUM:
            pdf.close()
    if not found_text:
        raise UnsupportedDocumentError(
            f"the PDF file {name} has {count} pages and no text: they are most likely scans",
            hint="Run it through optical character recognition first, with ocrmypdf for one.",
        )


def _page_text(pdf: Any, number: int) -> str:
    page = pdf[number]
    try:
        textpage = page.get_textpage()
        try:
            return str(textpage.get_text_range())
        finally:
            textpage.close()
    finally:
        page.close()


def _docx_text(name: str, file: IO[bytes]) -> str:
    mammoth = _extra("mammoth", f"reading the DOCX file {name}")
    try:
        html = mammoth.convert_to_html(file, convert_image=mammoth.images.img_element(lambda _: {})).value
    except Exception as error:  # whatever a damaged file makes the converter raise
        raise DocumentError(f"the DOCX file {name} cannot be converted: {error}", hint="Save it again.") from error
    return _as_markdown(name, html)


def _html_text(document: Document, file: IO[bytes], errors: Errors) -> str:
    head = file.read(SAMPLE_BYTES)
    start = file.seek(-len(head), io.SEEK_CUR)
    declared = document.encoding
    if declared is None and byte_order_mark(head) is None and (meta := _META_CHARSET.search(head[:4096])):
        declared = meta.group(1).decode("ascii")
    text = "".join(
        decoded(document.name, partial(_pieces, document.name, file, start), encoding=declared, errors=errors)
    )
    return _as_markdown(document.name, text)


def _as_markdown(name: str, html: str) -> str:
    bs4 = _extra("bs4", f"reading HTML ({name})")
    markdownify = _extra("markdownify", f"reading HTML ({name})")
    try:
        soup = bs4.BeautifulSoup(html, "html.parser")
    except Exception as error:  # the parser of the standard library and bs4 raise several kinds
        raise DocumentError(
            f"the HTML of {name} cannot be parsed: {error}", hint="Convert it to plain text first."
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
        raise DocumentError(
            f"the HTML of {name} is nested too deeply to be converted", hint="Convert it to plain text first."
        ) from error
