"""Systems side by side, on the same questions: accuracy, the difference from the first system, costs.

The comparison is paired by question. A question that was asked at several lengths, or repeatedly, counts once, with its
mean score, because its answers are not independent trials. Two evaluations are compared in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Final

from memagent_evaluation.data_files import list_data_tasks
from memagent_evaluation.markdown_tables import format_interval, format_length_with_unit, group_items, render_table
from memagent_evaluation.result_table import QuestionOutcome, ResultRow, Results, can_be_pooled
from memagent_evaluation.score_statistics import (
    NON_INFERIORITY_MARGIN,
    Comparison,
    Estimate,
    compare,
    correct_p_values,
    estimate,
)
from memagent_graph.errors import EvaluationError
from memagent_graph.grouping import group_values

STANDINGS_LEGEND: Final = (
    "Lenient accuracy with its 95 % interval, clustered by document where questions share one. Difference: to the "
    "first system, in points, on the questions that both were asked and that fit both, by lenient accuracy; "
    "p corrected for all comparisons of the column (Holm). Not worse: the interval's lower end lies above "
    f"-{100 * NON_INFERIORITY_MARGIN:g} points. A question that was asked at several lengths counts once in a line "
    "over all of them. Costs are means per question. Turns: replies that had to wait for each other. –: unknown."
)
SCRIPTED: Final = "scripted"
"""Shown instead of a scripted policy's accuracy."""


