"""Which parts of a document a call shows: exact in tokens, and never more than fits."""

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
@example(words=["雨が降る", "雨が降る", "river"], repeats=1, head=0, tail=27)
@given(words=WORDS, repeats=st.integers(1, 300), head=st.integers(0, 2500), tail=st.integers(0, 2500))
def test_the_ends_are_exact_in_tokens_up_to_characters(words, repeats, head, tail) -> None:
    text = " ".join(words * repeats) + "."
    ids = TOKENIZER.encode(text)
    with tempfile.TemporaryDirectory() as folder:
        store = DocumentStore(Path(folder))
        document = store.add(Document.of(text))
        ends = DocumentEnds(lambda tokens: Chunker(store, document, TOKENIZER, tokens))

        def read_span(span) -> str:
            return store.read(document, span.start_byte, span.end_byte) if span else ""

        for span in filter(None, (ends.make_whole_span(), ends.find_head(head), ends.find_tail(tail))):
            assert read_span(span) == text[span.start_char : span.end_char]
        assert ends.tokens == len(ids)
        assert read_span(ends.make_whole_span()) == text
        first, last = read_span(ends.find_head(head)), read_span(ends.find_tail(tail))
    assert text.startswith(first)
    assert text.endswith(last)
    assert min(head, len(ids)) - 3 <= len(TOKENIZER.encode(first)) <= head or head < 4
    if 4 <= tail < len(ids):
        start, tokenized = len(text) - len(last), TOKENIZER.tokenize(text)
        reached = next(
            n for n in range(max(0, len(ids) - tail - 8), len(ids) + 1) if (tokenized.prefix_chars(n) or 0) >= start
        )
        assert tail <= len(ids) - reached <= tail + 3
    elif tail:
        assert (last == text) == (tail >= len(ids))


@given(per_token=st.integers(1, 5), overhead=st.integers(0, 50), window=st.integers(1, 400), length=st.integers(1, 500))
def test_the_longest_text_that_fits_is_found_or_there_is_none(per_token, overhead, window, length) -> None:
    def make(tokens: int) -> Any:
        return ["x"] * min(tokens, length)

    class Window(ExcerptWindow):
        def __init__(self) -> None:
            self.window_tokens, self.room_tokens = window, window - overhead

        def read_text(self, spans: Any) -> str:
            return "".join(spans)

        def count_call_tokens(self, text: str) -> int:
            return overhead + per_token * len(text)

    if per_token > window - overhead:
        with pytest.raises(BudgetError):
            Window().fit_to_window(make)
        return
    text = Window().fit_to_window(make)
    assert overhead + per_token * len(text) <= window
    assert len(text) == length or overhead + per_token * len(text) > window - per_token


def test_bm25_ranks_rare_words_before_common_ones_and_ties_by_place() -> None:
    texts = ["common common", "nothing", "common Rare-word", "common", "nothing else, as it is"]
    assert rank_by_bm25(texts, "Where is the RARE common?")[:2] == [2, 0]
    assert rank_by_bm25(texts, "Is it?") == rank_by_bm25(texts, "absent") == []
    assert rank_by_bm25(texts, "nothing")[:2] == [1, 4]
