"""An evaluation as Markdown: the systems side by side, accuracy with intervals, costs, and what went wrong.

Every question counts in the denominators, and no system is called better unless a corrected test says so.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from memagent_evaluation.failures import Loss
from memagent_evaluation.markdown_tables import (
    SCORES,
    format_interval,
    format_length,
    format_length_with_unit,
    group_items,
    list_score_titles,
    render_table,
)
from memagent_evaluation.plots import draw_all
from memagent_evaluation.result_journal import REPORT, load_results
from memagent_evaluation.result_table import (
    TABLE,
    QuestionOutcome,
    ResultRow,
    Results,
    can_be_pooled,
    translate_write_errors,
    write_table,
)
from memagent_evaluation.score_statistics import Estimate, estimate, pass_at_k
from memagent_evaluation.standings import (
    STANDINGS_LEGEND,
    compare_evaluations,
    compare_systems,
    compute_accuracy,
    format_standings,
)
from memagent_evaluation.suites import format_suites
from memagent_graph.plain_text import format_count, make_one_line
from memagent_graph.results import Prices
from memagent_graph.storage.private_files import write_atomically

_LEGEND: Final = (
    "Percentages with 95 % intervals. Strict: the answer is the gold one, normalised, and in the form asked for. "
    "Lenient: it holds the gold one as whole words. String match: as RULER counts. A question without an answer is "
    "wrong in all of them; the reasons are counted separately."
)
_REPEATS_LEGEND: Final = (
    "Several samples of each answer. pass@k: an unbiased estimate of the probability that at least one of k is right, "
    "from all samples of a question (1 - C(wrong, k) / C(all, k)); pass@1 is the mean. Intervals are over "
    "questions, clustered by document: the samples of one question are not independent trials."
)
_COST_LEGEND: Final = (
    "Means over the questions that did not fail, and percentiles of seconds (p95: 95 % of questions took no longer). "
    "Seconds are wall time with many questions at once, waiting for the server included. FLOPs are estimated from "
    "tokens and the model's size, if that is known, and compared with one call with the whole document."
)
_PRICE_LEGEND: Final = (
    "Price: per question, and of all together, at {prompt:g} for a million prompt tokens, cached ones included, and "
    "{completion:g} for a million completion tokens. Tokens of failed attempts are not known."
)
_COST_DIGITS: Final = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0, "calls": 1, "seconds": 2}
"""Columns of costs, with the number of decimal digits of their means in tables."""
_PERCENTILES: Final = (50, 95, 99)
_REPEATED_SCORES: Final = ("strict", "lenient")
_OUTCOME_TITLES: Final = {
    QuestionOutcome.NO_ANSWER: "no answer",
    QuestionOutcome.UNFINISHED: "unfinished",
    QuestionOutcome.FAILED: "failed",
    QuestionOutcome.DOES_NOT_FIT: "does not fit",
}
_RUN_LOCATION: Final = re.compile(r" \((?:run|branch|chunk) [^()]*\)")
"""Matches run, branch and chunk in an error's message (see `MemAgentError`)."""
_MAX_LISTED_FAILURES: Final = 12
_MAX_CELL_CHARACTERS: Final = 60


def write_outputs(folder: Path, log: Path | None, prices: Prices | None = None) -> Results:
    """Write the table, the plots and the report of a folder's results, each file atomically.

    Args:
        folder: the folder of an evaluation.
        log: the run log, for the command that opens a run.
        prices: the prices of tokens, if known.

    Raises:
        EvaluationError: there are no results, or a file cannot be written.
        MissingExtraError: the extra "eval" is not installed.
    """
    results = load_results(folder)
    if results.rows:
        write_table(results, folder / TABLE)
        report = render_report(results, plots=draw_all(results, folder), log=log, prices=prices)
        with translate_write_errors(folder / REPORT):
            write_atomically(folder / REPORT, report)
    return results


