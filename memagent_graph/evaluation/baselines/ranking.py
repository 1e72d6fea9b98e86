"""Which of a document's chunks resemble a question most: by words (BM25), or by an embedder's vectors."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Awaitable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

from langchain_core.embeddings import Embeddings

from memagent_graph.errors import EvaluationError
from memagent_graph.evaluation.extra_modules import extra_module

_WORD: Final = re.compile(r"[぀-ヿ㐀-鿿]|[^\W぀-ヿ㐀-鿿]+")
"""A run of letters and digits; where words are not parted by spaces, a character."""
_BATCH: Final = 64
"""Texts that an embedder gets at once."""


def bm25s() -> Any:
    """The library. Raises MissingExtraError where it is not installed."""
    return extra_module("bm25s", "retrieval by BM25")


def ranked_by_words(texts: Iterable[str], question: str) -> list[int]:
    """The texts' numbers, best first; equally good ones in their order.

    bm25s ranks them with its own defaults and its list of English stop words. No text is held, but 4 bytes per word
    while they are read, then 8 per different word of each.

    Raises:
        MissingExtraError: bm25s is not installed.
    """
    library, numbers = bm25s(), dict[str, int]()
    stop_words = frozenset(library.stopwords.STOPWORDS_EN)

    def words(text: str) -> Iterator[str]:
        return (word for word in _WORD.findall(text.lower()) if word not in stop_words)

    numbered = [array("I", [numbers.setdefault(word, len(numbers)) for word in words(text)]) for text in texts]
    asked = [numbers[word] for word in dict.fromkeys(words(question)) if word in numbers]
    if not asked:
        return list(range(len(numbered)))
    index = library.BM25()
    index.index((numbered, numbers), show_progress=False)
    return _best_first(index.get_scores(asked))


async def ranked_by_vectors(texts: Iterator[str], question: str, embeddings: Embeddings) -> list[int]:
    """The texts' numbers, best first by their vectors' cosine with the question's. Texts are read in other threads.

    Raises:
        EvaluationError: the embedder fails.
        MissingExtraError: numpy is not installed.
    """
    numpy = extra_module("numpy", "retrieval with an embedder")

    async def unit(vectors: Awaitable[Any]) -> Any:
        """Vectors with length 1; one without any length stays as it is."""
        try:
            matrix = numpy.asarray(await vectors, dtype="float32")
        except Exception as error:
            raise EvaluationError(
                f"the embedder {type(embeddings).__name__} failed: {type(error).__name__}: {error}",
                hint="Check its model and key, or leave it out to rank by BM25.",
            ) from error
        lengths = numpy.linalg.norm(matrix, axis=-1, keepdims=True)
        return matrix / numpy.where(lengths > 0, lengths, 1)

    asked = await unit(embeddings.aembed_query(question))
    scores = []
    while batch := await asyncio.to_thread(list, islice(texts, _BATCH)):
        vectors = await unit(embeddings.aembed_documents(batch))
        if len(vectors) != len(batch):
            raise EvaluationError(
                f"the embedder gave {len(vectors)} vectors for {len(batch)} texts", hint="Use another one."
            )
        scores.append(vectors @ asked)
    return _best_first(numpy.concatenate(scores))


def _best_first(scores: Any) -> list[int]:
    order: list[int] = (-scores).argsort(kind="stable").tolist()
    return order
