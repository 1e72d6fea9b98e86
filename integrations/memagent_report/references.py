"""Titles, authors and dates of documents: from LangChain's metadata or Markdown's front matter, to text and BibTeX.

Front matter is the block between two lines of three hyphens at the beginning of a text. Only its lines of the form
`name: value` are used.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from string import ascii_lowercase
from typing import Any, Final

from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_report.evidence_matrix import ReportDocument, SourceQuote
from memagent_report.export_safety import one_line, tex_text

_FIELDS: Final = (
    "title", "author", "year", "date", "journal", "booktitle", "publisher", "institution", "volume", "number", "pages",
    "doi", "url", "isbn", "edition", "case", "court",
)  # fmt: skip
"""The fields that are used, under their names in BibTeX; `date` gives the year if there is no `year`."""
_OTHER_NAMES: Final = {"authors": "author", "creator": "author", "issue": "number", "published": "date", "link": "url"}
_LONGEST: Final = 300
_HEAD_BYTES: Final = 4096
_FRONT_MATTER: Final = re.compile(r"\A\ufeff?---[ \t]*\n(?P<lines>.*?)\n(?:---|\.\.\.)[ \t]*\n", re.DOTALL)
_KINDS: Final = (
    ("journal", "article"), ("booktitle", "inproceedings"), ("isbn", "book"), ("publisher", "book"),
    ("institution", "techreport"),
)  # fmt: skip
_NOT_FIELDS: Final = frozenset({"date", "case", "court"})


def reference_text(document: ReportDocument) -> str:
    """Return author, title, place of publication and year; the document's name if it has no title."""
    known = document.metadata
    if not known.get("title"):
        return document.name
    place = next(
        (known[name] for name in ("journal", "booktitle", "publisher", "institution", "court") if known.get(name)), ""
    )
    parts = [known.get("author", ""), known["title"], place, known.get("case", ""), known.get("year", "")]
    return ", ".join(one_line(part) for part in parts if part) + f" ({document.name})"


def quote_location(quote: SourceQuote) -> str:
    """Return the position of a quote in its document: the page, if it is known, and the characters."""
    page = f"{quote.page}, " if quote.page else ""
    return f"{page}characters {quote.start_char:,}-{quote.end_char:,}"


def bibtex(documents: Iterable[ReportDocument]) -> str:
    """Return a BibTeX entry for each document with a title; "" if no document has one."""
    entries: dict[str, str] = {}
    for document in documents:
        if document.metadata.get("title"):
            key = _key(document.metadata, entries)
            entries[key] = _entry(key, document)
    return "\n".join(entries.values())


def _entry(key: str, document: ReportDocument) -> str:
    known = {name: value for name, value in document.metadata.items() if name not in _NOT_FIELDS}
    kind = next((kind for name, kind in _KINDS if known.get(name)), "misc")
    note = f"Cited from {tex_text(document.name)}"
    lines = [f"  {name} = {{{tex_text(value)}}}," for name, value in sorted(known.items())]
    return "\n".join([f"@{kind}{{{key},", *lines, f"  note = {{{note}}},", "}", ""])


def _key(known: Mapping[str, str], others: Mapping[str, Any]) -> str:
    """Return a key such as `lovelace1843notes`; if another entry has it, a letter or a number is added."""
    author = re.split(r"\s+and\s+", known.get("author", ""))[0]
    family = author.split(",")[0] if "," in author else (author.split() or ["anonymous"])[-1]
    word = next((word for word in re.findall(r"\w+", known["title"]) if len(word) > 3), "document")
    key = _ascii(f"{family}{known.get('year', '')}{word}") or "document"
    suffixes = chain(["", *ascii_lowercase], map(str, count(2)))
    return next(f"{key}{suffix}" for suffix in suffixes if f"{key}{suffix}" not in others)


def _ascii(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]", "", plain.lower())


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
    return " ".join(str(value).split())[:_LONGEST]
