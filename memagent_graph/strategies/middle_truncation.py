"""One call with the beginning and the end of the document, and the middle left out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from memagent_graph.calls import Span
from memagent_graph.strategies.excerpts import DocumentEnds, Excerpt, ExcerptWindow


@dataclass(frozen=True)
class MiddleTruncation(Excerpt):
    """What most tools do with a document that is too long: half of the space for its beginning, half for its end."""

    name: ClassVar[str] = "middle_truncation"
    shows: ClassVar[str] = "its beginning and its end, and the middle only if all of it fits"

    async def choose(self, window: ExcerptWindow) -> tuple[list[list[Span]], int]:
        """Its beginning and end, or all of it if it fits."""
        return await asyncio.to_thread(_choose, window)


def _choose(window: ExcerptWindow) -> tuple[list[list[Span]], int]:
    ends = DocumentEnds(window.chunker, window.room)

    def cut(tokens: int) -> list[Span]:
        if tokens >= ends.tokens:
            return [ends.whole()]
        return [span for span in (ends.head(tokens - tokens // 2), ends.tail(tokens // 2)) if span is not None]

    return [window.fit_to_window(cut)], ends.tokens
