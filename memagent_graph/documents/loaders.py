"""Reads the text of a source block by block: decodes text files, and converts files of other kinds."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import tempfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from memagent_graph.concurrency.background import Cancellation
from memagent_graph.converters import Block, Parts, find_kind_by_magic_bytes
from memagent_graph.documents.conversion import convert_parts
from memagent_graph.documents.decoding import (
    READ_BYTES,
    SAMPLE_BYTES,
    decode_pieces,
    detect_binary_kind,
    find_codec,
    find_declared_charset,
    read_pieces,
)
from memagent_graph.documents.sources import (
    KINDS_BY_MEDIA_TYPE,
    MEDIA_TYPES,
    TEXT_TYPE,
    UNKNOWN_TYPE,
    Document,
    find_kind_by_media_type,
)
from memagent_graph.errors import DocumentError, UnsupportedDocumentError
from memagent_graph.storage.bounded_files import open_regular_file

_KIND_BY_MEMBER = {"word/document": "docx", "ppt/presentation": "pptx", "xl/workbook": "xlsx"}
"""Maps a member of a zip archive to the kind of file that contains it; the member may end in a number before .xml."""
_KINDS_WITH_MAGIC_BYTES = {"pdf", "rtf", "docx", "pptx", "xlsx", "odt", "odp", "ods", "epub"}
"""Kinds that are recognised by their first bytes, which take precedence over the name."""
_HTML_START = re.compile(
    rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?(?>\s|<\?xml[^>]*>|<!--.*?-->)*+<(?:!doctype\s+html|html|head|body)\b",
    re.IGNORECASE | re.DOTALL,
)
_TEMPLATE_TAG = re.compile(rb"<\?(?:php|=)|<%|\{%", re.IGNORECASE)
"""Tags of template languages. A template is read as text, because it is not a finished page."""
_MBOX_LINE = re.compile(rb"From \S+ [^\n]*\d{4}\s*?\n")
_MAIL_HEADERS = re.compile(rb"(?:[!-9;-~]+:[^\n]*\n(?:[ \t][^\n]*\n)*)+")
_SOFTWARE_HEADER = re.compile(rb"(?im)^(?:message-id|mime-version|received|return-path|content-[a-z-]+):")
"""Headers that mail software writes. A letter that begins with From: and To: has none of them."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_document(
    document: Document, *, replace: bool, cancellation: Cancellation, converter: str | None
) -> Iterator[tuple[str, Parts]]:
    """Open a document: yield its actual media type and an iterator over its text.

    Args:
        document: the source. Most kinds of files are recognised by their first bytes, regardless of the name. HTML
            and e-mail are recognised by their beginning if the name has no known suffix.
        replace: whether to put U+FFFD in place of bytes that cannot be decoded.
        cancellation: ends a conversion early.
        converter: the user's converter, as in `conversion.convert_parts`.

    Raises:
        DocumentError: the document cannot be opened or read, has an unsupported kind, or exceeds a bound of conversion.
        MissingExtraError: the converter needs an extra that is not installed.
    """
    content = document.content
    if document.encoding is not None:
        find_codec(document.encoding)  # an unknown charset is an error even for PDF, which does not use it
    convert = partial(convert_parts, cancellation=cancellation, converter=converter)
    with contextlib.ExitStack() as stack:
        file: IO[bytes] | None = None
        if isinstance(content, bytes):
            content = iter([content])
        elif isinstance(content, Path):
            content = stack.enter_context(_open_file(document))
            file = content if content.seekable() else None
        if file is None and (hasattr(content, "read") or isinstance(content, Iterator)):
            pieces = read_pieces(document.name, content)
            first_piece = next(pieces, "")
            pieces = itertools.chain([first_piece], pieces)
            if isinstance(first_piece, bytes):
                # Bytes are read twice to detect their charset; a converter reads them from disk.
                file = stack.enter_context(tempfile.TemporaryFile())
                file.writelines(pieces)
            content = map(Block, pieces)
        if file is not None:
            yield _read_binary(document, file, convert, replace=replace)
            return
        if document.pages:
            raise _make_pages_error(document, "text")
        if isinstance(content, str):
            _find_kind_by_content(document, content[:SAMPLE_BYTES].encode("utf-8", "replace"))
            starts = range(0, len(content), READ_BYTES)
            content = (Block(document.content[start : start + READ_BYTES]) for start in starts)
        yield TEXT_TYPE, content() if callable(content) else iter(content)


def _make_pages_error(document: Document, kind: str) -> UnsupportedDocumentError:
    """Return the error for a selection of pages in a document without pages. `kind` describes the document."""
    return UnsupportedDocumentError(
        f"{document.name} is {kind}, which has no pages to choose (pages {document.pages})",
        hint="Leave out the pages, or pass the PDF file of the document.",
    )


