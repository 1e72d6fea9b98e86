"""Reads a source's text, piece by piece: decodes it, and converts HTML, PDF and DOCX (the extra `files`)."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from memagent_graph.documents.conversion import ConversionBounds, ConversionCancellation, converted
from memagent_graph.documents.decoding import SAMPLE_BYTES, Errors, StreamDecoder, byte_order_mark, decoded
from memagent_graph.documents.sources import DOCX, HTML, MARKDOWN, PDF, TEXT, Document, Section
from memagent_graph.errors import DocumentError, UnsupportedDocumentError

READ_BYTES = 1 << 20
_SECTION_GAP = "\n\n"
_KINDS = {DOCX: "a DOCX file", HTML: "HTML", MARKDOWN: "Markdown"}
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([a-zA-Z0-9_:.-]+)", re.IGNORECASE)

LabelledText = tuple[str | None, str]
"""The name of the section that begins here, if one does, and a piece of text."""


@contextlib.contextmanager
def opened(
    document: Document,
    *,
    replace: bool = False,
    bounds: ConversionBounds | None = None,
    cancellation: ConversionCancellation | None = None,
) -> Iterator[tuple[str, Iterator[LabelledText]]]:
    """Open a document: its real media type, and its text in order, a little at a time.

    Args:
        document: the source. A PDF or DOCX file is recognised by its first bytes, whatever its name is.
        replace: put U+FFFD for bytes that cannot be decoded, even if the document's own setting differs.
        bounds: limits of a conversion; from the environment if left out.
        cancellation: ends a conversion early.

    Raises:
        DocumentError: it cannot be opened or read, is of another kind, or cannot be converted within the bounds.
        MissingExtraError: its kind needs the extra `files`.
    """
    errors: Errors = "replace" if replace else document.errors
    content = document.content
    conversion = bounds or ConversionBounds.from_environment(), cancellation or ConversionCancellation()
    with contextlib.ExitStack() as stack:
        is_binary = isinstance(content, bytes | Path) or hasattr(content, "read")
        if document.pages is not None and not is_binary:
            raise no_pages(document, "text")
        if isinstance(content, str):
            yield TEXT, ((None, content[at : at + READ_BYTES]) for at in range(0, len(content), READ_BYTES))
        elif isinstance(content, tuple):
            yield TEXT, _joined(content)
        elif callable(content):
            yield TEXT, content()
        elif isinstance(content, Iterator) and not hasattr(content, "read"):
            yield TEXT, _streamed(document, content, errors)
        elif isinstance(content, bytes):
            yield _from_binary(document, io.BytesIO(content), errors, *conversion)
        elif isinstance(content, Path) and not content.is_fifo() and not content.is_char_device():
            yield _from_binary(document, stack.enter_context(_open(content)), errors, *conversion)
        else:
            file = stack.enter_context(_open(content)) if isinstance(content, Path) else content
            first = _read(document.name, file)
            if isinstance(first, str):
                if document.pages is not None:
                    raise no_pages(document, "text")
                yield TEXT, ((None, piece) for piece in _rest(document.name, first, file))
            else:
                # It cannot be read twice, but detecting its charset may need that.
                copy = stack.enter_context(tempfile.TemporaryFile())
                copy.writelines(_rest(document.name, first, file))
                copy.seek(0)
                yield _from_binary(document, copy, errors, *conversion)


def no_pages(document: Document, kind: str) -> UnsupportedDocumentError:
    """Return the error for pages that were chosen of a document that has none; `kind` says what it is."""
    return UnsupportedDocumentError(
        f"{document.name} is {kind}, which has no pages to choose (pages {document.pages})",
        hint="Leave out the pages, or give the PDF file of the document.",
    )


def _open(path: Path) -> IO[bytes]:
    hint = None
    try:
        return path.open("rb")
    except FileNotFoundError:
        reason, hint = "does not exist", "Check the path; to read a text itself use Document.from_text."
    except IsADirectoryError:
        reason, hint = "is a directory", "Pass one file, or read its files one by one."
    except PermissionError:
        reason, hint = "may not be read by this user", "Change its permissions, or copy it to where you may read it."
    except (OSError, ValueError) as error:
        raise DocumentError(f"the file {path} cannot be opened: {error}") from error
    raise DocumentError(f"the file {path} {reason}", hint=hint)


def _joined(sections: tuple[Section, ...]) -> Iterator[LabelledText]:
    for index, section in enumerate(sections):
        if index:
            yield None, _SECTION_GAP
        yield section.label, section.text


def _streamed(document: Document, pieces: Iterator[Any], errors: Errors) -> Iterator[LabelledText]:
    decoder = StreamDecoder(document.name, encoding=document.encoding, errors=errors)
    while True:
        try:
            piece = next(pieces)
        except StopIteration:
            break
        except Exception as error:  # the caller's source may raise anything
            raise DocumentError(f"the stream {document.name} broke off: {error}") from error
        if isinstance(piece, str):
            yield None, piece
        elif isinstance(piece, bytes):
            yield None, decoder.decode(piece)
        else:
            raise DocumentError(
                f"the stream {document.name} gave a {type(piece).__name__}, not text or bytes",
                hint="Pass an iterator of str or bytes; LangChain Documents go in a list.",
            )
    yield None, decoder.decode(b"", final=True)


def _read(name: str, file: IO[Any]) -> str | bytes:
    try:
        piece: str | bytes = file.read(READ_BYTES)
    except OSError as error:
        raise DocumentError(
            f"{name} cannot be read: {error}", hint="Copy it to a readable place, and read that."
        ) from error
    except ValueError as error:
        raise DocumentError(
            f"the open file {name} cannot be read: {error}",
            hint="A file opened as text has the encoding it was opened with: open it in binary mode, or pass its path.",
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
            raise UnsupportedDocumentError(f"{document.name} is a damaged DOCX file, or not one")
    elif document.media_type in (PDF, DOCX):
        kind = "PDF" if document.media_type == PDF else "DOCX"
        raise UnsupportedDocumentError(
            f"{document.name} is called {kind} but does not begin like such a file",
            hint="It may be damaged; if it is plain text, rename it or pass media_type='text/plain'.",
        )
    return document.media_type


def _from_binary(
    document: Document, file: IO[bytes], errors: Errors, bounds: ConversionBounds, cancellation: ConversionCancellation
) -> tuple[str, Iterator[LabelledText]]:
    kind = _kind(document, file)
    if document.pages is not None and kind != PDF:
        raise no_pages(document, _KINDS.get(kind, "text"))
    if kind in (PDF, DOCX):
        pages = "" if document.pages is None else str(document.pages)
        return kind, converted(document.name, kind, file, bounds, cancellation, pages=pages)
    if kind == HTML:
        return kind, _converted_html(document, file, errors, bounds, cancellation)
    reopen = partial(_pieces, document.name, file, file.tell())
    texts = decoded(document.name, reopen, encoding=document.encoding, errors=errors)
    return kind, ((None, text) for text in texts)


def _pieces(name: str, file: IO[bytes], start: int) -> Iterator[bytes]:
    file.seek(start)
    while piece := _read(name, file):
        yield cast("bytes", piece)


def _converted_html(
    document: Document, file: IO[bytes], errors: Errors, bounds: ConversionBounds, cancellation: ConversionCancellation
) -> Iterator[LabelledText]:
    """Yield an HTML file's text. It is decoded here, with the charset that it declares, and converted as UTF-8."""
    head = file.read(SAMPLE_BYTES)
    start = file.seek(-len(head), io.SEEK_CUR)
    declared = document.encoding
    if declared is None and byte_order_mark(head) is None and (meta := _META_CHARSET.search(head[:4096])):
        declared = meta.group(1).decode("ascii")
    reopen = partial(_pieces, document.name, file, start)
    with tempfile.TemporaryFile() as copy:
        for text in decoded(document.name, reopen, encoding=declared, errors=errors):
            copy.write(text.encode("utf-8", "surrogatepass"))
        yield from converted(document.name, HTML, copy, bounds, cancellation)
