"""Systems side by side: paired and clustered differences, costs, scripts marked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.evaluation import make_failed_row, make_row, make_table

from memagent_evaluation.report import render_report
from memagent_evaluation.result_table import QuestionOutcome
from memagent_evaluation.standings import SystemStanding, compare_systems, format_standings


def only(*rows) -> SystemStanding:
    (standing,) = compare_systems(make_table(*rows))
    return standing


def test_failures_are_wrong_and_have_no_costs() -> None:
    short = make_row(turns=4, prompt_tokens=100, cached_tokens=90)
    long = make_row(index=1, turns=6, prompt_tokens=300, cached_tokens=10)
    standing = only(short, long, make_failed_row(index=2))
    assert (standing.n, standing.turns, standing.accuracy.mean) == (3, 5.0, pytest.approx(2 / 3))
    assert standing.cached_share == 0.25, "of all prompt tokens"


def test_each_system_is_compared_with_the_first_and_p_values_are_corrected_for_all_comparisons() -> None:
    rows = [make_row(length=length, index=at) for length in (1024, 4096) for at in range(40)]
    rows += [make_row("worse", length, at, right=at > 30) for length in (1024, 4096) for at in range(40)]
    standings = compare_systems(make_table(*rows))
    assert [(item.length, item.system) for item in standings] == [
        (length, system) for length in ("1K tokens", "4K tokens", "all") for system in ("memagent", "worse")
    ]
    worse = standings[1].against_first
    assert (worse.difference, worse.corrected_for) == (pytest.approx(-31 / 40), 3)
    assert (standings[0].is_non_inferior, standings[1].is_non_inferior) == (None, False)
    assert "| not shown |" in format_standings(standings)


def test_a_system_is_not_worse_where_the_interval_ends_above_minus_3_points() -> None:
    rows = [item for at in range(200) for item in (make_row(index=at), make_row("same", index=at))]
    assert compare_systems(make_table(*rows))[1].is_non_inferior is True
    assert compare_systems(make_table(*rows[:20]))[1].is_non_inferior is False, "ten questions cannot show it"


def test_questions_on_one_document_are_no_independent_trials() -> None:
    alone = [make_row(index=at, right=at < 80) for at in range(120)]
    shared = [replace(row, document=f"d{row.index // 4}") for row in alone]
    wide, narrow = only(*shared), only(*alone)
    assert (wide.documents, narrow.documents) == (30, 120)
    assert wide.accuracy.mean == narrow.accuracy.mean
    assert wide.accuracy.high - wide.accuracy.low > 1.5 * (narrow.accuracy.high - narrow.accuracy.low)
    assert "| 120 (30) |" in format_standings([wide])
    others = [replace(row, system="other", lenient=1.0) for row in shared]
    standing = compare_systems(make_table(*shared, *others))[1].against_first
    assert standing.low < 1 / 3 < standing.high


def test_a_script_fills_the_columns_of_cost_and_is_marked() -> None:
    rows = [make_row(index=at) for at in range(9)] + [make_row("fast", index=at, scripted=True) for at in range(9)]
    report = render_report(make_table(*rows))
    (line,) = [line for line in report.splitlines() if line.startswith("| keys | 1K tokens | fast |")]
    assert "| scripted |" in line
    assert "| 1,024 |" in line
    assert "### keys" in report
    assert "| 1K | fast |" not in report


def test_documents_that_do_not_fit_count_in_the_accuracy_over_all_and_in_no_difference() -> None:
    rows = [make_row(length=length, index=at) for length in (1024, 4096) for at in range(10)]
    rows += [replace(row, system="short") for row in rows[:10]]
    rows += [replace(row, system="short", outcome=QuestionOutcome.DOES_NOT_FIT, lenient=0.0) for row in rows[10:20]]
    short = {standing.length: standing for standing in compare_systems(make_table(*rows)) if standing.system == "short"}
    assert short["4K tokens"].accuracy is None
    assert (short["all"].n, short["all"].accuracy.mean) == (20, 0.5)
    assert (short["all"].against_first.n, short["all"].against_first.difference) == (10, 0.0)


def test_systems_that_were_asked_at_other_lengths_are_not_put_together_over_all() -> None:
    rows = [make_row(index=at) for at in range(4)] + [make_row("other", 4096, at) for at in range(4)]
    assert {standing.length for standing in compare_systems(make_table(*rows))} == {"1K tokens", "4K tokens"}


def test_a_question_that_was_asked_at_several_lengths_counts_once_over_all_of_them() -> None:
    """Three lengths of the same six questions are no eighteen trials."""
    lengths = (1024, 2048, 4096)
    rows = [make_row(length=length, index=index, question="Q") for length in lengths for index in range(6)]
    rows += [replace(row, system="refine", lenient=float(row.sample_id == "keys/1024/0")) for row in rows]
    whole = compare_systems(make_table(*rows))[-1]
    assert (whole.length, whole.system, whole.n, whole.against_first.n) == ("all", "refine", 6, 6)
    assert whole.against_first.difference == pytest.approx(-17 / 18)
    apart = compare_systems(make_table(*(replace(row, question=row.sample_id) for row in rows)))[-1]
    assert (apart.n, apart.against_first.n) == (18, 18)


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
