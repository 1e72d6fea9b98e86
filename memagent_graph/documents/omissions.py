"""Omissions: contents of a document that are not in its text, such as pages that are images.

They are counted when the document is stored. A read reports them as events, or refuses the document. The list is in the
document's reference, so every interface (CLI, MCP, Python) and every log shows the same events.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from typing_extensions import TypedDict

from memagent_graph.converters import Omission
from memagent_graph.errors import IncompleteDocumentError
from memagent_graph.events import EventKind, ReadEvent

_MAX_KINDS: Final = 30
_MAX_PAGES: Final = 100_000
_MAX_PLACES: Final = 20
_PAGE_NAME: Final = re.compile(r"page (\d+)")


class StoredOmission(TypedDict):
    """All omissions of one kind, as the graph state contains them. The fields are those of `Omission`."""

    what: str
    count: int
    places: str
    remedy: str


class OmissionSummary:
    """Omissions grouped by kind, as a bounded list of bounded texts, in bounded memory."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], _Group] = {}

    def add(self, omission: Omission) -> None:
        """Count an omission, if its kind is among the first `_MAX_KINDS`."""
        kind = omission.what, omission.remedy
        if kind not in self._groups and len(self._groups) >= _MAX_KINDS:
            return
        group = self._groups.setdefault(kind, _Group())
        group.count += omission.count
        if match := _PAGE_NAME.fullmatch(omission.place):
            if len(group.pages) < _MAX_PAGES:
                group.pages.add(int(match[1]))
        elif omission.place and len(group.names) <= _MAX_PLACES:
            group.names[omission.place] = None

    def list_kinds(self) -> list[StoredOmission]:
        """Return the omissions of each kind, in the order of their first."""
        return [
            StoredOmission(what=what, count=group.count, places=_list_places(group), remedy=remedy)
            for (what, remedy), group in self._groups.items()
        ]


def load_omissions(document: Mapping[str, Any]) -> list[Omission]:
    """Return the omissions of a stored document, for another document that will contain its text."""
    return [
        Omission(omission["what"], omission["places"], omission["remedy"], omission["count"])
        for omission in document.get("omissions", ())
    ]


def list_document_events(document: Mapping[str, Any]) -> tuple[ReadEvent, ...]:
    """Return the events for the omissions in a document's reference."""
    return tuple(
        ReadEvent(EventKind.DOCUMENT_INCOMPLETE, None, describe_omission(omission))
        for omission in document.get("omissions", ())
    )


def require_complete(document: Mapping[str, Any], on_incomplete: str) -> None:
    """Raise `IncompleteDocumentError` if the document has omissions and `on_incomplete` is "stop"."""
    omissions: Sequence[StoredOmission] = document.get("omissions", ())
    if on_incomplete == "stop" and omissions:
        sentences = "; ".join(map(describe_omission, omissions))
        raise IncompleteDocumentError(
            f"{document['name']} contains content that could not be converted to text: {sentences}",
            hint="To read the document anyway, use --on-incomplete report.",
        )


def describe_omission(omission: StoredOmission) -> str:
    """Return an omission as a sentence: what is missing, how many times, where, and the remedy."""
    places = f": {omission['places']}" if omission["places"] else ""
    remedy = f". {omission['remedy'].rstrip('.')}" if omission["remedy"] else ""
    return f"Not in the text: {omission['what']} ({omission['count']}{places}){remedy}"


@dataclass
class _Group:
    """The omissions of one kind: their number, their pages, and the names of other places."""

    count: int = 0
    pages: set[int] = field(default_factory=set)
    names: dict[str, None] = field(default_factory=dict)


def _list_places(group: _Group) -> str:
    """Return the places of omissions, with pages as ranges; at most the first `_MAX_PLACES`."""
    ranges = []
    for _, consecutive_pages in groupby(enumerate(sorted(group.pages)), lambda item: item[1] - item[0]):
        page_range = [page for _, page in consecutive_pages]
        first, last = page_range[0], page_range[-1]
        ranges.append(f"page {first}" if first == last else f"pages {first}-{last}")
    places = [*ranges, *group.names]
    return ", ".join(places[:_MAX_PLACES]) + (", ..." if len(places) > _MAX_PLACES else "")
