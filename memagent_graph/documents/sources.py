"""`Document`: a source of text with its name and type, before it is stored."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, NotRequired

from typing_extensions import TypedDict

from memagent_graph.converters import BLOCK_SEPARATOR, Block, Parts, find_kind_by_suffix
from memagent_graph.documents.conversion import list_converters
from memagent_graph.documents.omissions import StoredOmission
from memagent_graph.errors import DocumentError
from memagent_graph.plain_text import replace_lone_surrogates

_PAGE_RANGE = re.compile(r"\s*(\d{1,7})\s*(?:(-)\s*(\d{1,7})?)?\s*")
_MAX_PAGE_RANGES = 1000


def normalise_pages(pages: str | int) -> str:
    """Return a selection of pages, counted from 1, in its normal form: 5, 5-10, 12- (to the end) or 1-3,7.

    Raises:
        DocumentError: the text does not name pages.
    """
    texts = str(pages).replace("\N{EN DASH}", "-").split(",")
    ranges: list[str] = []
    for match in map(_PAGE_RANGE.fullmatch, texts[:_MAX_PAGE_RANGES]):
        first, last = (int(match[1]), int(match[3] or 0)) if match else (0, 0)
        if match is None or first < 1 or (match[3] and last < first):
            break
        ranges.append(f"{first}-{last or ''}" if match[2] and last != first else f"{first}")
    if len(ranges) != len(texts):
        raise DocumentError(
            f"{str(pages)[:80]!r} does not name pages",
            hint="Write 5, 5-10, 12- (to the end) or 1-3,7; pages are counted from 1.",
        )
    return ",".join(ranges)


TEXT_TYPE = "text/plain"
UNKNOWN_TYPE = "application/octet-stream"
"""The type of a document with an unknown suffix. Its kind is detected from the content."""
MARKDOWN_TYPE = "text/markdown"
PDF_TYPE = "application/pdf"
_OFFICE_OPEN_XML = "application/vnd.openxmlformats-officedocument."
_OPEN_DOCUMENT = "application/vnd.oasis.opendocument."
MEDIA_TYPES: Final = {
    "txt": TEXT_TYPE,
    "md": MARKDOWN_TYPE,
    "html": "text/html",
    "pdf": PDF_TYPE,
    "docx": f"{_OFFICE_OPEN_XML}wordprocessingml.document",
    "pptx": f"{_OFFICE_OPEN_XML}presentationml.presentation",
    "xlsx": f"{_OFFICE_OPEN_XML}spreadsheetml.sheet",
    "odt": f"{_OPEN_DOCUMENT}text",
    "odp": f"{_OPEN_DOCUMENT}presentation",
    "ods": f"{_OPEN_DOCUMENT}spreadsheet",
    "epub": "application/epub+zip",
    "rtf": "application/rtf",
    "eml": "message/rfc822",
    "mbox": "application/mbox",
}
"""MIME types by kind of file. The type for a kind from another package is `application/x-` and the kind."""
KINDS_BY_MEDIA_TYPE: Final = {media_type: kind for kind, media_type in MEDIA_TYPES.items()}
_MAX_FILE_NAME = 255
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)


class DocumentRef(TypedDict):
    """A reference to a stored document, as graph state and logs contain it: JSON values only.

    `key` is `sha256:<hex>` of the UTF-8 text; `size` is in UTF-8 bytes. `sections` and `headings` name the stored lists
    of pages (or sources) and of headings from the converter, if there are any. `pages` is the selection of pages, if
    not all. `path` is the path of a PDF file, for links to its pages. `omissions` lists what is not in the text.
    """

    key: str
    name: str
    size: int
    media_type: str
    sections: NotRequired[str]
    headings: NotRequired[str]
    pages: NotRequired[str]
    path: NotRequired[str]
    omissions: NotRequired[list[StoredOmission]]


@dataclass(frozen=True, slots=True)
class SourceMark:
    """The start of a page, source or heading.

    Attributes:
        start_char: the position of its first character, from 0.
        label: its name, such as `page 3` or the name of a file.
    """

    start_char: int
    label: str


@dataclass(frozen=True, slots=True)
class Document:
    """A source of text that is not stored yet. Create it with a `from_*` method, or with `Document.of`.

    Attributes:
        name: the name in messages and results.
        media_type: the MIME type, which selects the converter of bytes and files. For `application/octet-stream` (a
            name without a known suffix), the kind is detected from the content.
        content: a path, text, bytes, an open file, an iterator of text or bytes, a tuple of blocks, or a function that
            yields the text in pieces.
        encoding: the declared charset of bytes.
        pages: the pages to read of a PDF file, as `normalise_pages` returns them; empty for all.
        root: the resolved folder or file that must contain the path when it is opened; None for no restriction.
    """

    name: str
    media_type: str
    content: Any = field(repr=False)
    encoding: str | None = None
    pages: str = ""
    root: Path | None = None

    def only(self, pages: str | int | None) -> Document:
        """Return the document with only some pages of its PDF file, such as "5-10" or "1-3,7"; None for all.

        Raises:
            DocumentError: `pages` does not name pages. Pages that the document lacks are an error when it is read.
        """
        return self if pages is None else replace(self, pages=normalise_pages(pages))

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], encoding: str | None = None) -> Document:
        """Return a document for a file: text, Markdown, or a kind with a converter. A store opens the file later."""
        path = Path(path)
        return cls(replace_lone_surrogates(path.name or str(path)), guess_media_type(path), path, encoding)

    @classmethod
    def from_text(cls, text: str, name: str = "text") -> Document:
        """Return a document for a text in memory."""
        return cls(name, TEXT_TYPE, text)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "bytes", encoding: str | None = None) -> Document:
        """Return a document for a file's content in memory. Its kind follows from `name` and its first bytes."""
        return cls(name, guess_media_type(name), bytes(data), encoding)

    @classmethod
    def from_file(cls, file: IO[Any], name: str | None = None, encoding: str | None = None) -> Document:
        """Return a document for an open file, binary or text, read from its current position. It is not closed."""
        path = getattr(file, "name", None)
        name = name or (replace_lone_surrogates(Path(path).name) if isinstance(path, str) else "file")
        return cls(name, guess_media_type(name), file, encoding)

    @classmethod
    def from_stream(cls, pieces: Iterable[str | bytes], name: str = "stream", encoding: str | None = None) -> Document:
        """Return a document for text or bytes that arrive in pieces. They are all stored before reading begins."""
        return cls(name, TEXT_TYPE, iter(pieces), encoding)

    @classmethod
    def from_pieces(cls, pieces: Callable[[], Parts], name: str = "text") -> Document:
        """Return a document whose text is generated in pieces.

        Args:
            pieces: yields the text from its beginning at every call.
            name: its name in messages and results.
        """
        return cls(name, TEXT_TYPE, pieces)

    @classmethod
    def from_langchain(cls, documents: Sequence[Any], name: str | None = None) -> Document:
        """Join LangChain `Document`s to one document, with blank lines between them. Their sources become sections."""
        if not documents:
            raise DocumentError("an empty list of documents", hint="Pass at least one document.")
        blocks = [
            block
            for index, document in enumerate(documents)
            for block in (Block(BLOCK_SEPARATOR), Block(document.page_content, _make_source_label(document, index)))
        ]
        return cls(name or _make_source_name(documents), TEXT_TYPE, tuple(blocks[1:]))

    @classmethod
    def of(cls, source: Any) -> Document:  # noqa: PLR0911 - one return per kind of source
        """Return a document for any supported source.

        Args:
            source: a Document; a str, which is the text itself; a Path; bytes; an open file; LangChain Documents; an
                iterable of str or bytes. A list or tuple of str is one text; any other iterable is a stream.

        Raises:
            DocumentError: a str that is an address or a file's name, or an unsupported type.
        """
        match source:
            case Document():
                return source
            case str():
                _refuse_file_name(source)
                return cls.from_text(source)
            case os.PathLike():
                return cls.from_path(source)
            case bytes() | bytearray() | memoryview():
                return cls.from_bytes(bytes(source))
        if hasattr(source, "page_content"):
            return cls.from_langchain([source])
        if hasattr(source, "read"):
            return cls.from_file(source)
        if isinstance(source, list | tuple):
            if source and all(hasattr(item, "page_content") for item in source):
                return cls.from_langchain(source)
            if all(isinstance(item, str) for item in source):
                return cls.from_text("".join(source))
            if all(isinstance(item, bytes) for item in source):
                return cls.from_bytes(b"".join(source))
        elif isinstance(source, Iterable) and not isinstance(source, dict | set | frozenset):
            return cls.from_stream(source)
        if isinstance(source, AsyncIterable):
            raise DocumentError(
                "an asynchronous stream cannot be read", hint="Collect its text first, and pass that or an iterator."
            )
        raise DocumentError(
            f"a {type(source).__name__} is not a document",
            hint="Pass a pathlib.Path, text, bytes, an open file, an iterator of text, or LangChain Documents.",
        )


