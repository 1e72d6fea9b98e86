"""One call with the whole document, if it fits in the window."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from memagent_graph.reading.state import ChunkSpan
from memagent_graph.strategies.excerpts import SEAM_TOKENS, Call, DocumentEnds, DoesNotFitError, Excerpt


@dataclass(frozen=True)
class FullContext(Excerpt):
    """What a model with a long window would do. Its arithmetic grows with the square of the length."""

    least_answer_tokens: int = 0
    """If the document leaves less of the window than the reply's maximum, the reply gets the rest, but at least this
    many tokens; with 0, the reply gets its maximum or there is no call. An evaluation passes the task's answer length,
    so that a document as long as the window fits, as in RULER."""

    name: ClassVar[str] = "full_context"
    reads_all: ClassVar[bool] = True

    async def choose(self, call: Call) -> tuple[list[list[ChunkSpan]], int]:
        """The whole document.

        Raises:
            DoesNotFitError: it does not fit; nothing was asked.
        """
        return await asyncio.to_thread(_choose, call, self.least_answer_tokens)


def _choose(call: Call, least: int) -> tuple[list[list[ChunkSpan]], int]:
    ends = DocumentEnds(call.chunker, 0)
    may_give = max(0, call.reply_tokens - least) if least else 0
    needed = call.window - call.room + ends.tokens
    if ends.tokens <= call.room + may_give + SEAM_TOKENS:
        needed = call.needs(call.text([ends.whole()]))
    if needed - may_give > call.window:
        raise DoesNotFitError(needed - may_give, call.window, ends.tokens)
    return [[ends.whole()]], ends.tokens
