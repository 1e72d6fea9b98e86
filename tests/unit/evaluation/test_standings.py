"""Comparison of systems: paired and clustered differences, costs, and scripted systems."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.evaluation import make_failed_row, make_row, make_table

from memagent_evaluation.report import render_report
from memagent_evaluation.result_table import QuestionOutcome
from memagent_evaluation.standings import SystemStanding, compare_systems, format_standings


def compute_only_standing(*rows) -> SystemStanding:
    (standing,) = compare_systems(make_table(*rows))
    return standing


def test_failures_count_as_wrong_and_have_no_costs() -> None:
    cheap_row = make_row(turns=4, prompt_tokens=100, cached_tokens=90)
    costly_row = make_row(index=1, turns=6, prompt_tokens=300, cached_tokens=10)
    standing = compute_only_standing(cheap_row, costly_row, make_failed_row(index=2))
    assert (standing.n, standing.turns, standing.accuracy.mean) == (3, 5.0, pytest.approx(2 / 3))
    assert standing.cached_share == 0.25, "of all prompt tokens"


def test_systems_are_compared_with_the_first_and_p_values_are_corrected() -> None:
    rows = [make_row(length=length, index=index) for length in (1024, 4096) for index in range(40)]
    rows += [make_row("worse", length, index, right=index > 30) for length in (1024, 4096) for index in range(40)]
    standings = compare_systems(make_table(*rows))
    assert [(standing.length, standing.system) for standing in standings] == [
        (length, system) for length in ("1K tokens", "4K tokens", "all") for system in ("memagent", "worse")
    ]
    worse = standings[1].against_first
    assert (worse.difference, worse.corrected_for) == (pytest.approx(-31 / 40), 3)
    assert (standings[0].is_non_inferior, standings[1].is_non_inferior) == (None, False)
    assert "| not shown |" in format_standings(standings)


def test_system_is_non_inferior_if_its_interval_ends_above_minus_3_points() -> None:
    rows = [item for index in range(200) for item in (make_row(index=index), make_row("same", index=index))]
    assert compare_systems(make_table(*rows))[1].is_non_inferior is True
    assert compare_systems(make_table(*rows[:20]))[1].is_non_inferior is False, "ten questions cannot show it"


def test_questions_on_one_document_are_clustered() -> None:
    separate_rows = [make_row(index=index, right=index < 80) for index in range(120)]
    shared_rows = [replace(row, document=f"d{row.index // 4}") for row in separate_rows]
    clustered_standing, row_standing = compute_only_standing(*shared_rows), compute_only_standing(*separate_rows)
    assert (clustered_standing.documents, row_standing.documents) == (30, 120)
    clustered_accuracy, row_accuracy = clustered_standing.accuracy, row_standing.accuracy
    assert clustered_accuracy.mean == row_accuracy.mean
    assert clustered_accuracy.high - clustered_accuracy.low > 1.5 * (row_accuracy.high - row_accuracy.low)
    assert "| 120 (30) |" in format_standings([clustered_standing])
    other_rows = [replace(row, system="other", lenient=1.0) for row in shared_rows]
    standing = compare_systems(make_table(*shared_rows, *other_rows))[1].against_first
    assert standing.low < 1 / 3 < standing.high


def test_scripted_system_has_costs_but_no_accuracy() -> None:
    rows = [make_row(index=index) for index in range(9)]
    rows += [make_row("fast", index=index, scripted=True) for index in range(9)]
    report = render_report(make_table(*rows))
    (line,) = [line for line in report.splitlines() if line.startswith("| keys | 1K tokens | fast |")]
    assert "| scripted |" in line
    assert "| 1,024 |" in line
    assert "### keys" in report
    assert "| 1K | fast |" not in report


def test_documents_that_do_not_fit_lower_accuracy_but_are_not_compared() -> None:
    rows = [make_row(length=length, index=index) for length in (1024, 4096) for index in range(10)]
    rows += [replace(row, system="short") for row in rows[:10]]
    rows += [replace(row, system="short", outcome=QuestionOutcome.DOES_NOT_FIT, lenient=0.0) for row in rows[10:20]]
    _, at_4k, overall = [row for row in compare_systems(make_table(*rows)) if row.system == "short"]
    assert (at_4k.length, at_4k.accuracy) == ("4K tokens", None)
    assert (overall.n, overall.accuracy.mean) == (20, 0.5)
    assert (overall.against_first.n, overall.against_first.difference) == (10, 0.0)


def test_systems_with_different_lengths_have_no_overall_standing() -> None:
    rows = [make_row(index=index) for index in range(4)] + [make_row("other", 4096, index) for index in range(4)]
    assert {standing.length for standing in compare_systems(make_table(*rows))} == {"1K tokens", "4K tokens"}


def test_question_asked_at_several_lengths_counts_once_overall() -> None:
    """Six questions at three lengths are not eighteen independent trials."""
    rows = [make_row(length=2**power, index=index, question="Q") for power in (10, 11, 12) for index in range(6)]
    rows += [replace(row, system="refine", lenient=float(row.sample_id == "keys/1024/0")) for row in rows]
    overall = compare_systems(make_table(*rows))[-1]
    assert (overall.length, overall.system, overall.n, overall.against_first.n) == ("all", "refine", 6, 6)
    assert overall.against_first.difference == pytest.approx(-17 / 18)
    for task, count in (("qa_files", 18), ("ruler_hqa_files", 6)):  # in qa_files, one form about many documents
        overall = compare_systems(make_table(*(replace(row, task=task, document=row.sample_id) for row in rows)))[-1]
        assert (overall.n, overall.against_first.n) == (count, count)


def test_only_questions_that_both_answered_are_compared() -> None:
    rows = [
        *(make_row(index=index) for index in range(12)),
        *(make_row("refine", index=index) for index in range(5, 9)),
    ]
    rows[-1] = replace(rows[-1], lenient=0.0)
    refine = compare_systems(make_table(*rows))[1]
    assert (refine.against_first.n, refine.against_first.difference) == (4, -0.25)
    table = format_standings(compare_systems(make_table(*rows)))
    assert "| difference | p | not worse |" in table
    assert "| -25.0 [" in table
