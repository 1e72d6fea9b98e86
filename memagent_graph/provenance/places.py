"""Names of places in a document: pages or sources, headings, and links to pages."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from memagent_graph.documents.sources import PDF_TYPE, DocumentRef, SourceMark

_PAGE = re.compile(r"page (\d+)")


@dataclass(frozen=True, slots=True)
class Places:
    """The names of places in one document.

    Attributes:
        sections: the starts of its pages or sources, in order.
        headings: the starts of its headings and numbered clauses, in order.
        link_prefix: the beginning of links to the PDF file; empty for other documents.
    """

    sections: Sequence[SourceMark] = ()
    headings: Sequence[SourceMark] = ()
    link_prefix: str = ""

    def find_page(self, char: int) -> int | None:
        """Return the page of a character, counted from 1; None if the document has no pages."""
        match = _PAGE.fullmatch(find_section_label(self.sections, char) or "")
        return int(match[1]) if match else None

    def find_section(self, char: int) -> str | None:
        """Return the heading or clause above a character, or else its page or source."""
        heading, source = _find_mark(self.headings, char), _find_mark(self.sections, char)
        # Another source ends the section of a heading; another page does not.
        if heading is None or (source and source.start_char > heading.start_char and not _PAGE.fullmatch(source.label)):
            return source.label if source else None
        return heading.label


def find_section_label(sections: Sequence[SourceMark], start_char: int) -> str | None:
    """Return the label of the page or source of a character; None before the first label."""
    mark = _find_mark(sections, start_char)
    return mark.label if mark else None


def _find_mark(marks: Sequence[SourceMark], char: int) -> SourceMark | None:
    index = bisect_right(marks, char, key=lambda mark: mark.start_char)
    return marks[index - 1] if index else None


def make_link_prefix(document: DocumentRef) -> str:
    """Return the beginning of a link to a PDF document: the path of its file, or its name if the path is unknown."""
    if document["media_type"] != PDF_TYPE:
        return ""
    if "path" in document:
        with suppress(ValueError):  # the log of somebody else may have any text
            return Path(document["path"]).as_uri()
    return quote(document["name"].encode("utf-8", "replace"))
