"""Ranking of passages by BM25."""

from __future__ import annotations

import pytest

from memagent_graph.retriever import rank_by_bm25


@pytest.mark.parametrize(
    ("question", "best"),
    [
        ("What is where the ferry went, and who paid?", 1),  # two content words against three question words
        ("Who? What?", 0),  # question words alone
    ],
)
def test_question_words_count_only_if_there_are_no_others(question, best) -> None:
    texts = ["Who knows what is where?", "The ferry paid its way.", "Nothing of the kind."]
    assert rank_by_bm25(texts, question)[0] == best


def test_ranking_writes_nothing_to_the_log(caplog) -> None:
    assert rank_by_bm25(["The ferry paid its way.", "Nothing."], "Who paid?") == [0]
    assert not caplog.records
