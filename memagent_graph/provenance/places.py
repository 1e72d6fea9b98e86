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
        source_count = bisect_right(self.sections, char, key=lambda mark: mark.start_char)
        heading_count = bisect_right(self.headings, char, key=lambda mark: mark.start_char)
        if heading_count and not self._has_new_source_since(self.headings[heading_count - 1].start_char, source_count):
            return self.headings[heading_count - 1].label
        return self.sections[source_count - 1].label if source_count else None

    def make_link(self, char: int) -> str | None:
        """Return a link that opens the PDF file at the page of a character; None for other documents."""
        page = self.find_page(char)
        return f"{self.link_prefix}#page={page}" if self.link_prefix and page is not None else None

    def _has_new_source_since(self, char: int, source_count: int) -> bool:
        """Return whether another source begins after a heading. Pages do not end a section."""
        if not source_count or self.sections[source_count - 1].start_char <= char:
            return False
        return not _PAGE.fullmatch(self.sections[source_count - 1].label)


def find_section_label(sections: Sequence[SourceMark], start_char: int) -> str | None:
    """Return the label of the page or source of a character; None before the first label."""
    index = bisect_right(sections, start_char, key=lambda mark: mark.start_char)
    return sections[index - 1].label if index else None


def make_link_prefix(document: DocumentRef) -> str:
    """Return the beginning of a link to a PDF document: the path of its file, or its name if the path is unknown."""
    if document["media_type"] != PDF_TYPE:
        return ""
    if "path" in document:
        with suppress(ValueError):  # the log of somebody else may have any text
            return Path(document["path"]).as_uri()
    return quote(document["name"].encode("utf-8", "replace"))
