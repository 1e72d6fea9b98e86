"""Excerpts of a document have an exact number of tokens and always fit the window."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memagent_graph import Document, DocumentStore
from memagent_graph.documents.chunking import Chunker
from memagent_graph.errors import BudgetError
from memagent_graph.retriever import rank_by_bm25
from memagent_graph.strategies.excerpts import DocumentEnds, ExcerptWindow
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")
WORDS = st.lists(
    st.sampled_from(["river", "stone 12.", "Ångström", "\n\n", "雨が降る", "🙂🙂", "<text>", "the"]), min_size=1
)


@settings(max_examples=25)
@example(words=["雨が降る", "雨が降る", "river"], repeats=1, head_tokens=0, tail_tokens=27)
@given(words=WORDS, repeats=st.integers(1, 300), head_tokens=st.integers(0, 2500), tail_tokens=st.integers(0, 2500))
def test_document_ends_have_the_requested_number_of_tokens(words, repeats, head_tokens, tail_tokens) -> None:
    text = " ".join(words * repeats) + "."
    size = TOKENIZER.count(text)
    with tempfile.TemporaryDirectory() as folder:
        store = DocumentStore(Path(folder))
        document = store.add(Document.of(text))
        ends = DocumentEnds(lambda tokens: Chunker(store, document, TOKENIZER, tokens))

        def read_span(span) -> str:
            return store.read(document, span.start_byte, span.end_byte)

        whole = ends.cut(0, ends.tokens)
        head, tail = ends.cut(0, min(head_tokens, size)), ends.cut(max(0, size - tail_tokens), size)
        for span in (whole, head, tail):
            assert read_span(span) == text[span.start_char : span.end_char]
        assert ends.tokens == size
        assert read_span(whole) == text
        head_text, tail_text = read_span(head), read_span(tail)
    assert text.startswith(head_text)
    assert text.endswith(tail_text)
    assert min(head_tokens, size) - 3 <= TOKENIZER.count(head_text) <= head_tokens or head_tokens < 4
    if 4 <= tail_tokens < size:
        start, tokenized = len(text) - len(tail_text), TOKENIZER.tokenize(text)
        tail_start = next(
            n for n in range(max(0, size - tail_tokens - 8), size + 1) if (tokenized.prefix_chars(n) or 0) >= start
        )
        assert tail_tokens <= size - tail_start <= tail_tokens + 3
    elif tail_tokens:
        assert (tail_text == text) == (tail_tokens >= size)


@given(per_token=st.integers(1, 5), overhead=st.integers(0, 50), window=st.integers(1, 400), length=st.integers(1, 500))
def test_fit_to_window_returns_the_longest_text_that_fits(per_token, overhead, window, length) -> None:
    def make_words(tokens: int) -> Any:
        return ["x"] * min(tokens, length)

    class CountingWindow(ExcerptWindow):
        def __init__(self) -> None:
            self.window_tokens, self.available_tokens = window, window - overhead

        def read_text(self, spans: Any) -> str:
            return "".join(spans)

        def count_call_tokens(self, text: str) -> int:
            return overhead + per_token * len(text)

    if per_token > window - overhead:
        with pytest.raises(BudgetError):
            CountingWindow().fit_to_window(make_words)
        return
    text = CountingWindow().fit_to_window(make_words)
    assert overhead + per_token * len(text) <= window
    assert len(text) == length or overhead + per_token * len(text) > window - per_token


def test_bm25_ranks_rare_words_first_and_ties_by_position() -> None:
    texts = ["common common", "nothing", "common Rare-word", "common", "nothing else, as it is"]
    assert rank_by_bm25(texts, "Where is the RARE common?")[:2] == [2, 0]
    assert rank_by_bm25(texts, "Is it?") == rank_by_bm25(texts, "absent") == []
    assert rank_by_bm25(texts, "nothing")[:2] == [1, 4]