def _open_file(document: Document) -> IO[bytes]:
    path: Path = document.content
    name = path if document.root is None else document.name  # clients must not learn the location of the root
    try:
        return path.open("rb") if document.root is None else open_regular_file(path, document.root)
    except FileNotFoundError:
        problem, hint = "does not exist", "Check the path; to read a text itself use Document.from_text."
    except IsADirectoryError:
        problem, hint = "is a directory", "Pass one file, or read its files one by one."
    except PermissionError:
        problem, hint = "may not be read by this user", "Change its permissions, or copy it to where you may read it."
    except (OSError, ValueError) as error:
        problem = f"the file {name} cannot be opened: {getattr(error, 'strerror', error)}"
        raise DocumentError(problem, hint="Check the path, or copy the file.") from error
    raise DocumentError(f"the file {name} {problem}", hint=hint)


def _find_kind(document: Document, file: IO[bytes], sample: bytes) -> str | None:
    """Return the kind of a file from its first bytes, its type, or its beginning; None for plain text."""
    declared_kind = find_kind_by_media_type(document.media_type)
    magic_kind = find_kind_by_magic_bytes(sample)
    if declared_kind == "pdf" and b"%PDF-" in sample[:1024]:  # a BOM, line breaks or HTTP headers may precede it
        magic_kind = "pdf"
    if sample.startswith(b"PK\x03\x04"):
        magic_kind = _detect_archive_kind(file)
    if magic_kind is None and declared_kind in _KINDS_WITH_MAGIC_BYTES:
        raise UnsupportedDocumentError(
            f"{document.name} is a damaged {declared_kind.upper()} file, or not one",
            hint="Save it again; it may have a password. If it is plain text, name it .txt.",
        )
    return magic_kind or declared_kind or _find_kind_by_content(document, sample)


def _find_kind_by_content(document: Document, sample: bytes) -> str | None:
    """Return the kind of a file without magic bytes: an HTML page, an e-mail or a mailbox; None for plain text.

    A source that is declared as text is not converted. If it begins like another kind, a warning is logged.
    """
    mbox_line = _MBOX_LINE.match(sample)
    headers = _MAIL_HEADERS.match(sample, mbox_line.end() if mbox_line else 0)
    kind = None
    if _HTML_START.match(sample.replace(b"\0", b"")) and not _TEMPLATE_TAG.search(sample):
        kind = "html"
    elif headers and re.search(rb"(?im)^from:", headers[0]) and _SOFTWARE_HEADER.search(headers[0]):
        kind = "mbox" if mbox_line else "eml"
    if kind is None or document.media_type == UNKNOWN_TYPE:
        return kind
    log.warning(
        "%s begins like a file of the kind %s and is read as text; as a file named .%s it would be converted",
        document.name,
        kind,
        kind,
    )
    return None


def _detect_archive_kind(file: IO[bytes]) -> str | None:
    # A damaged archive can raise any error. The caller reports the damage.
    with contextlib.suppress(Exception), zipfile.ZipFile(file) as archive:
        names = {name.removesuffix(".xml").rstrip("0123456789") for name in archive.namelist()}
        if kind := next((kind for member, kind in _KIND_BY_MEMBER.items() if member in names), None):
            return kind
        if "mimetype" in names and archive.getinfo("mimetype").file_size < 200:
            media_type = archive.read("mimetype").decode("ascii", "replace").strip()
            return KINDS_BY_MEDIA_TYPE.get(media_type.removesuffix("-template"))
    return None


def _read_binary(document: Document, file: IO[bytes], convert: partial[Parts], *, replace: bool) -> tuple[str, Parts]:
    file.seek(0)
    sample = file.read(SAMPLE_BYTES)
    kind = _find_kind(document, file, sample)
    if kind is None and convert.keywords["converter"] is not None and detect_binary_kind(sample[:1024]):
        kind = Path(document.name).suffix.lower().removeprefix(".") or "binary"
    if document.pages and kind != "pdf":
        raise _make_pages_error(document, f"a {kind.upper()} file" if kind else "text")
    if kind == "html":
        return MEDIA_TYPES[kind], _convert_html(document, file, sample, convert, replace=replace)
    if kind is not None:
        return MEDIA_TYPES.get(kind, f"application/x-{kind}"), convert(document.name, kind, file, pages=document.pages)
    texts = decode_pieces(document.name, file, document.encoding, replace=replace)
    return TEXT_TYPE if document.media_type == UNKNOWN_TYPE else document.media_type, map(Block, texts)


def _convert_html(
    document: Document, file: IO[bytes], sample: bytes, convert: partial[Parts], *, replace: bool
) -> Parts:
    """Yield the text of an HTML file. It is decoded with its declared charset and converted as UTF-8."""
    encoding = document.encoding or find_declared_charset(sample)
    with tempfile.TemporaryFile() as copy:
        for text in decode_pieces(document.name, file, encoding, replace=replace):
            copy.write(text.encode("utf-8", "surrogatepass"))
        yield from convert(document.name, "html", copy, pages="")
