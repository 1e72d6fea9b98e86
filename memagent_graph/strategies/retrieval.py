"""Asks the question once, about the chunks that are most similar to it, in the document's order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import ClassVar, Final

from memagent_graph.calls import Span
from memagent_graph.documents.chunking import Chunker
from memagent_graph.retriever import BM25Retriever, Retriever, rank_texts
from memagent_graph.strategies.excerpts import Excerpt, ExcerptWindow

_CHUNK_TOKENS: Final = 256
_MIN_CHUNKS: Final = 8
"""Minimum number of chunks in the window. With 4 chunks in a window of 1024 tokens, the chunk with the fact was shown
for 13 of 30 questions on documents of 16,000 tokens with near misses; with chunks of half the length, for 27."""

_TAIL_PERCENT: Final = 50
"""A chunk ends with a sentence that ends in this last part of it (percent). With 15 %, chunks of 80 tokens cut 17 of
320 planted sentences in two; with 50 %, none."""


@dataclass(frozen=True)
class Retrieval(Excerpt):
    """Retrieval-augmented generation in one call: chunks that end with a sentence, ranked by BM25.

    Raises:
        StrategyError: a number is too small.
        MissingExtraError: the extra "recall" (a part of "eval") is not installed.
    """

    chunks: int = 0
    """The number of chunks to show. 0 means as many as fit."""
    chunk_tokens: int = 0
    """The number of tokens of a chunk. 0 means 256, or an eighth of the room in the window if that is less."""
    retriever: Retriever = field(default_factory=BM25Retriever, compare=False)
    """Ranks chunks. The default is BM25."""

    name: ClassVar[str] = "retrieval"
    shows: ClassVar[str] = "only the passages that a search finds for each question, not the whole document"

    def __post_init__(self) -> None:
        self.require_at_least(0, "chunks", "chunk_tokens")

    async def choose(self, window: ExcerptWindow) -> tuple[list[Span], int]:
        """Return the best chunks that fit (or the beginning of the best chunk), and the document's tokens."""
        context, spans = window.context, list[Span]()
        chunk_tokens = self.chunk_tokens or min(_CHUNK_TOKENS, max(1, window.available_tokens // _MIN_CHUNKS))
        chunker = Chunker(
            context.store, window.document, context.tokenizer, chunk_tokens, "sentence", tail_percent=_TAIL_PERCENT
        )

        def iter_texts() -> Iterator[str]:
            for chunk in chunker.chunks():
                spans.append(Span.of(chunk))
                yield chunk.text

        ranking = await rank_texts(self.retriever, iter_texts(), window.question)
        matches = set(ranking)
        ranking += [index for index in range(len(spans)) if index not in matches]
        best_spans = [spans[index] for index in ranking[: self.chunks or None]]
        choose = partial(_choose_best, best_spans=best_spans, window=window)
        return await asyncio.to_thread(window.fit_to_window, choose), sum(span.tokens for span in spans)


def _choose_best(max_tokens: int, best_spans: Sequence[Span], window: ExcerptWindow) -> list[Span]:
    """Return the best chunks with at most `max_tokens` in total, in the document's order."""
    totals = accumulate(span.tokens for span in best_spans)
    fitting_spans = [span for span, total in zip(best_spans, totals, strict=True) if total <= max_tokens]
    if fitting_spans:
        return sorted(fitting_spans, key=lambda span: span.start_byte)
    text = window.context.take_first_tokens(window.read_text(best_spans[:1]), max_tokens)
    best_span = best_spans[0]
    end_char, end_byte = best_span.start_char + len(text), best_span.start_byte + len(text.encode())
    return [replace(best_span, end_char=end_char, end_byte=end_byte, tokens=max_tokens)]
