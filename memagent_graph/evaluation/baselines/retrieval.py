"""One call with the chunks that resemble the question most, in the document's order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from memagent_graph.documents.chunking import Chunker
from memagent_graph.evaluation.baselines.asking import Asking
from memagent_graph.evaluation.baselines.baseline import Baseline
from memagent_graph.evaluation.baselines.dialogues import Dialogue
from memagent_graph.evaluation.baselines.excerpts import longest_fitting, room
from memagent_graph.evaluation.baselines.ranking import VectorIndex, WordIndex
from memagent_graph.evaluation.systems import Attempt, SystemSettings

_CHUNK_TOKENS: Final = 256
_FEWEST_CHUNKS: Final = 8
"""In a small window long chunks leave no choice: with four chunks in a window of 1024 tokens the one that holds a fact
was shown for 13 of 30 questions on documents of 16,000 tokens with near misses, with chunks half as long for 27."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a chunk lies in the document's bytes."""

    start: int
    end: int
    tokens: int


class Retrieval(Baseline):
    """Retrieval-augmented generation without a second model: chunks that end with a sentence, BM25, one call.

    As many of the best chunks are shown as the settings ask for, or as fit.
    """

    name: Final = "retrieval"

    def __init__(self, settings: SystemSettings) -> None:
        super().__init__(settings)
        if settings.embeddings is None:
            WordIndex()  # a missing library should be told before the first document is read

    async def answer(self, asking: Asking, dialogue: Dialogue) -> Attempt:
        """Rank, then ask once."""
        space = room(dialogue.text_needs, self._settings.context_window)
        chunk_tokens = self._settings.retrieval_chunk_tokens or min(_CHUNK_TOKENS, max(1, space // _FEWEST_CHUNKS))
        chunker = Chunker(asking.store, asking.document, asking.tokenizer, chunk_tokens, "sentence")
        if self._settings.embeddings is None:
            spans, ranking = await asyncio.to_thread(_by_words, chunker, asking.question)
        else:
            spans, ranking = await _by_vectors(chunker, asking.question, VectorIndex(self._settings.embeddings))
        text, shown = await asyncio.to_thread(self._excerpt, asking, dialogue, spans, ranking)
        found = await dialogue.ask_about(text)
        tokens = sum(span.tokens for span in spans)
        detail = f"{len(shown):,} of {len(spans):,} chunks shown ({sum(each.tokens for each in shown):,} tokens)"
        return asking.attempt(found.reply, tokens, detail, memory=found.memory)

    def _excerpt(
        self, asking: Asking, dialogue: Dialogue, spans: Sequence[_Span], ranking: Sequence[int]
    ) -> tuple[str, list[_Span]]:
        """The best chunks that fit, in the document's order; of a best one that does not, its beginning."""
        best = ranking[: self._settings.retrieved_chunks]
        shown: list[_Span] = []

        def make(tokens: int) -> str:
            nonlocal shown
            shown, used = [], 0
            for number in best:
                used += spans[number].tokens
                if used > tokens:
                    break
                shown.append(spans[number])
            shown.sort(key=lambda span: span.start)
            if shown:
                return _joined([asking.store.read(asking.document, *each) for each in _runs(shown)], dialogue.separator)
            first = spans[best[0]]
            shown = [replace(first, tokens=tokens)]
            return asking.first_tokens(asking.store.read(asking.document, first.start, first.end), tokens)

        return longest_fitting(make, dialogue.text_needs, self._settings.context_window), shown


def _by_words(chunker: Chunker, question: str) -> tuple[list[_Span], list[int]]:
    """The document's chunks, and their ranking. Blocks."""
    index, spans = WordIndex(), []
    for chunk in chunker.chunks():
        spans.append(_Span(chunk.start_byte, chunk.end_byte, chunk.tokens))
        index.add(chunk.text)
    return spans, index.ranking(question)


async def _by_vectors(chunker: Chunker, question: str, index: VectorIndex) -> tuple[list[_Span], list[int]]:
    """The document's chunks, and their ranking."""
    spans: list[_Span] = []
    chunks = chunker.chunks()
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        spans.append(_Span(chunk.start_byte, chunk.end_byte, chunk.tokens))
        await index.add(chunk.text)
    return spans, await index.ranking(question)


def _runs(spans: Sequence[_Span]) -> list[tuple[int, int]]:
    """The bytes of spans in order, where those that follow each other are one."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        if runs and runs[-1][1] == span.start:
            runs[-1] = (runs[-1][0], span.end)
        else:
            runs.append((span.start, span.end))
    return runs


def _joined(texts: Sequence[str], separator: str) -> str:
    """Parts of a document, with white space around the cuts in the separator's favour."""
    return separator.join(text.strip() if len(texts) > 1 else text for text in texts)