def render_report(
    results: Results, *, plots: Sequence[Path] = (), log: Path | None = None, prices: Prices | None = None
) -> str:
    """Return all tables of an evaluation.

    Args:
        results: the results.
        plots: image files to show, with their paths in the report.
        log: the run log, for the command that opens a run.
        prices: the prices of tokens, if known.
    """
    rows = results.rows
    if not rows:
        return "# Evaluation\n\nNo question has been answered yet.\n"
    parts = ["# Evaluation", _format_introduction(results)]
    parts += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in plots]
    parts += ["## Systems side by side", STANDINGS_LEGEND, format_standings(compare_systems(results))]
    if scored_rows := [row for row in rows if not row.scripted]:
        graders = sorted({row.judge for row in rows if row.judge})
        legend = f"{_LEGEND} Judge: the mean grade of {', '.join(graders)}." if graders else _LEGEND
        parts += ["## Accuracy", legend, *format_suites(scored_rows)]
    for title, unit, group in _group_by_task(scored_rows):
        parts += [f"### {title}", _format_accuracy(group, unit)]
    if repeats_table := _format_repeats(scored_rows):
        parts += ["## Repeated samples", _REPEATS_LEGEND, repeats_table]
    parts += ["## Cost per question", *_format_costs(rows, prices), *_format_failures(rows, log)]
    return "\n\n".join(parts) + "\n"


def render_comparison(first: Results, second: Results, names: tuple[str, str]) -> str:
    """Return the standings of two evaluations on the questions that both asked.

    Raises:
        EvaluationError: like `compare_evaluations`.
    """
    by_system = compare_evaluations(first, second, names)
    first_keys, second_keys = ({(row.system, row.attempt_key) for row in results.rows} for results in (first, second))
    question_counts = (
        f"{format_count(len(first_keys & second_keys), 'question')} in both; "
        f"{format_count(len(first_keys ^ second_keys), 'row')} without a partner."
    )
    parts = [f"# {names[0]} and {names[1]}", question_counts, STANDINGS_LEGEND]
    for system, standings in by_system.items():
        parts += [f"## {system}", format_standings(standings)]
    return "\n\n".join(parts) + "\n"


def summarise(results: Results, prices: Prices | None = None) -> list[dict[str, Any]]:
    """Return accuracy and costs by system, task and length, JSON-ready.

    Means are over the questions that neither failed nor were too long to be asked; None if there are none. Scores are
    also None if nothing fitted.
    """
    return [
        {
            "system": system,
            "task": task,
            "length": length,
            "unit": unit,
            "n": len(rows),
            "scores": {
                name: None if (score := compute_accuracy(rows, name)) is None else asdict(score)
                for name in list_score_titles(rows)
            },
            "pass_at": {
                score: {k: asdict(value) for k, value in values.items()}
                for score in _REPEATED_SCORES
                if (values := estimate_pass_at_k(rows, score))
            },
            "outcomes": dict(Counter(row.outcome for row in rows)),
            **_compute_costs(rows, prices),
        }
        for (system, task, unit, length), rows in group_items(
            results.rows, lambda row: (row.system, row.task, row.unit, row.length)
        )
    ]


def find_percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that the given percentage of the values does not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def estimate_pass_at_k(rows: Sequence[ResultRow], score: str) -> dict[int, Estimate]:
    """Return pass@k by k (1, 2, 4 and so on, and the number of samples); empty if questions have one sample each.

    Args:
        rows: the rows of one system, task and length.
        score: "strict" or "lenient".
    """
    questions = [group for _, group in group_items(rows, lambda row: row.sample_id)]
    min_samples = min(map(len, questions))
    if min_samples < 2 or all(row.outcome is QuestionOutcome.DOES_NOT_FIT for row in rows):
        return {}
    counts = [(sum(getattr(row, score) == 1 for row in group), len(group)) for group in questions]
    clusters = [group[0].cluster for group in questions]
    powers = (1 << power for power in range(min_samples.bit_length()))
    return {
        k: estimate([pass_at_k(correct, total, k) for correct, total in counts], clusters=clusters)
        for k in sorted({*powers, min_samples})
    }


