"""Asks the question about the chunks that are most similar to it, in the document's order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import ClassVar, Final

from memagent_graph.calls import Span
from memagent_graph.documents.chunking import Chunker
from memagent_graph.retriever import Retriever, WordRetriever, ranked
from memagent_graph.strategies.excerpts import Excerpt, ExcerptWindow

_CHUNK_TOKENS: Final = 256
_MIN_CHUNKS: Final = 8
"""In a small window long chunks leave no choice: with four chunks in a window of 1024 tokens, the chunk with the fact
was shown for 13 of 30 questions on documents of 16,000 tokens with near misses; with chunks half as long, for 27."""

_TAIL_PERCENT: Final = 50
"""In which part of a chunk its last sentence has to end. With its last 15 %, chunks of 80 tokens cut 17 of 320 planted
sentences in two; with its second half, none."""


@dataclass(frozen=True)
class Retrieval(Excerpt):
    """Retrieval-augmented generation without a second model: chunks that end with a sentence, BM25, mostly one call.

    With several tries, the next best chunks are shown if the answer is that the text does not say, in English. So a
    small policy can be shown few chunks at a time. A later try costs a call, and may mislead if the document does not
    say.

    Raises:
        StrategyError: a number is too small.
        MissingExtraError: it needs the extra "recall", which is a part of "eval".
    """

    chunks: int = 0
    """How many are shown; 0 means as many as fit."""
    chunk_tokens: int = 0
    """How long they are; 0 means 256, or an eighth of the space if that is less."""
    tries: int = 1
    """How often chunks are shown, at most, each time others."""
    retriever: Retriever = field(default_factory=WordRetriever, compare=False)
    """Ranks chunks; BM25 by default."""

    name: ClassVar[str] = "retrieval"
    shows: ClassVar[str] = "only the passages that a search finds for each question, not the whole document"

    def __post_init__(self) -> None:
        self.require_at_least(0, "chunks", "chunk_tokens")
        self.require_at_least(1, "tries")

    async def choose(self, window: ExcerptWindow) -> tuple[list[list[Span]], int]:
        """Return an excerpt for each try: the best chunks that fit the window, or the beginning of the best one.

        Later tries have only chunks that match the question.
        """
        context, spans = window.context, list[Span]()
        chunk_tokens = self.chunk_tokens or min(_CHUNK_TOKENS, max(1, window.room // _MIN_CHUNKS))
        chunker = Chunker(
            context.store, window.document, context.tokenizer, chunk_tokens, "sentence", tail_percent=_TAIL_PERCENT
        )

        def texts() -> Iterator[str]:
            for chunk in chunker.chunks():
                spans.append(Span.of(chunk))
                yield chunk.text

        ranking = await ranked(self.retriever, texts(), window.question)
        matching = set(ranking)
        ranking += [number for number in range(len(spans)) if number not in matching]
        left = [spans[number] for number in ranking]
        excerpts = await asyncio.to_thread(self._excerpts, left, len(matching), window)
        return excerpts, sum(span.tokens for span in spans)

    def _excerpts(self, left: list[Span], matching: int, window: ExcerptWindow) -> list[list[Span]]:
        """Return excerpts of chunks that are sorted best first; the first `matching` of them match the question."""
        excerpts: list[list[Span]] = []
        while len(excerpts) < self.tries and (not excerpts or matching > 0):
            best = left[: self.chunks or None]
            excerpts.append(window.fit_to_window(partial(_best_within, best=best, window=window)))
            starts = {span.start_byte for span in excerpts[-1]}
            left = [span for span in left if span.start_byte not in starts]
            matching -= len(starts)
        return excerpts


def _best_within(tokens: int, best: Sequence[Span], window: ExcerptWindow) -> list[Span]:
    """Return the best chunks with that many tokens in total, in the document's order."""
    totals = accumulate(span.tokens for span in best)
    shown = [span for span, total in zip(best, totals, strict=True) if total <= tokens]
    if shown:
        return sorted(shown, key=lambda span: span.start_byte)
    text = window.context.first_tokens(window.text(best[:1]), tokens)
    first = best[0]
    end_char, end_byte = first.start_char + len(text), first.start_byte + len(text.encode())
    return [replace(first, end_char=end_char, end_byte=end_byte, tokens=tokens)]
