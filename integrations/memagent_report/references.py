"""Titles, authors and dates of documents: from LangChain's metadata or Markdown's front matter, to text.

Front matter is the block between two lines of three hyphens at the beginning of a text. Only its lines of the form
`name: value` are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_report.evidence_matrix import ReportDocument, SourceQuote
from memagent_report.export_safety import one_line

_FIELDS: Final = (
    "title", "author", "year", "date", "journal", "booktitle", "publisher", "institution", "volume", "number", "pages",
    "doi", "url", "isbn", "edition", "case", "court",
)  # fmt: skip
"""The fields that are kept, under their names in BibTeX; `date` gives the year if there is no `year`."""
_OTHER_NAMES: Final = {"authors": "author", "creator": "author", "issue": "number", "published": "date", "link": "url"}
_MAX_FIELD_LENGTH: Final = 300
_HEAD_BYTES: Final = 4096
_FRONT_MATTER: Final = re.compile(r"\A\ufeff?---[ \t]*\n(?P<lines>.*?)\n(?:---|\.\.\.)[ \t]*\n", re.DOTALL)


def reference_text(document: ReportDocument) -> str:
    """Return author, title, place of publication and year; the document's name if it has no title."""
    fields = document.metadata
    if not fields.get("title"):
        return document.name
    place = next(filter(None, map(fields.get, ("journal", "booktitle", "publisher", "institution", "court"))), "")
    parts = [fields.get("author", ""), fields["title"], place, fields.get("case", ""), fields.get("year", "")]
    return ", ".join(one_line(part) for part in parts if part) + f" ({document.name})"


def quote_location(quote: SourceQuote) -> str:
    """Return the position of a quote in its document: the page, if it is known, and the characters."""
    page = f"{quote.page}, " if quote.page else ""
    return f"{page}characters {quote.start_char:,}-{quote.end_char:,}"


def metadata_of(source: Any, store: DocumentStore, reference: DocumentRef) -> dict[str, str]:
    """Return the metadata that a document itself contains; often none.

    Args:
        source: the document as the caller passed it.
        store: the store with its text.
        reference: its text in the store.
    """
    content = source.content if isinstance(source, Document) else source
    if hasattr(content, "page_content"):
        return reference_fields(getattr(content, "metadata", None) or {})
    if isinstance(content, list | tuple) and content and hasattr(content[0], "page_content"):
        return reference_fields(getattr(content[0], "metadata", None) or {})
    head = store.read_bytes(reference, 0, _HEAD_BYTES).decode(errors="ignore")
    match = _FRONT_MATTER.match(head)
    if match is None:
        return {}
    pairs = (line.partition(":") for line in match["lines"].splitlines() if not line[:1].isspace())
    return reference_fields({name.strip(): value.strip().strip("\"'") for name, _, value in pairs})


def reference_fields(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that a reference can have, each in one line; the year may come from the date."""
    fields: dict[str, str] = {}
    for name, value in values.items():
        field = _OTHER_NAMES.get(str(name).lower(), str(name).lower())
        text = _text(value)
        if field in _FIELDS and text:
            fields.setdefault(field, text)
    if "year" not in fields and (year := re.search(r"\b[12]\d{3}\b", fields.get("date", ""))):
        fields["year"] = year[0]
    return fields


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = " and ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return " ".join(str(value).split())[:_MAX_FIELD_LENGTH]
