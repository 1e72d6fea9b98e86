"""ROUGE-L beside its definition."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.evaluation import results, row

from memagent_evaluation.report import render_report, summary
from memagent_evaluation.rouge import rouge_l

words = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


@given(words, words)
def test_it_is_f1_over_the_longest_common_subsequence(said, wanted) -> None:
    @cache
    def longest(at: int, other: int) -> int:
        if at == len(said) or other == len(wanted):
            return 0
        if said[at] == wanted[other]:
            return 1 + longest(at + 1, other + 1)
        return max(longest(at + 1, other), longest(at, other + 1))

    expected = 2 * longest(0, 0) / (len(said) + len(wanted))
    assert rouge_l(" ".join(said), [" ".join(wanted)]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "wordings", "expected"),
    [
        ("The cat sat.", ["the cat sat"], 1.0),
        ("the cat sat", ["a dog", "The cat lay"], 2 / 3),
        ("", ["x"], 0.0),
        ("x", [], 0.0),
        ("...", ["..."], 0.0),
        ("我喜欢猫", ["我喜欢狗"], 0.75),
        ("it costs 7 marks", ["7 it costs"], 4 / 7),
    ],
)
def test_words_are_compared_case_folded_and_the_nearest_wording_counts(answer, wordings, expected) -> None:
    assert rouge_l(answer, wordings) == pytest.approx(expected)


def test_it_is_shown_where_gold_answers_are_sentences() -> None:
    summaries = [row(index=index, gold=("one two three " * 5,), rouge_l=0.5) for index in range(3)]
    assert "| ROUGE-L |" in render_report(results(*summaries))
    assert summary(results(*summaries))[0]["scores"]["rouge_l"]["mean"] == 0.5
    assert "ROUGE-L" not in render_report(results(row(rouge_l=0.5)))
    assert summary(results(row(gold=("one two three " * 5,))))[0]["scores"]["rouge_l"] is None, "of an older version"
