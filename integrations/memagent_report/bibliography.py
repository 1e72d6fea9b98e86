"""References as text, and BibTeX entries for documents with a title."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from itertools import chain, count
from string import ascii_lowercase
from typing import Final

from memagent_report.evidence_matrix import ReportDocument
from memagent_report.export_safety import one_line, tex_text
from memagent_report.report_data import Reference, ReportData

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


def quote_location(reference: Reference) -> str:
    """Return the position of a quote in its document: the page, if it is known, and the characters."""
    quote = reference.quote
    page = f"{quote.page}, " if quote.page else ""
    return f"{page}characters {quote.start_char:,}-{quote.end_char:,}"


def bibtex(report: ReportData) -> str:
    """Return a BibTeX entry for each document with a title; "" if no document has one."""
    entries, used = [], set[str]()
    for document in report.matrix.documents:
        if document.metadata.get("title"):
            key = _key(document.metadata, used)
            used.add(key)
            entries.append(_entry(key, document))
    return "\n".join(entries)


def _entry(key: str, document: ReportDocument) -> str:
    known = {name: value for name, value in document.metadata.items() if name not in _NOT_FIELDS}
    kind = next((kind for name, kind in _KINDS if known.get(name)), "misc")
    note = f"Cited from {tex_text(document.name)}"
    lines = [f"  {name} = {{{tex_text(value)}}}," for name, value in sorted(known.items())]
    return "\n".join([f"@{kind}{{{key},", *lines, f"  note = {{{note}}},", "}", ""])


def _key(known: Mapping[str, str], used: set[str]) -> str:
    """Return a key such as `lovelace1843notes`; if it is already used, a letter or a number is added."""
    author = re.split(r"\s+and\s+", known.get("author", ""))[0]
    family = author.split(",")[0] if "," in author else (author.split() or ["anonymous"])[-1]
    word = next((word for word in re.findall(r"\w+", known["title"]) if len(word) > 3), "document")
    key = _ascii(f"{family}{known.get('year', '')}{word}") or "document"
    suffixes = chain(["", *ascii_lowercase], map(str, count(2)))
    return next(found for suffix in suffixes if (found := f"{key}{suffix}") not in used)


def _ascii(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]", "", plain.lower())
