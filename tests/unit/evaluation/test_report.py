"""The report: complete denominators, intervals on all figures, costs, losses and comparisons."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.evaluation import make_failed_row, make_row, make_table

from memagent_evaluation.markdown_tables import format_length
from memagent_evaluation.report import find_percentile, render_comparison, render_report, summarise
from memagent_evaluation.score_statistics import compute_wilson_interval
from memagent_evaluation.standings import compare_evaluations
from memagent_graph.errors import EvaluationError
from memagent_graph.results import Prices


def find_row(report: str, *cells: str) -> str:
    """Return the only table row that begins with these cells."""
    (row_text,) = [line for line in report.splitlines() if line.startswith(f"| {' | '.join(cells)} |")]
    return row_text


def test_failed_and_unfinished_questions_count_as_wrong_in_own_columns() -> None:
    rows = [
        *(make_row(index=index) for index in range(6)),
        make_failed_row(index=6),
        make_failed_row(index=7, outcome="unfinished"),
    ]
    report = render_report(make_table(*rows))
    expected = compute_wilson_interval(6, 8)
    interval = f"75.0 [{100 * expected.low:.1f}, {100 * expected.high:.1f}]"
    assert find_row(report, "1K", "memagent", "8") == f"| 1K | memagent | 8 | {' | '.join([interval] * 4)} | 1 | 1 |"
    assert "| unfinished | failed |" in report
    assert "1 question failed twice, and counts as wrong:\n\n- 1: the server is on fire" in report


def test_tasks_share_a_table_only_if_all_systems_have_the_same_questions() -> None:
    rows = [
        make_row(),
        make_row("refine"),
        make_row(task="vt"),
        make_row("refine", task="vt", right=False, string_match=0.5),
    ]
    report = render_report(make_table(*rows))
    assert "### All tasks, by tokens" in report
    assert find_row(report, "1K", "refine", "2").startswith("| 1K | refine | 2 | 50.0 [")
    assert " | 75.0 [" in find_row(report, "1K", "refine", "2"), "RULER's string match"
    assert "### All tasks" not in render_report(make_table(*rows[:3]))
    assert "### All tasks" not in render_report(make_table(*rows[:2])), "there is only one task"


def test_systems_whose_documents_never_fit_have_no_accuracy() -> None:
    rows = [make_row(index=index) for index in range(9)]
    rows += [make_failed_row("full_context", index=index, outcome="does_not_fit") for index in range(9)]
    report = render_report(make_table(*rows))
    assert set(summarise(make_table(*rows[9:]))[0]["scores"].values()) == {None}
    (partly_fitting_cell,) = summarise(make_table(replace(rows[9], system="memagent"), rows[1]))
    assert partly_fitting_cell["scores"]["lenient"]["mean"] == 0.5
    assert find_row(report, "1K", "full_context", "9") == "| 1K | full_context | 9 | – | – | – | – | 9 |"
    assert find_row(report, "keys", "1K tokens", "full_context", "9", "–")


def test_costs_are_means_over_questions_that_did_not_fail() -> None:
    rows = [
        make_row(prompt_tokens=1000, seconds=1.0, flops=1e12),
        make_row(index=1, prompt_tokens=3000, seconds=2.0, flops=None),
    ]
    rows += [replace(make_failed_row(index=2), prompt_tokens=0, calls=0, seconds=600.0)]
    rows += [replace(make_failed_row(index=3, outcome="does_not_fit"), prompt_tokens=0, calls=0, seconds=0.0)]
    (cell,) = summarise(make_table(*rows))
    assert cell["means"] == {
        "prompt_tokens": 2000, "completion_tokens": 10, "cached_tokens": 0, "calls": 2, "seconds": 1.5
    }  # fmt: skip
    report = render_report(make_table(*rows))
    cells = ("2,000", "0", "10", "2.0", "1.50", "1.00", "2.00", "2.00", "1.00e+12")
    assert find_row(report, "1K tokens", "memagent", *cells)


def test_wrong_answers_are_listed_with_losses_and_the_command_that_shows_them() -> None:
    wrong_rows = [
        make_row(right=False, where_lost=("overwritten", "never_written"), lost_at=(3, None), run_id="e-1"),
        make_row(index=1, right=False, where_lost=("cut_by_cap",), lost_at=(2,), run_id="e-2", answer="a | b `c`\nd"),
    ]
    row_with_three_losses = make_row(
        index=4, right=False, where_lost=("never_written", "overwritten", "never_written"), lost_at=(None, 4, None)
    )
    unread = make_row(index=3, right=False, system="full_context", where_lost=("not_applicable",), lost_at=(None,))
    table = make_table(*wrong_rows, make_row(index=2), row_with_three_losses, unread)
    report = render_report(table, log=Path("out/runs.sqlite"))
    assert find_row(report, "memagent", "keys", "1K tokens", "3") == "| memagent | keys | 1K tokens | 3 | 3 | 2 | 1 |"
    assert "| never written x 2, overwritten at chunk 5 |" in report
    assert "not applicable" not in report
    assert "memagent show RUN --log out/runs.sqlite" in report
    assert "overwritten at chunk 4, never written | `e-1` |" in report
    assert "| a \\| b 'c' d | cut by cap at chunk 3 | `e-2` |" in report


def test_tasks_and_units_have_separate_tables() -> None:
    rows = [
        make_row(),
        make_row(task="hqa", unit="passages", length=50),
        make_row(task="hqa", unit="passages", length=3200),
    ]
    report = render_report(make_table(*rows))
    assert "### keys" in report
    assert "### hqa" in report
    assert find_row(report, "3,200", "memagent", "1")


def test_an_unfinished_evaluation_is_marked() -> None:
    assert "**Not finished: 3 questions not asked yet.**" in render_report(replace(make_table(make_row()), missing=3))
    assert "No question has been answered yet" in render_report(make_table())


@pytest.mark.parametrize(
    ("length", "label"),
    [(1024, "1K"), (8192, "8K"), (1536, "1.5K"), (1000, "1,000"), (50, "50"), (1 << 20, "1M"), (3_670_016, "3.5M"),
     (131072, "128K"), (25_600, "25K"), (3_500_000, "3,500,000")],
)  # fmt: skip
def test_lengths_are_labelled_with_suffixes_when_exact(length, label) -> None:
    assert format_length(length) == label


def test_failures_are_grouped_by_message_without_run_ids() -> None:
    error = "the server is on fire (run e-memagent-keys-1024-{}, chunk {}). Put it out"
    rows = [replace(make_failed_row(index=index), error=error.format(index, 2 * index)) for index in range(3)]
    assert "- 3: the server is on fire. Put it out" in render_report(make_table(*rows))


def test_two_evaluations_are_compared_on_their_common_questions() -> None:
    first = make_table(*(make_row(length=length, index=index) for length in (1024, 2048) for index in range(30)))
    second = make_table(
        *(make_row(length=length, index=index, right=False) for length in (1024, 2048) for index in range(10, 30))
    )
    report = render_comparison(first, second, ("new", "memagent"))
    assert "40 questions in both; 20 rows without a partner." in report
    assert "## memagent" in report
    assert "| 40 | 0.0 [0.0, 8.8] | -100.0 [" in find_row(report, "all", "all", "memagent", "40")
    assert find_row(report, "keys", "1K tokens", "memagent", "20")
    standings = compare_evaluations(first, second, ("new", "old"))["memagent"]
    assert [(standing.length, standing.system) for standing in standings[::2]] == [
        ("1K tokens", "new"), ("2K tokens", "new"), ("all", "new")
    ]  # fmt: skip
    assert standings[-1].against_first.corrected_for == 3


def test_evaluations_without_common_questions_are_not_compared() -> None:
    with pytest.raises(EvaluationError, match="no question of the same system in common"):
        render_comparison(make_table(make_row()), make_table(make_row("refine")), ("a", "b"))
    with pytest.raises(EvaluationError, match="keys/1024/0 is not the same question"):
        render_comparison(make_table(make_row()), make_table(make_row(gold=("12",))), ("a", "b"))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.sampled_from([50, 95, 99, 100]))
def test_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(values, percent) -> None:
    percentile = find_percentile(values, percent)
    needed_count = math.ceil(percent / 100 * len(values))
    assert sum(value <= percentile for value in values) >= needed_count
    assert sum(value < percentile for value in values) < needed_count


def test_report_and_summary_have_latency_percentiles_outcomes_and_price() -> None:
    rows = [make_row(index=index, seconds=float(index + 1), prompt_tokens=1_000_000) for index in range(100)]
    rows.append(make_failed_row(index=100))
    report = render_report(make_table(*rows), prices=Prices(0.5, 2.0))
    assert "| 50.50 | 50.00 | 95.00 | 99.00 |" in report
    assert "| 0.5 | 50 |" in report
    assert "at 0.5 for a million prompt tokens" in report
    (cell,) = summarise(make_table(*rows), Prices(0.5, 2.0))
    assert cell["scores"]["lenient"]["low"] == compute_wilson_interval(100, 101).low
    assert (cell["outcomes"], cell["n"]) == ({"answered": 100, "failed": 1}, 101)
    assert cell["seconds"] == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert cell["price"] == pytest.approx(0.5 + 2e-5)
    assert "price" not in render_report(make_table(*rows)).casefold()
    (failed_cell,) = summarise(make_table(make_failed_row()), Prices(1, 1))
    assert {failed_cell["price"], failed_cell["seconds"]["p50"], *failed_cell["means"].values()} == {None}


def test_a_single_price_is_refused() -> None:
    assert Prices.of(None, None) is None
    assert Prices.of(0.0, 0.0) == Prices(0.0, 0.0)
    with pytest.raises(EvaluationError, match=r"only one.*price_in and price_out"):
        Prices.of(1.0, None)