def guess_media_type(name: str | os.PathLike[str]) -> str:
    """Return the MIME type for the suffix of a file name; `UNKNOWN_TYPE` for a suffix without a converter."""
    kind = _find_kind_by_suffix(name)
    return UNKNOWN_TYPE if kind is None else MEDIA_TYPES.get(kind, f"application/x-{kind}")


def find_kind_by_media_type(media_type: str) -> str | None:
    """Return the kind of file with a MIME type, if it is not plain text."""
    kind = KINDS_BY_MEDIA_TYPE.get(media_type) or media_type.removeprefix("application/x-")
    return kind if media_type not in {TEXT_TYPE, MARKDOWN_TYPE} and kind in {*MEDIA_TYPES, *list_converters()} else None


def _find_kind_by_suffix(name: str | os.PathLike[str]) -> str | None:
    """Return the kind of file for a suffix, or None."""
    kind = find_kind_by_suffix(name)
    return kind if kind in MEDIA_TYPES or (kind and kind in list_converters()) else None


def _refuse_file_name(text: str) -> None:
    """Refuse a short line that is a file name or an address, because the caller probably means the file's content."""
    if not text.strip() or len(text) > _MAX_FILE_NAME or "\n" in text or "\x00" in text:
        return
    try:
        exists = Path(text).is_file()
    except (OSError, ValueError):
        return
    if _ADDRESS.fullmatch(text.strip()):
        message, hint = f"the text {text!r} is an address", "Download it and pass the content"
    elif exists:
        message, hint = f"the text {text!r} is the name of a file", "To read that file pass pathlib.Path(...)"
    elif not re.search(r"\s", text) and _find_kind_by_suffix(text) is not None:
        message, hint = f"there is no file {text!r}", "Check the path, and pass pathlib.Path(...)"
    else:
        return
    raise DocumentError(message, hint=f"{hint}; to read the text itself pass Document.from_text(...).")


def _make_source_label(document: Any, index: int) -> str:
    metadata = getattr(document, "metadata", None) or {}
    source = metadata.get("source") or metadata.get("title") or getattr(document, "id", None)
    page = metadata.get("page")  # LangChain's loaders count pages from 0
    page = metadata.get("page_label") or (page + 1 if isinstance(page, int) else page)
    parts = (source, None if page is None else f"page {page}")
    return ", ".join(str(part) for part in parts if part) or f"document {index + 1}"


def _make_source_name(documents: Sequence[Any]) -> str:
    sources = {str((getattr(document, "metadata", None) or {}).get("source", "")) for document in documents}
    only_source = sources.pop() if len(sources) == 1 else ""
    return Path(only_source).name if only_source else f"{len(documents)} documents"
