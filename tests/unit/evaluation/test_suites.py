"""Suites of tasks, and the scores that are published for them."""

from __future__ import annotations

import pytest
from support.evaluation import make_row, make_table

from memagent_evaluation.report import render_report
from memagent_evaluation.suites import SUITES, compute_suite_scores, expand_suites
from memagent_evaluation.tasks import list_tasks

MEAN_OF_13, MEAN_OF_10 = "RULER, mean of 13 tasks", "RULER as MemAgent reports it, mean of 10 tasks"


def make_rows(*, lengths=(4096, 8192), match=lambda task, length: 1.0):
    return [
        make_row("memagent", length, index, task=task, string_match=match(task, length), question=f"{task} {index}")
        for task in SUITES["ruler"]
        for length in lengths
        for index in range(4)
    ]


def test_suite_name_expands_to_its_tasks() -> None:
    assert expand_suites(["vt", "ruler", "keys"]) == (
        "vt", *(name for name in SUITES["ruler"] if name != "vt"), "keys"
    )  # fmt: skip
    assert len(SUITES["ruler"]) == 13
    assert len(SUITES["ruler_memagent"]) == 11
    assert {task for tasks in SUITES.values() for task in tasks} <= {*list_tasks()}


def test_ruler_score_is_the_mean_string_match_over_tasks_and_lengths() -> None:
    rows = make_rows(match=lambda task, length: 0.0 if task == "cwe" else 1.0 if length == 4096 else 0.5)
    means = {(score.aggregate, score.length): score.score.mean for score in compute_suite_scores(rows)}
    assert means == pytest.approx(
        {(MEAN_OF_13, 4096): 12 / 13, (MEAN_OF_13, 8192): 6 / 13, (MEAN_OF_10, 4096): 1.0, (MEAN_OF_10, 8192): 0.5}
    )
    report = render_report(make_table(*rows))
    assert f"**{MEAN_OF_13}**" in report
    (line,) = [line for line in report.splitlines() if line.endswith("| 69.2 | 61.5 | 76.9 |")]
    assert line.startswith("| memagent | 92.3 [")


def test_suite_with_a_missing_task_or_question_or_a_script_has_no_score() -> None:
    rows = make_rows(lengths=(4096,))
    suite_scores = compute_suite_scores([row for row in rows if row.task != "qa_2"])
    assert [score.aggregate for score in suite_scores] == [MEAN_OF_10]
    assert compute_suite_scores([row for row in rows if row.task != "vt"]) == []
    means = [score.score for score in compute_suite_scores(rows[:-1])]
    assert means == [None, pytest.approx(means[1])]
    assert compute_suite_scores([make_row(task=task, scripted=True) for task in SUITES["ruler"]]) == []
