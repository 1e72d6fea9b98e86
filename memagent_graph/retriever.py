"""Ranks texts by similarity to a query: by words (BM25), or by a retriever of the user's own."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import index
from typing import Any, Final, Protocol, runtime_checkable

from memagent_graph.errors import MemAgentError, RetrievalError
from memagent_graph.extra_modules import extra_module
from memagent_graph.words import is_character_end, sentence_ends, terms

_QUESTION_WORDS: Final = frozenset(
    ("what", "which", "who", "whom", "whose", "where", "when", "why", "how", "do", "does", "did")
)


@runtime_checkable
class Retriever(Protocol):
    """Ranks texts for a query."""

    async def rank(self, texts: Iterator[str], query: str) -> list[int]:
        """Return the texts' numbers, best first; texts that have nothing in common with the query may be left out.

        Args:
            texts: read once, in another thread if reading them may block.
            query: what to search for.

        Raises:
            RetrievalError: they cannot be ranked.
        """


async def ranked(retriever: Retriever, texts: Iterator[str], query: str) -> list[int]:
    """Return what a retriever returns, each number once.

    Raises:
        RetrievalError: it failed, or returned the number of a text that does not exist.
    """
    count = 0

    def counted() -> Iterator[str]:
        nonlocal count
        for count, text in enumerate(texts, start=1):  # noqa: B007  their number is needed after the loop
            yield text

    try:
        order = list(dict.fromkeys(map(index, await retriever.rank(counted(), query))))
    except MemAgentError:
        raise
    except Exception as error:
        raise RetrievalError(
            f"the retriever {type(retriever).__name__} failed: {type(error).__name__}: {error}",
            hint="See its rank(texts, query).",
        ) from error
    if strange := [number for number in order if not 0 <= number < count]:
        raise RetrievalError(
            f"the retriever {type(retriever).__name__} named text {strange[0]} of {count}",
            hint="Its rank(texts, query) must return the texts' numbers, from 0.",
        )
    return order


@dataclass(frozen=True)
class WordRetriever:
    """BM25 by bm25s, with its defaults and its list of English stop words; it needs no model.

    Words such as "what" and "who" in a query do not count, unless it has no others. In scripts without spaces,
    characters and pairs of them are words. Texts that share no word with the query are left out. Texts are not kept: it
    needs 4 bytes per word while it reads, then 8 bytes per different word of each.

    Raises:
        MissingExtraError: bm25s is not installed.
    """

    def __post_init__(self) -> None:
        extra_module(
            "bm25s", "recall", "retrieval by BM25"
        )  # a missing library should be reported before a document is read

    async def rank(self, texts: Iterator[str], query: str) -> list[int]:
        """Return the texts' numbers, best first; equally good texts stay in their order."""
        return await asyncio.to_thread(rank_by_words, texts, query)


def rank_by_words(texts: Iterable[str], question: str) -> list[int]:
    """Return the numbers of the texts that share a word with the question, best first; see `WordRetriever`."""
    library, numbers = extra_module("bm25s", "recall", "retrieval by BM25"), dict[str, int]()
    logging.getLogger("bm25s").setLevel(logging.INFO)  # it logs each index at DEBUG, and would show that by itself
    stop_words = frozenset(library.stopwords.STOPWORDS_EN)

    def words(text: str) -> Iterator[str]:
        return (word for word in terms(text) if word not in stop_words)

    numbered = [array("I", [numbers.setdefault(word, len(numbers)) for word in words(text)]) for text in texts]
    known = [word for word in dict.fromkeys(words(question)) if word in numbers]
    query = [numbers[word] for word in [word for word in known if word not in _QUESTION_WORDS] or known]
    if not query:
        return []
    index = library.BM25()
    index.index((numbered, numbers), show_progress=False)
    scores = index.get_scores(query)
    return [number for number in _best_first(scores) if scores[number] > 0]


def _best_first(scores: Any) -> list[int]:
    order: list[int] = (-scores).argsort(kind="stable").tolist()
    return order


def passages(text: str, most_chars: int) -> Iterator[tuple[int, int]]:
    """Cut a text into passages that end with a sentence or a line if possible.

    Args:
        text: the text.
        most_chars: the most characters of a passage.

    Yields:
        The first and last character of each passage; together they are the whole text.
    """
    start = 0
    while start < len(text):
        end = start + most_chars
        if end < len(text):
            ends = sentence_ends(text, start, end)[-1:] or [text.rfind("\n", start, end) + 1]
            end = ends[0] if ends[0] > start else _character_start(text, start, end)
        yield start, min(end, len(text))
        start = end


def _character_start(text: str, start: int, end: int) -> int:
    return next((at for at in range(end, start, -1) if is_character_end(text, at)), end)
