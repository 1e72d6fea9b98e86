"""Which of a document's chunks resemble a question most: by words (BM25), or by an embedder's vectors."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from langchain_core.embeddings import Embeddings

from memagent_graph.errors import EvaluationError, MissingExtraError

if TYPE_CHECKING:
    import numpy

_WORD: Final = re.compile(r"[぀-ヿ㐀-鿿]|[^\W぀-ヿ㐀-鿿]+")
"""A run of letters and digits; where words are not parted by spaces, a character."""
_BATCH: Final = 64
"""Texts that an embedder gets at once."""


class WordIndex:
    """BM25 over texts that are added one by one, on bm25s with its own defaults and its list of English stop words.

    It holds numbers, not text: 4 bytes per word while texts are added, then 8 per different word of each text.

    Raises:
        MissingExtraError: bm25s is not installed.
    """

    def __init__(self) -> None:
        try:
            import bm25s  # noqa: PLC0415  optional
            from bm25s.stopwords import STOPWORDS_EN  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError("eval", "retrieval by BM25") from error
        self._make: Any = bm25s.BM25
        self._stop_words = frozenset(STOPWORDS_EN)
        self._numbers: dict[str, int] = {}
        self._texts: list[array[int]] = []

    def add(self, text: str) -> None:
        """Index one more text."""
        numbers = self._numbers
        self._texts.append(array("I", [numbers.setdefault(word, len(numbers)) for word in self._words(text)]))

    def ranking(self, question: str) -> list[int]:
        """The texts' numbers, best first; equally good ones in the order in which they were added."""
        asked = [self._numbers[word] for word in dict.fromkeys(self._words(question)) if word in self._numbers]
        if not asked:
            return list(range(len(self._texts)))
        index = self._make()
        index.index((self._texts, dict(self._numbers)), show_progress=False)
        return _best_first(index.get_scores(asked))

    def _words(self, text: str) -> Iterable[str]:
        return (word for word in _WORD.findall(text.lower()) if word not in self._stop_words)


class VectorIndex:
    """Cosine similarity of an embedder's vectors: 4 bytes per dimension and text.

    Raises:
        MissingExtraError: numpy is not installed.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        try:
            import numpy  # noqa: PLC0415  optional
        except ImportError as error:
            raise MissingExtraError("eval", "retrieval with an embedder") from error
        self._numpy: Any = numpy
        self._embeddings = embeddings
        self._waiting: list[str] = []
        self._vectors: list[numpy.ndarray] = []

    async def add(self, text: str) -> None:
        """Index one more text. Raises EvaluationError where the embedder fails."""
        self._waiting.append(text)
        if len(self._waiting) == _BATCH:
            await self._embed()

    async def ranking(self, question: str) -> list[int]:
        """The texts' numbers, best first. Raises EvaluationError where the embedder fails."""
        await self._embed()
        try:
            asked = self._unit([await self._embeddings.aembed_query(question)])[0]
        except Exception as error:
            raise self._failure(error) from error
        return _best_first(self._numpy.concatenate(self._vectors) @ asked)

    async def _embed(self) -> None:
        if not self._waiting:
            return
        try:
            vectors = self._unit(await self._embeddings.aembed_documents(self._waiting))
        except Exception as error:
            raise self._failure(error) from error
        if len(vectors) != len(self._waiting):
            raise EvaluationError(
                f"the embedder gave {len(vectors)} vectors for {len(self._waiting)} texts", hint="Use another one."
            )
        self._vectors.append(vectors)
        self._waiting = []

    def _unit(self, vectors: Sequence[Sequence[float]]) -> numpy.ndarray:
        """The vectors with length 1; one without any length stays as it is."""
        matrix = self._numpy.asarray(vectors, dtype="float32")
        lengths = self._numpy.linalg.norm(matrix, axis=1, keepdims=True)
        unit: numpy.ndarray = matrix / self._numpy.where(lengths > 0, lengths, 1)
        return unit

    def _failure(self, error: Exception) -> EvaluationError:
        kind = type(self._embeddings).__name__
        return EvaluationError(
            f"the embedder {kind} failed: {type(error).__name__}: {error}",
            hint="Check its model and key, or leave it out to rank by BM25.",
        )


def _best_first(scores: numpy.ndarray) -> list[int]:
    order: list[int] = (-scores).argsort(kind="stable").tolist()
    return order
