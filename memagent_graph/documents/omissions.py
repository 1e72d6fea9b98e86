"""Omissions: contents of a document that are not in its text, such as pages that are images.

They are counted when the document is stored. A read reports them as events, or refuses the document. The list is in the
document's reference, so every interface (CLI, MCP, Python) and every log shows the same events.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from typing_extensions import TypedDict

from memagent_graph.converters import Omission
from memagent_graph.errors import IncompleteDocumentError
from memagent_graph.events import EventKind, ReadEvent
from memagent_graph.grouping import group_values

_MAX_KINDS: Final = 30
_MAX_PLACES: Final = 20
_PAGE_NAME: Final = re.compile(r"page (\d+)")


class StoredOmission(TypedDict):
    """All omissions of one kind, as the graph state contains them. The fields are those of `Omission`."""

    what: str
    count: int
    places: str
    remedy: str


def summarize_omissions(omissions: Iterable[Omission]) -> list[StoredOmission]:
    """Return omissions grouped by kind, as a bounded list of bounded texts."""
    omissions_by_kind = group_values(((omission.what, omission.remedy), omission) for omission in omissions)
    return [
        StoredOmission(what=what, count=sum(item.count for item in group), places=_list_places(group), remedy=remedy)
        for (what, remedy), group in [*omissions_by_kind.items()][:_MAX_KINDS]
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


def _list_places(omissions: Sequence[Omission]) -> str:
    """Return the places of omissions, with pages as ranges; at most the first `_MAX_PLACES`."""
    names = dict.fromkeys(
        omission.place for omission in omissions if omission.place and not _PAGE_NAME.fullmatch(omission.place)
    )
    pages = sorted({int(match[1]) for omission in omissions if (match := _PAGE_NAME.fullmatch(omission.place))})
    ranges = []
    for _, consecutive_pages in groupby(enumerate(pages), lambda item: item[1] - item[0]):
        page_range = [page for _, page in consecutive_pages]
        first, last = page_range[0], page_range[-1]
        ranges.append(f"page {first}" if first == last else f"pages {first}-{last}")
    places = [*ranges, *names]
    return ", ".join(places[:_MAX_PLACES]) + (", ..." if len(places) > _MAX_PLACES else "")
