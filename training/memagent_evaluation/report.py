"""An evaluation as Markdown: accuracy with intervals, costs, comparisons of the systems, and what went wrong.

Nothing is left out of a denominator, and systems are ranked only if their difference is significant.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from memagent_evaluation.comparisons import accuracy, comparison_parts
from memagent_evaluation.cost_tables import cost_parts, costs_as_json
from memagent_evaluation.failures import Loss
from memagent_evaluation.markdown_tables import (
    SCORES,
    grouped,
    interval,
    is_prose,
    length_label,
    markdown,
    scores_shown,
)
from memagent_evaluation.repeated_samples import REPEATS_LEGEND, repeated, repeated_table
from memagent_evaluation.result_table import Outcome, Results, Row, can_be_pooled
from memagent_evaluation.standings import STANDINGS_LEGEND, standings, standings_table
from memagent_evaluation.statistics import Estimate
from memagent_evaluation.suites import suite_parts
from memagent_graph.plain_text import counted, in_one_line
from memagent_graph.prices import Prices

_LEGEND: Final = (
    "Percentages with 95 % intervals. Strict: the answer is the gold one, normalised, and in the form asked for. "
    "Lenient: it holds the gold one as whole words. String match: as RULER counts. A question without an answer is "
    "wrong in all of them; the reasons are counted separately."
)
_COUNTED_APART: Final = {
    Outcome.NO_ANSWER: "no answer",
    Outcome.UNFINISHED: "unfinished",
    Outcome.FAILED: "failed",
    Outcome.DOES_NOT_FIT: "does not fit",
}
_PLACE: Final = re.compile(r" \((?:run|branch|chunk) [^()]*\)")
"""The place in an error's message; see `MemAgentError`."""
_HEADLINE: Final = ("strict", "lenient", "string_match")
"""Scores in the overview: ours, and RULER's."""
_SHOWN_FAILURES: Final = 12
_SHOWN_CHARACTERS: Final = 60


def render_report(
    results: Results, *, plots: Sequence[Path] = (), log: Path | None = None, prices: Prices | None = None
) -> str:
    """All tables of an evaluation.

    Args:
        results: the results.
        plots: image files to show, with their paths in the report.
        log: the run log, for the command that opens a run.
        prices: of tokens, if known.
    """
    rows = results.rows
    if not rows:
        return "# Evaluation\n\nNo question has been answered yet.\n"
    parts = ["# Evaluation", _introduction(results)]
    parts += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in plots]
    parts += ["## Systems side by side", STANDINGS_LEGEND, standings_table(standings(results))]
    if scored := [row for row in rows if not row.scripted]:
        parts += ["## Accuracy", _legend(scored), *suite_parts(scored), *filter(None, [_overview(scored)])]
    for (task, unit), group in grouped(scored, lambda row: (row.task, row.unit)):
        parts += [f"### {task}", _accuracy_table(group, unit)]
    if samples := repeated(scored):
        parts += ["## Repeated samples", REPEATS_LEGEND, repeated_table(samples)]
    parts += ["## Cost per question", *cost_parts(rows, prices)]
    if len({row.system for row in scored}) > 1:
        parts += ["## Comparison", *comparison_parts(results)]
    parts += _failures(rows, log)
    return "\n\n".join(parts) + "\n"


