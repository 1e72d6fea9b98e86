"""Several samples per question: pass@k, and intervals that count questions, not samples."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.evaluation import make_failed_row, make_row, make_table

from memagent_evaluation.report import estimate_pass_at_k, render_report, summarise
from memagent_evaluation.score_statistics import pass_at_k
from memagent_evaluation.standings import compare_systems, compute_accuracy


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_sample(samples, data) -> None:
    k = data.draw(st.integers(1, len(samples)))
    choices = list(combinations(samples, k))
    assert pass_at_k(sum(samples), len(samples), k) == pytest.approx(sum(map(any, choices)) / len(choices))


def make_sample_rows(right: dict[int, list[bool]], system: str = "memagent"):
    """Return a row for each sample; `right` has a boolean for each sample of a question, by question index."""
    return [
        make_row(system, index=index, repeat=repeat, right=is_right, question=f"Q{index}", document=f"d{index}")
        for index, samples in right.items()
        for repeat, is_right in enumerate(samples)
    ]


ROWS = make_sample_rows({index: [True, index % 2 == 0, False, index % 4 == 0] for index in range(12)})


def test_the_mean_and_pass_at_k_count_questions_not_samples() -> None:
    pass_at = estimate_pass_at_k(ROWS, "lenient")
    assert list(pass_at) == [1, 2, 4]
    assert pass_at[2].n == 12
    assert pass_at[1].mean == compute_accuracy(ROWS, "lenient").mean == pytest.approx((3 * 3 + 3 * 2 + 6) / 48)
    assert pass_at[4].mean == 1.0
    # If the 48 samples counted as independent trials, the interval would be much too narrow: here samples agree.
    agreeing_rows = make_sample_rows({index: [index < 6] * 4 for index in range(12)})
    assert compute_accuracy(agreeing_rows, "lenient").low == pytest.approx(
        compute_accuracy(agreeing_rows[::4], "lenient").low, abs=0.05
    )


def test_pass_at_k_is_reported_only_for_repeated_samples() -> None:
    report = render_report(make_table(*ROWS))
    assert "## Repeated samples" in report
    assert "| keys | 1K tokens | memagent | lenient | 12 | 4 | 43.8 [" in report
    assert "pass@1 | pass@2 | pass@4 |" in report
    (cell,) = summarise(make_table(*ROWS))
    assert cell["pass_at"]["lenient"][4]["mean"] == 1.0
    assert compare_systems(make_table(*ROWS))[0].n == 12
    single_sample_table = make_table(*ROWS[::4])
    assert "Repeated samples" not in render_report(single_sample_table)
    assert summarise(single_sample_table)[0]["pass_at"] == {}
    assert (
        estimate_pass_at_k([make_failed_row(index=index, outcome="does_not_fit") for index in (0, 0)], "lenient") == {}
    )


def test_systems_are_compared_by_question_not_by_sample() -> None:
    refine_rows = make_sample_rows({index: [True] * 4 for index in range(12)}, "refine")
    (standing,) = [row for row in compare_systems(make_table(*ROWS, *refine_rows)) if row.system == "refine"]
    assert standing.against_first is not None
    assert standing.against_first.n == 12
    assert standing.against_first.difference == pytest.approx(1 - 21 / 48)
