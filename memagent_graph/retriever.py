"""Ranks texts by similarity to a query, with BM25 or with the user's retriever."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import index
from typing import Final, Protocol, runtime_checkable

from memagent_graph.errors import MemAgentError, RetrievalError, load_extra
from memagent_graph.words import find_last_character_end, find_sentence_ends, list_terms

_QUESTION_WORDS: Final = frozenset(
    ("what", "which", "who", "whom", "whose", "where", "when", "why", "how", "do", "does", "did")
)


@runtime_checkable
class Retriever(Protocol):
    """Ranks texts for a query."""

    async def rank(self, texts: Iterator[str], query: str) -> list[int]:
        """Return the indices of texts, best first. Texts without similarity to the query may be left out.

        Args:
            texts: the texts. They are iterated once, in another thread if that may block.
            query: the query.

        Raises:
            RetrievalError: the texts cannot be ranked.
        """


async def rank_texts(retriever: Retriever, texts: Iterator[str], query: str) -> list[int]:
    """Return the ranking of a retriever, without duplicates.

    Raises:
        RetrievalError: the retriever failed, or returned an index out of range.
    """
    text_count = 0

    def count_texts() -> Iterator[str]:
        nonlocal text_count
        for text_count, text in enumerate(texts, start=1):  # noqa: B007  the count is needed after the loop
            yield text

    try:
        ranking = list(dict.fromkeys(map(index, await retriever.rank(count_texts(), query))))
        if invalid_indices := [index for index in ranking if not 0 <= index < text_count]:
            raise IndexError(f"it returned index {invalid_indices[0]} for {text_count} texts")
    except MemAgentError:
        raise
    except Exception as error:
        raise RetrievalError(
            f"the retriever {type(retriever).__name__} failed: {type(error).__name__}: {error}",
            hint="Correct its method rank(texts, query), which must return the texts' indices, from 0.",
        ) from error
    return ranking


@dataclass(frozen=True)
class BM25Retriever:
    """BM25 from bm25s, with its defaults and its list of English stop words.

    Words such as "what" and "who" in a query count only if the query has no other words. In scripts without spaces,
    characters and pairs of characters are words. Texts that have no word of the query are left out. Texts are not kept
    in memory: the ranking needs 4 bytes per word while it reads, then 8 bytes per distinct word of a text.

    Raises:
        MissingExtraError: bm25s is not installed.
    """

    def __post_init__(self) -> None:
        load_extra("bm25s", "recall", "retrieval by BM25")  # raise for a missing library before a document is read

    async def rank(self, texts: Iterator[str], query: str) -> list[int]:
        """Return the indices of texts, best first. Equally good texts stay in order."""
        return await asyncio.to_thread(rank_by_bm25, texts, query)


def rank_by_bm25(texts: Iterable[str], question: str) -> list[int]:
    """Return the indices of texts with a word of the question, best first; see `BM25Retriever`."""
    bm25s, word_ids = load_extra("bm25s", "recall", "retrieval by BM25"), dict[str, int]()
    logging.getLogger("bm25s").setLevel(logging.INFO)  # at DEBUG, it would print
    stop_words = frozenset(bm25s.stopwords.STOPWORDS_EN)

    def iter_words(text: str) -> Iterator[str]:
        return (word for word in list_terms(text) if word not in stop_words)

    tokenized_texts = [
        array("I", [word_ids.setdefault(word, len(word_ids)) for word in iter_words(text)]) for text in texts
    ]
    known_words = [word for word in dict.fromkeys(iter_words(question)) if word in word_ids]
    content_words = [word for word in known_words if word not in _QUESTION_WORDS]
    query = [word_ids[word] for word in content_words or known_words]
    if not query:
        return []
    index = bm25s.BM25()
    index.index((tokenized_texts, word_ids), show_progress=False)
    scores = index.get_scores(query)
    return [text_index for text_index in (-scores).argsort(kind="stable").tolist() if scores[text_index] > 0]


def cut_passages(text: str, max_chars: int) -> Iterator[tuple[int, int]]:
    """Cut a text into passages that end with a sentence or, failing that, with a line.

    Args:
        text: the text.
        max_chars: the maximum number of characters of a passage.

    Yields:
        The start and end of the passages, which together are the whole text.
    """
    start = 0
    while start < len(text):
        end = start + max_chars
        if end < len(text):
            ends = find_sentence_ends(text, start, end)[-1:] or [text.rfind("\n", start, end) + 1]
            end = ends[0] if ends[0] > start else find_last_character_end(text, end, start + 1) or end
        yield start, min(end, len(text))
        start = end
