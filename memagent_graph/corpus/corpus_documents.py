"""A document of a corpus before it is opened: plain data that any engine can pass around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusDocument:
    """One document: what it is called, where its text is, and what is asked about it. It can be pickled."""

    name: str
    """Unique in its corpus; a path below the input's root, never one of this machine."""
    version: str = ""
    """Changes when the document may have changed; empty if its source does not say."""
    size: int | None = None
    """In bytes, as its source has it; None if that is not known before it is opened."""
    text: str | None = field(default=None, repr=False)
    """The text itself, if a table has it."""
    location: str | None = field(default=None, repr=False)
    """A path or URL that `SourceAccess.opened` takes, if it is a file."""
    member: str | None = None
    """The file's name in the archive at `location`."""
    questions: tuple[str, ...] = ()
    """Its own questions, besides those that are asked about every document."""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Columns of the input that go into its rows, JSON-ready."""
    trouble: str | None = None
    """Why it cannot be opened, if its listing already shows that."""


class Total(NamedTuple):
    """How much there is to read; None for what is only known at the end."""

    documents: int | None
    size: int | None
    """In bytes."""
