"""A document of a corpus before it is opened: plain data that can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusDocument:
    """One document: its name, where its text is, and the questions about it. It can be pickled."""

    name: str
    """Unique in its corpus. A file's name is its path relative to the input's root, never an absolute path."""
    version: str = ""
    """A string that differs if the document may have changed; empty if the source has no such information."""
    size: int | None = None
    """Size in bytes according to the source; None if it is unknown before the document is opened."""
    text: str | None = field(default=None, repr=False)
    """The text, if it comes from a table column."""
    location: str | None = field(default=None, repr=False)
    """The file's path or URL, if the text comes from a file."""
    member: str | None = None
    """The file's name inside the archive at `location`."""
    questions: tuple[str, ...] = ()
    """Questions about this document only, in addition to those about every document."""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Input columns that are copied to the document's rows, JSON-serializable."""
    error: str | None = None
    """Why the document cannot be opened, if this is known from listing it."""


class Total(NamedTuple):
    """The size of a corpus; None for a number that is unknown before all documents are listed."""

    documents: int | None
    size: int | None
    """Bytes."""
