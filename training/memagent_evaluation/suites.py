"""Suites: names for tasks that are published together, and the published aggregates of their scores.

ruler            NVIDIA's thirteen; the mean over them by length, and over lengths, plain and with weights that rise or
                 fall linearly with the length's rank
ruler_memagent   what MemAgent's paper reports on RULER: the mean of ten tasks (eight of needles, vt, fwe), and qa_1

Both are means of RULER's string match, in percent. `qa_1` and `qa_2` need data files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from memagent_evaluation.markdown_tables import format_interval, format_length, group_items, render_table
from memagent_evaluation.result_table import ResultRow
from memagent_evaluation.samples import LengthUnit
from memagent_evaluation.score_statistics import Estimate
from memagent_evaluation.standings import compute_accuracy
from memagent_evaluation.tasks.needles import NEEDLE_CONFIGS

_SUITE_METRIC: Final = "string_match"
"""The score whose means are published."""


@dataclass(frozen=True, slots=True)
class SuiteScore:
    """One system's aggregate at one length."""

    aggregate: str
    system: str
    length: int
    score: Estimate | None
    """None if the system was not asked all tasks equally often, or no document fitted."""


_MEMAGENT_TASKS: Final = (*NEEDLE_CONFIGS, "vt", "fwe")
_RULER_TASKS: Final = (*NEEDLE_CONFIGS, "vt", "cwe", "fwe", "qa_1", "qa_2")
_AGGREGATES: Final = {
    "RULER, mean of 13 tasks": _RULER_TASKS,
    "RULER as MemAgent reports it, mean of 10 tasks": _MEMAGENT_TASKS,
}
"""The titles of the aggregates, each with the tasks that it is a mean of."""
SUITES: Final[Mapping[str, tuple[str, ...]]] = {"ruler": _RULER_TASKS, "ruler_memagent": (*_MEMAGENT_TASKS, "qa_1")}
"""The tasks of each suite."""


def expand_suites(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of tasks, with the name of a suite replaced by its tasks, without duplicates."""
    return tuple(dict.fromkeys(task for name in names for task in SUITES.get(name, (name,))))


def compute_suite_scores(rows: Sequence[ResultRow]) -> list[SuiteScore]:
    """Return all aggregates whose tasks were all measured, by system and length in tokens."""
    scores = []
    for title, tasks in _AGGREGATES.items():
        task_rows = [row for row in rows if row.task in tasks and row.unit == LengthUnit.TOKENS and not row.scripted]
        if {row.task for row in task_rows} == {*tasks}:
            for (system, length), group in group_items(task_rows, lambda row: (row.system, row.length)):
                scores.append(SuiteScore(title, system, length, _average_tasks(group, tasks)))
    return scores


def format_suites(rows: Sequence[ResultRow]) -> list[str]:
    """Return the aggregates as tables: systems by length, and means over lengths with RULER's weights."""
    parts = []
    for title, scores in group_items(compute_suite_scores(rows), lambda score: score.aggregate):
        lengths = sorted({score.length for score in scores})
        mean_titles = ["mean", "rising weights", "falling weights"] if len(lengths) > 1 else []
        table = [["system", *(format_length(length) for length in lengths), *mean_titles]]
        for system, group in group_items(scores, lambda score: score.system):
            score_by_length = {score.length: score.score for score in group}
            cells = [format_interval(score) if (score := score_by_length.get(length)) else "–" for length in lengths]
            table.append(
                [
                    system,
                    *cells,
                    *(_average_lengths([score_by_length.get(length) for length in lengths]) if mean_titles else []),
                ]
            )
        parts += [f"**{title}**, string match in percent", render_table(table)]
    return parts


def _average_tasks(rows: Sequence[ResultRow], tasks: Sequence[str]) -> Estimate | None:
    """Return the mean over tasks: the mean over questions, if all tasks have the same number of questions."""
    counts = {task: len(group) for task, group in group_items(rows, lambda row: row.task)}
    if set(counts) != set(tasks) or len(set(counts.values())) > 1:
        return None
    return compute_accuracy(rows, _SUITE_METRIC)


def _average_lengths(scores: Sequence[Estimate | None]) -> list[str]:
    means = [score.mean for score in scores if score is not None]
    if len(means) < len(scores):
        return ["–"] * 3
    ranks = range(1, len(means) + 1)
    weights = ([1] * len(means), ranks, ranks[::-1])
    return [f"{100 * sum(w * x for w, x in zip(weight, means, strict=True)) / sum(weight):.1f}" for weight in weights]