@dataclass(frozen=True, slots=True)
class SystemStanding:
    """The results of a system at one task and length, or over all. Means are per question; None if unknown."""

    system: str
    task: str
    """The task's name, or "all"."""
    length: str
    """The length with its unit, or "all"."""
    n: int
    """The number of questions."""
    documents: int
    scripted: bool
    accuracy: Estimate | None
    """Lenient accuracy; documents that did not fit count as wrong. None for a script, and if no document fitted."""
    against_first: Comparison | None
    """This system compared with the first one, by lenient accuracy."""
    prompt_tokens: float | None
    completion_tokens: float | None
    cached_share: float | None
    """The fraction of prompt tokens from the server's prefix cache."""
    turns: float | None
    seconds: float | None

    @property
    def is_non_inferior(self) -> bool | None:
        """Whether this system is non-inferior to the first one, with a margin of 3 points."""
        return self.against_first.is_non_inferior if self.against_first is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-ready."""
        return {**asdict(self), "not_worse": self.is_non_inferior}


def compute_accuracy(rows: Sequence[ResultRow], score: str) -> Estimate | None:
    """Return the mean of a score with its interval, clustered by document; a repeated question counts once.

    It is None if no document fitted, or if a row does not have the score yet (a judge's grade).
    """
    if all(row.outcome is QuestionOutcome.DOES_NOT_FIT for row in rows) or any(
        getattr(row, score) is None for row in rows
    ):
        return None
    scores = _average_by_question(rows, score)
    cluster_by_sample = {row.sample_id: row.cluster for row in rows}
    return estimate(list(scores.values()), clusters=[cluster_by_sample[sample_id] for sample_id in scores])


def compare_systems(results: Results) -> list[SystemStanding]:
    """Return the standings at each task and length, then over all of them, if all systems have the same."""
    cells = group_items(results.rows, lambda row: (row.task, format_length_with_unit(row)))
    groups = [(task, length, rows) for (task, length), rows in cells]
    cells_of_systems = group_values((row.system, (row.task, row.length)) for row in results.rows).values()
    # A mean over all is fair if every system was asked the same tasks at the same lengths.
    is_fair = can_be_pooled(results.rows) and len(set(map(frozenset, cells_of_systems))) == 1
    if len(groups) > 1 and len({row.unit for row in results.rows}) == 1 and is_fair:
        groups.append(("all", "all", list(results.rows)))
    standings = [standing for group in groups for standing in _iter_standings(*group, results.systems[0])]
    comparisons = [standing.against_first for standing in standings if standing.against_first is not None]
    corrected_comparisons = iter(correct_p_values(comparisons))
    return [
        standing if standing.against_first is None else replace(standing, against_first=next(corrected_comparisons))
        for standing in standings
    ]


def compare_evaluations(first: Results, second: Results, names: tuple[str, str]) -> dict[str, list[SystemStanding]]:
    """Return the standings of two evaluations on their common questions, for each system that both have.

    Args:
        first: the evaluation to compare with.
        second: the other evaluation.
        names: the names of the evaluations, which are the names of the systems in the standings.

    Raises:
        EvaluationError: the evaluations have no questions in common, or different questions under the same names.
    """
    second_rows = {(row.system, row.attempt_key): row for row in second.rows}
    pairs = [(row, other) for row in first.rows if (other := second_rows.get((row.system, row.attempt_key)))]
    if not pairs:
        raise EvaluationError(
            f"{names[0]} and {names[1]} have no question of the same system in common",
            hint="Compare evaluations of the same systems, tasks and lengths.",
        )
    for row, other in pairs:
        if (row.question, row.gold, row.document_bytes) != (other.question, other.gold, other.document_bytes):
            raise EvaluationError(
                f"{row.sample_id} is not the same question in {names[0]} and {names[1]}",
                hint="Compare evaluations with the same seed, tokenizer, haystack and data.",
            )
    by_system = {}
    for system, system_pairs in group_items(pairs, lambda pair: pair[0].system):
        rows = [replace(row, system=name) for pair in system_pairs for row, name in zip(pair, names, strict=True)]
        by_system[system] = compare_systems(replace(first, rows=tuple(rows), requested_systems=names))
    return by_system


def format_standings(standings: Sequence[SystemStanding]) -> str:
    """Return standings in Markdown; columns without a value for any system are left out."""
    columns: dict[str, Callable[[SystemStanding], str]] = {
        "task": lambda standing: standing.task,
        "length": lambda standing: standing.length,
        "system": lambda standing: standing.system,
        "n (documents)": lambda standing: (
            f"{standing.n}" + (f" ({standing.documents})" if standing.documents < standing.n else "")
        ),
        "accuracy": lambda standing: (
            SCRIPTED if standing.scripted else format_interval(standing.accuracy) if standing.accuracy else "–"
        ),
        "difference": lambda standing: standing.against_first.formatted_difference if standing.against_first else "",
        "p": lambda standing: standing.against_first.formatted_p_value if standing.against_first else "",
        "not worse": lambda standing: {None: "", True: "yes", False: "not shown"}[standing.is_non_inferior],
        "tokens in": lambda standing: _format_number(standing.prompt_tokens),
        "cached": lambda standing: "–" if standing.cached_share is None else f"{100 * standing.cached_share:.0f} %",
        "tokens out": lambda standing: _format_number(standing.completion_tokens),
        "turns": lambda standing: _format_number(standing.turns, 1),
        "seconds": lambda standing: _format_number(standing.seconds, 2),
    }
    cells = {name: [format_cell(standing) for standing in standings] for name, format_cell in columns.items()}
    names = [name for name, column in cells.items() if any(cell not in {"", "–"} for cell in column)]
    return render_table([names, *([cells[name][index] for name in names] for index in range(len(standings)))])


def _iter_standings(task: str, length: str, rows: Sequence[ResultRow], first: str) -> Iterator[SystemStanding]:
    rows_by_system: dict[str, dict[tuple[str, int], ResultRow]] = defaultdict(dict)
    for row in rows:
        if row.outcome is not QuestionOutcome.DOES_NOT_FIT and not row.scripted:
            rows_by_system[row.system][row.attempt_key] = row
    for system, group in group_items(rows, lambda row: row.system):
        rows_with_costs = [row for row in group if row.has_costs]
        prompt_tokens = _average(row.prompt_tokens for row in rows_with_costs)
        scripted = any(row.scripted for row in group)
        yield SystemStanding(
            system=system,
            task=task,
            length=length,
            n=len({_get_question_key(row) for row in group}),
            documents=len({row.cluster for row in group}),
            scripted=scripted,
            accuracy=None if scripted else compute_accuracy(group, "lenient"),
            against_first=_compare(rows_by_system, system, first),
            prompt_tokens=prompt_tokens,
            completion_tokens=_average(row.completion_tokens for row in rows_with_costs),
            cached_share=(_average(row.cached_tokens for row in rows_with_costs) or 0.0) / prompt_tokens
            if prompt_tokens
            else None,
            turns=_average(row.turns for row in rows_with_costs),
            seconds=_average(row.seconds for row in rows_with_costs),
        )


def _compare(rows: Mapping[str, Mapping[tuple[str, int], ResultRow]], system: str, first: str) -> Comparison | None:
    """Return the comparison of two different systems on the questions of both; None if there are none.

    Args:
        rows: by system, then by question and sample.
        system: the name of one system.
        first: the name of the system to compare it with.
    """
    pairs = [(row, other) for key, row in rows[system].items() if (other := rows[first].get(key))]
    if system == first or not pairs:
        return None
    system_rows, first_rows = ([pair[position] for pair in pairs] for position in (0, 1))
    clusters = {group[0].sample_id: group[0].cluster for _, group in group_items(system_rows, _get_question_key)}
    scores = (_average_by_question(system_rows, "lenient"), _average_by_question(first_rows, "lenient"))
    return compare(*scores, names=(system, first), clusters=clusters)


def _average_by_question(rows: Iterable[ResultRow], score: str) -> dict[str, float]:
    """Return the mean of a score by question, under the id of its first sample."""
    return {
        group[0].sample_id: fmean(getattr(row, score) for row in group)
        for _, group in group_items(rows, _get_question_key)
    }


def _get_question_key(row: ResultRow) -> Hashable:
    """Return the key that a question's rows share, also across documents of different lengths.

    The files of RULER-HQA repeat their questions at each length, as the generated tasks do. In other data files, equal
    questions are about different documents.
    """
    has_own_questions = row.task in list_data_tasks() and row.task != "ruler_hqa_files"
    return row.task, row.index, row.question, row.gold, has_own_questions and row.document


def _average(values: Iterable[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return fmean(known_values) if known_values else None


def _format_number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
