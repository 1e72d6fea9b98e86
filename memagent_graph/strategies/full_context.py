"""One call with the whole document, if it fits in the window."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from memagent_graph.calls import Span
from memagent_graph.strategies.excerpts import BOUNDARY_TOKENS, DocumentEnds, DoesNotFitError, Excerpt, ExcerptWindow


@dataclass(frozen=True)
class FullContext(Excerpt):
    """What a model with a long window would do. Its arithmetic grows with the square of the length."""

    least_answer_tokens: int = 0
    """If the document leaves less of the window than the reply's maximum, the reply gets the rest, but at least this
    many tokens; with 0, the reply gets its maximum or there is no call. An evaluation passes the task's answer length,
    so that a document as long as the window fits, as in RULER."""

    name: ClassVar[str] = "full_context"
    reads_all: ClassVar[bool] = True

    async def choose(self, window: ExcerptWindow) -> tuple[list[list[Span]], int]:
        """Return the whole document.

        Raises:
            DoesNotFitError: it does not fit; nothing was asked.
        """
        return await asyncio.to_thread(_choose, window, self.least_answer_tokens)


def _choose(window: ExcerptWindow, least: int) -> tuple[list[list[Span]], int]:
    ends = DocumentEnds(window.chunker, 0)
    may_give = max(0, window.reply_tokens - least) if least else 0
    needed = window.window - window.room + ends.tokens
    if ends.tokens <= window.room + may_give + BOUNDARY_TOKENS:
        needed = window.needs(window.text([ends.whole()]))
    if needed - may_give > window.window:
        raise DoesNotFitError(needed - may_give, window.window, ends.tokens)
    return [[ends.whole()]], ends.tokens