def summary(results: Results, prices: Prices | None = None) -> list[dict[str, Any]]:
    """Accuracy and costs by system, task and length, JSON-ready.

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
            "scores": {name: _accuracy(rows, name) for name in scores_shown(rows)},
            "pass_at": {each.score: {k: asdict(one) for k, one in each.pass_at.items()} for each in repeated(rows)},
            "outcomes": dict(Counter(row.outcome for row in rows)),
            **costs_as_json(rows, prices),
        }
        for (system, task, unit, length), rows in grouped(
            results.rows, lambda row: (row.system, row.task, row.unit, row.length)
        )
    ]


def _accuracy(rows: Sequence[Row], score: str) -> dict[str, Any] | None:
    return None if (found := _scored(rows, score)) is None else asdict(found)


def _scored(rows: Sequence[Row], score: str) -> Estimate | None:
    """None if nothing fitted, or if not all rows have that score, for example before a judge has graded all."""
    if all(row.outcome is Outcome.DOES_NOT_FIT for row in rows) or any(getattr(row, score) is None for row in rows):
        return None
    return accuracy(rows, score)


def _legend(rows: Sequence[Row]) -> str:
    graders = sorted({row.judge for row in rows if row.judge})
    judged = f" Judge: the mean grade of {', '.join(graders)}." if graders else ""
    return _LEGEND + (" ROUGE-L: F1 over the longest common subsequence of words." if is_prose(rows) else "") + judged


def _introduction(results: Results) -> str:
    rows = results.rows
    told = [f"{counted(len(rows), 'attempt')} of {', '.join(results.systems)}"]
    model = results.settings.get("policy", {}).get("model")
    if model:
        told.append(f"policy {model}")
    told.append(f"evaluation {results.evaluation}")
    text = "; ".join(told) + "."
    if results.missing:
        text += f"\n\n**Not finished: {results.missing:,} questions have not been asked yet.**"
    if results.commands:
        text += "\n\n```\n" + "\n".join(results.commands) + "\n```"
    return text


def _overview(rows: Sequence[Row]) -> str:
    """Three scores of each system at each length, over all tasks if these are the same everywhere.

    That means for every system and at every length: systems are compared on the same tasks.
    """
    parts = []
    for unit, group in grouped(rows, lambda row: row.unit):
        if not can_be_pooled(group):
            continue
        lengths = sorted({row.length for row in group})
        cells = {key: each for key, each in grouped(group, lambda row: (row.system, row.length))}  # noqa: C416
        table = [
            [
                " / ".join(SCORES[name] for name in _HEADLINE),
                *(f"{length_label(each, unit)} {unit}" for each in lengths),
            ]
        ]
        for system in dict.fromkeys(row.system for row in group):
            table.append([system, *(_headline(cells.get((system, each), [])) for each in lengths)])
        parts.append(markdown(table))
    return "\n\n".join(parts)


def _headline(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    if all(row.outcome is Outcome.DOES_NOT_FIT for row in rows):
        return "does not fit"
    return " / ".join(f"{100 * fmean(getattr(row, name) for row in rows):.1f}" for name in _HEADLINE)


def _accuracy_table(rows: Sequence[Row], unit: str) -> str:
    apart = [each for each in _COUNTED_APART if any(row.outcome is each for row in rows)]
    shown = scores_shown(rows)
    table = [[unit, "system", "n", *shown.values(), *(_COUNTED_APART[each] for each in apart)]]
    for (length, system), group in grouped(rows, lambda row: (row.length, row.system)):
        counts = Counter(row.outcome for row in group)
        scores = ["–" if (one := _scored(group, name)) is None else interval(one) for name in shown]
        table.append(
            [length_label(length, unit), system, f"{len(group)}", *scores, *(f"{counts[each]}" for each in apart)]
        )
    return markdown(table)


def _failures(rows: Sequence[Row], log: Path | None) -> list[str]:
    """Where wrong answers lost their facts, and how to look at them; systems without memories are left out."""
    wrong = [row for row in rows if set(row.where_lost) - {Loss.NOT_APPLICABLE.value}]
    failed = [row for row in rows if row.outcome is Outcome.FAILED]
    parts: list[str] = []
    if wrong:
        kinds = [kind for kind in Loss if any(kind.value in row.where_lost for row in wrong)]
        table = [["system", "task", "length", "wrong answers", *(kind.value.replace("_", " ") for kind in kinds)]]
        cells_of = grouped(wrong, lambda row: (row.system, row.task, row.unit, row.length))
        for (system, task, unit, length), group in cells_of:
            counts = Counter(each for row in group for each in row.where_lost)
            cells = [f"{counts[kind.value]}" for kind in kinds]
            table.append([system, task, f"{length_label(length, unit)} {unit}", f"{len(group)}", *cells])
        parts += ["## Where facts were lost", "By needle, in wrong answers.", markdown(table)]
        table = [["system", "question", "gold", "answer", "lost", "run"]]
        for row in wrong[:_SHOWN_FAILURES]:
            gold, answer = _short(", ".join(row.gold)), _short(row.answer or "–")
            table.append([row.system, row.sample_id, gold, answer, _losses(row), f"`{row.run_id}`"])
        option = f" --log {shlex.quote(str(log))}" if log is not None else ""
        parts += [
            f"The first {len(table) - 1} of {len(wrong)}; `memagent show RUN{option}` opens one:",
            markdown(table),
        ]
    if failed:
        reasons = Counter(_short(_without_place(row.error or ""), 200) for row in failed)
        lines = "\n".join(f"- {count}: {reason}" for reason, count in reasons.most_common(_SHOWN_FAILURES))
        told = (
            "1 question failed twice, and counts"
            if len(failed) == 1
            else f"{len(failed):,} questions failed twice, and count"
        )
        parts += ["## Failures", f"{told} as wrong:\n\n{lines}"]
    return parts


def _without_place(error: str) -> str:
    """A message without run, branch and chunk, which differ at every question."""
    return _PLACE.sub("", error)


def _losses(row: Row) -> str:
    """The outcomes of a row's needles; equal ones are counted."""
    fates = Counter(
        loss.replace("_", " ") + ("" if chunk is None else f" at chunk {chunk}")
        for loss, chunk in zip(row.where_lost, row.lost_at, strict=True)
    )
    return ", ".join(fate if number == 1 else f"{fate} x {number}" for fate, number in fates.items())


def _short(text: str, longest: int = _SHOWN_CHARACTERS) -> str:
    """A text as a cell of a table: one line, with Markdown's characters escaped."""
    return in_one_line(text, longest).replace("\\", "\\\\").replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
