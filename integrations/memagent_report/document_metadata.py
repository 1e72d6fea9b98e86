"""Reads the title, author and date of a document from LangChain's metadata or Markdown's front matter.

Front matter is the block between two lines of three hyphens at the beginning of a text. Only its lines of the form
`name: value` are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from memagent_graph.documents import Document, DocumentRef, DocumentStore

FIELDS: Final = (
    "title", "author", "year", "date", "journal", "booktitle", "publisher", "institution", "volume", "number", "pages",
    "doi", "url", "isbn", "edition", "case", "court",
)  # fmt: skip
"""The fields that are used, under their names in BibTeX; `date` gives the year if there is no `year`."""
_OTHER_NAMES: Final = {"authors": "author", "creator": "author", "issue": "number", "published": "date", "link": "url"}
_LONGEST: Final = 300
_HEAD_BYTES: Final = 4096
_FRONT_MATTER: Final = re.compile(r"\A\ufeff?---[ \t]*\n(?P<lines>.*?)\n(?:---|\.\.\.)[ \t]*\n", re.DOTALL)


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
    found: dict[str, str] = {}
    for name, value in values.items():
        field = _OTHER_NAMES.get(str(name).lower(), str(name).lower())
        text = _text(value)
        if field in FIELDS and text:
            found.setdefault(field, text)
    if "year" not in found and (year := re.search(r"\b[12]\d{3}\b", found.get("date", ""))):
        found["year"] = year[0]
    return found


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = " and ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return " ".join(str(value).split())[:_LONGEST]
