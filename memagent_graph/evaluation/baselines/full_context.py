"""One call with the whole document, where the window holds it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar, Final

from memagent_graph.evaluation.baselines.excerpts import Call, DocumentEnds, DoesNotFitError, Excerpt
from memagent_graph.reading.state import ChunkSpan

_SLACK_TOKENS: Final = 16
"""A text in its prompt may have a few tokens fewer than alone, where it meets the words around it."""


@dataclass(frozen=True)
class FullContext(Excerpt):
    """What a model with a long window would do. Its arithmetic grows with the square of the length."""

    name: ClassVar[str] = "full_context"

    async def choose(self, call: Call) -> tuple[list[ChunkSpan], int]:
        """All of it.

        Raises:
            DoesNotFitError: it does not fit; nothing was asked.
        """
        return await asyncio.to_thread(_choose, call)


def _choose(call: Call) -> tuple[list[ChunkSpan], int]:
    ends = DocumentEnds(call.chunker, 0)
    needed = call.window - call.room + ends.tokens
    if ends.tokens <= call.room + _SLACK_TOKENS:
        needed = call.needs(call.text([ends.whole()]))
    if needed > call.window:
        raise DoesNotFitError(needed, call.window, ends.tokens)
    return [ends.whole()], ends.tokens
