"""Several samples of each answer: pass@k, and intervals in which a question counts once, not each of its samples."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.evaluation import make_failed_row, make_row, make_table

from memagent_evaluation.report import estimate_pass_at_k, render_report, summarize
from memagent_evaluation.score_statistics import pass_at_k
from memagent_evaluation.standings import compare_systems, compute_accuracy


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_right_one(samples, data) -> None:
    k = data.draw(st.integers(1, len(samples)))
    choices = list(combinations(samples, k))
    assert pass_at_k(sum(samples), len(samples), k) == pytest.approx(sum(map(any, choices)) / len(choices))


def make_sample_rows(right: dict[int, list[bool]], system: str = "memagent"):
    """Return rows of questions, by index, whose samples are right or wrong."""
    return [
        make_row(system, index=index, repeat=repeat, right=is_right, question=f"Q{index}", document=f"d{index}")
        for index, samples in right.items()
        for repeat, is_right in enumerate(samples)
    ]


ROWS = make_sample_rows({index: [True, index % 2 == 0, False, index % 4 == 0] for index in range(12)})


def test_the_mean_and_pass_at_k_count_questions_not_samples() -> None:
    values = estimate_pass_at_k(ROWS, "lenient")
    assert list(values) == [1, 2, 4]
    assert values[2].n == 12
    assert values[1].mean == compute_accuracy(ROWS, "lenient").mean == pytest.approx((3 * 3 + 3 * 2 + 6) / 48)
    assert values[4].mean == 1.0
    # If the 48 samples counted as independent trials, the interval would be much too narrow: here samples agree.
    agreeing = make_sample_rows({index: [index < 6] * 4 for index in range(12)})
    assert compute_accuracy(agreeing, "lenient").low == pytest.approx(
        compute_accuracy(agreeing[::4], "lenient").low, abs=0.05
    )


def test_pass_at_k_is_reported_only_for_repeated_samples() -> None:
    report = render_report(make_table(*ROWS))
    assert "## Repeated samples" in report
    assert "| keys | 1K tokens | memagent | lenient | 12 | 4 | 43.8 [" in report
    assert "pass@1 | pass@2 | pass@4 |" in report
    (cell,) = summarize(make_table(*ROWS))
    assert cell["pass_at"]["lenient"][4]["mean"] == 1.0
    assert compare_systems(make_table(*ROWS))[0].n == 12
    unrepeated = make_table(*ROWS[::4])
    assert "Repeated samples" not in render_report(unrepeated)
    assert summarize(unrepeated)[0]["pass_at"] == {}
    assert (
        estimate_pass_at_k([make_failed_row(index=index, outcome="does_not_fit") for index in (0, 0)], "lenient") == {}
    )


def test_systems_are_compared_by_question_whatever_the_number_of_samples() -> None:
    refine_rows = make_sample_rows({index: [True] * 4 for index in range(12)}, "refine")
    (standing,) = [row for row in compare_systems(make_table(*ROWS, *refine_rows)) if row.system == "refine"]
    assert standing.against_first is not None
    assert standing.against_first.n == 12
    assert standing.against_first.difference == pytest.approx(1 - 21 / 48)