def _format_introduction(results: Results) -> str:
    statements = [f"{format_count(len(results.rows), 'attempt')} of {', '.join(results.systems)}"]
    policy = results.settings.get("policy")
    if isinstance(policy, dict) and (model := policy.get("model")):
        statements.append(f"policy {model}")
    text = "; ".join([*statements, f"evaluation {results.evaluation_id}"]) + "."
    if results.missing:
        text += f"\n\n**Not finished: {format_count(results.missing, 'question')} not asked yet.**"
    if results.commands:
        text += "\n\n```\n" + "\n".join(results.commands) + "\n```"
    return text


def _group_by_task(rows: Sequence[ResultRow]) -> list[tuple[str, str, list[ResultRow]]]:
    """Return title, unit and rows of each table of accuracy: each task, and all if every system was asked the same."""
    groups = [(task, unit, group) for (task, unit), group in group_items(rows, lambda row: (row.task, row.unit))]
    for unit, group in group_items(rows, lambda row: row.unit):
        if len({row.task for row in group}) > 1 and can_be_pooled(group):
            groups.insert(0, (f"All tasks, by {unit}", unit, group))
    return groups


def _format_accuracy(rows: Sequence[ResultRow], unit: str) -> str:
    outcomes = [outcome for outcome in _OUTCOME_TITLES if any(row.outcome is outcome for row in rows)]
    titles = list_score_titles(rows)
    table = [[unit, "system", "n", *titles.values(), *(_OUTCOME_TITLES[outcome] for outcome in outcomes)]]
    for (length, system), group in group_items(rows, lambda row: (row.length, row.system)):
        counts = Counter(row.outcome for row in group)
        scores = [
            "–" if (score := compute_accuracy(group, name)) is None else format_interval(score) for name in titles
        ]
        outcome_counts = (f"{counts[outcome]}" for outcome in outcomes)
        table.append([format_length(length, unit), system, f"{len(group)}", *scores, *outcome_counts])
    return render_table(table)


def _format_repeats(rows: Sequence[ResultRow]) -> str:
    """Return pass@k of each system, task and length; empty if no answer has several samples."""
    cells_and_estimates = [
        (row_cells, score, len(group), estimates)
        for row_cells, group in group_items(rows, lambda row: (row.task, format_length_with_unit(row), row.system))
        for score in _REPEATED_SCORES
        if (estimates := estimate_pass_at_k(group, score))
    ]
    columns = sorted({k for *_, estimates in cells_and_estimates for k in estimates})
    table = [["task", "length", "system", "score", "questions", "samples", *(f"pass@{k}" for k in columns)]]
    for row_cells, score, sample_count, estimates in cells_and_estimates:
        cells = [format_interval(estimates[k]) if k in estimates else "" for k in columns]
        question_count = estimates[1].n
        table.append([*row_cells, SCORES[score], f"{question_count}", f"{sample_count // question_count}", *cells])
    return render_table(table) if cells_and_estimates else ""


def _format_costs(rows: Sequence[ResultRow], prices: Prices | None) -> list[str]:
    """Return the legend and the table, by length and system, over a system's questions that did not fail."""
    rows_with_costs = sorted((row for row in rows if row.has_costs), key=lambda row: (row.unit, row.length))
    percentile_titles = [f"p{percent}" for percent in _PERCENTILES]
    cost_titles = ["tokens in", "cached", "tokens out", "calls", "seconds", *percentile_titles]
    table = [["length", "system", *cost_titles, "FLOPs", "one call with all, FLOPs"]]
    table[0] += [] if prices is None else ["price", "price of all"]
    for (length, system), group in group_items(rows_with_costs, lambda row: (format_length_with_unit(row), row.system)):
        costs = _compute_costs(group, prices)
        means = [f"{costs['means'][name]:,.{digits}f}" for name, digits in _COST_DIGITS.items()]
        percentiles = [f"{seconds:,.2f}" for seconds in costs["seconds"].values()]
        flops = [_format_mean_flops(group, name) for name in ("flops", "full_context_flops")]
        price = [] if prices is None else [_format_price(costs["price"]), _format_price(costs["price"] * len(group))]
        table.append([length, system, *means, *percentiles, *flops, *price])
    legend = _COST_LEGEND
    if prices is not None:
        legend += " " + _PRICE_LEGEND.format(prompt=prices.prompt, completion=prices.completion)
    return [legend, render_table(table)]


