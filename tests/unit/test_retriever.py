"""What BM25 ranks by."""

from __future__ import annotations

import pytest

from memagent_graph.retriever import rank_by_bm25


@pytest.mark.parametrize(
    ("question", "best"),
    [
        ("What is where the ferry went, and who paid?", 1),  # two words of its own against three that only ask
        ("Who? What?", 0),  # it has no others
    ],
)
def test_words_that_only_ask_do_not_count_if_there_are_others(question, best) -> None:
    texts = ["Who knows what is where?", "The ferry paid its way.", "Nothing of the kind."]
    assert rank_by_bm25(texts, question)[0] == best


def test_nothing_of_an_index_is_logged(caplog) -> None:
    """A server over standard streams shows its log to a person."""
    assert rank_by_bm25(["The ferry paid its way.", "Nothing."], "Who paid?") == [0]
    assert not caplog.records
