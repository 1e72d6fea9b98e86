"""Pages of a document as a user names them: `5`, `5-10`, `12-` (to the end), `1-3,7`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memagent_graph.errors import DocumentError

_PART = re.compile(r"\s*(\d{1,7})\s*(?:(-)\s*(\d{1,7})?)?\s*")
_MOST_PARTS = 1000


@dataclass(frozen=True, slots=True)
class PageRanges:
    """Some pages, counted from 1.

    Attributes:
        parts: first and last page of each range; None for a range up to the document's end.
    """

    parts: tuple[tuple[int, int | None], ...]

    @classmethod
    def of(cls, given: str | int | PageRanges) -> PageRanges:
        """Return the pages that a text names.

        Raises:
            DocumentError: it does not name pages.
        """
        if isinstance(given, PageRanges):
            return given
        words = str(given).replace("\N{EN DASH}", "-").split(",")
        parts = []
        for word in words if len(words) <= _MOST_PARTS else ():
            found = _PART.fullmatch(word)
            if found is None:
                break
            first, dash, last = int(found[1]), found[2], found[3]
            end = int(last) if last else None if dash else first
            if first < 1 or (end is not None and end < first):
                break
            parts.append((first, end))
        if len(parts) != len(words):
            raise DocumentError(
                f"{str(given)[:80]!r} does not name pages",
                hint="Write 5, 5-10, 12- (to the end) or 1-3,7; pages are counted from 1.",
            )
        return cls(tuple(parts))

    def __str__(self) -> str:
        return ",".join(
            f"{first}" if first == last else f"{first}-{'' if last is None else last}" for first, last in self.parts
        )