def _compute_costs(rows: Iterable[ResultRow], prices: Prices | None) -> dict[str, Any]:
    """Return means, percentiles of seconds, and the mean price, over the rows with costs; None if there are none."""
    rows_with_costs = [row for row in rows if row.has_costs]
    seconds = [row.seconds for row in rows_with_costs]
    costs: dict[str, Any] = {
        "means": {
            name: fmean(getattr(row, name) for row in rows_with_costs) if rows_with_costs else None
            for name in _COST_DIGITS
        },
        "seconds": {
            f"p{percent}": find_percentile(seconds, percent) if rows_with_costs else None for percent in _PERCENTILES
        },
    }
    if prices is not None:
        costs["price"] = (
            fmean(prices.cost(row.prompt_tokens, row.completion_tokens) for row in rows_with_costs)
            if rows_with_costs
            else None
        )
    return costs


def _format_price(value: float) -> str:
    return f"{value:,.2f}" if value >= 100 else f"{value:.4g}"


def _format_mean_flops(rows: Iterable[ResultRow], name: str) -> str:
    flops = [value for row in rows if (value := getattr(row, name)) is not None]
    return f"{fmean(flops):.2e}" if flops else "–"


def _format_failures(rows: Sequence[ResultRow], log: Path | None) -> list[str]:
    """Return tables of the facts that wrong answers lost, and of failures; systems without memories are left out."""
    wrong_rows = [row for row in rows if set(row.where_lost) - {Loss.NOT_APPLICABLE.value}]
    failed_rows = [row for row in rows if row.outcome is QuestionOutcome.FAILED]
    parts: list[str] = []
    if wrong_rows:
        losses = [kind for kind in Loss if any(kind.value in row.where_lost for row in wrong_rows)]
        table = [["system", "task", "length", "wrong answers", *(kind.value.replace("_", " ") for kind in losses)]]
        for cell, group in group_items(wrong_rows, lambda row: (row.system, row.task, format_length_with_unit(row))):
            counts = Counter(loss for row in group for loss in row.where_lost)
            table.append([*cell, f"{len(group)}", *(f"{counts[kind.value]}" for kind in losses)])
        parts += ["## Where facts were lost", "By needle, in wrong answers.", render_table(table)]
        table = [["system", "question", "gold", "answer", "lost", "run"]]
        for row in wrong_rows[:_MAX_LISTED_FAILURES]:
            gold, answer = _format_cell(", ".join(row.gold)), _format_cell(row.answer or "–")
            table.append([row.system, row.sample_id, gold, answer, _describe_losses(row), f"`{row.run_id}`"])
        option = f" --log {shlex.quote(str(log))}" if log is not None else ""
        parts += [
            f"The first {len(table) - 1} of {len(wrong_rows)}; `memagent show RUN{option}` opens one:",
            render_table(table),
        ]
    if failed_rows:
        # Messages with different runs, branches and chunks are the same reason.
        reasons = Counter(_format_cell(_RUN_LOCATION.sub("", row.error or ""), 200) for row in failed_rows)
        lines = "\n".join(f"- {count}: {reason}" for reason, count in reasons.most_common(_MAX_LISTED_FAILURES))
        verb = "counts" if len(failed_rows) == 1 else "count"
        parts += [
            "## Failures",
            f"{format_count(len(failed_rows), 'question')} failed twice, and {verb} as wrong:\n\n{lines}",
        ]
    return parts


def _describe_losses(row: ResultRow) -> str:
    """Return the outcomes of a row's needles; repeated ones are counted."""
    losses = Counter(
        loss.replace("_", " ") + ("" if chunk is None else f" at chunk {chunk + 1}")
        for loss, chunk in zip(row.where_lost, row.lost_at, strict=True)
    )
    return ", ".join(loss if count == 1 else f"{loss} x {count}" for loss, count in losses.items())


def _format_cell(text: str, max_characters: int = _MAX_CELL_CHARACTERS) -> str:
    """Return a text as a cell of a table: one line, with Markdown's characters escaped."""
    return (
        make_one_line(text, max_characters)
        .replace("\\", "\\\\")
        .replace("|", "\\|")
        .replace("`", "'")
        .replace("<", "&lt;")
    )
