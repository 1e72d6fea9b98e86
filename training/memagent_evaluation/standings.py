"""Systems compared: accuracy, the difference from the first, costs, and what early stops saved or lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from memagent_evaluation.comparisons import accuracy, paired, rows_by_system, shared_rows
from memagent_evaluation.markdown_tables import grouped, interval, labelled, markdown
from memagent_evaluation.paired_tests import MARGIN, Comparison, corrected
from memagent_evaluation.result_table import Outcome, Results, Row, can_be_pooled
from memagent_evaluation.statistics import Estimate

STANDINGS_LEGEND: Final = (
    "Lenient accuracy with its 95 % interval, clustered by document where questions share one. Difference: to the "
    "first system, in points, on the questions that both were asked and that fit both; p corrected for all "
    f"comparisons of the table (Holm). Not worse: the interval's lower end lies above -{100 * MARGIN:g} points. Costs "
    "are means per question. Turns: replies that had to wait for each other. Stopped early: the share of questions at "
    "which evidence was left unread; lost by it: the points of accuracy that these cost at most. Over-read: document "
    "tokens read beyond one reading up to the last evidence. Saving: the share of what a reader could save that stops "
    "exactly after the last evidence; an early stop saves nothing. –: unknown, for example if the whole document "
    "counts."
)
SCRIPTED: Final = "scripted"
"""Shown instead of the accuracy of a scripted policy."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One system at one task and length, or over all of them. Means are per question; None if unknown."""

    system: str
    task: str
    """The task's name, or "all"."""
    length: str
    """With its unit, or "all"."""
    n: int
    documents: int
    scripted: bool
    accuracy: Estimate | None
    """Lenient; documents that did not fit count as wrong; None for a script, and if nothing fitted."""
    against_first: Comparison | None
    """This system, then the first."""
    prompt_tokens: float | None
    completion_tokens: float | None
    cached_share: float | None
    """The share of prompt tokens from the server's prefix cache."""
    turns: float | None
    seconds: float | None
    premature: float | None
    """The share of reads that ended before all evidence was read."""
    lost_early: float | None
    """The regret in accuracy: the mean score that such reads lost. The oracle, which stops exactly after the last
    evidence, gains at most this much."""
    over_read: float | None
    """The regret in tokens: those of the document beyond the oracle's."""
    saving: float | None
    """The share of the possible saving that was achieved; reads that ended too early achieve none."""

    @property
    def not_worse(self) -> bool | None:
        """Whether it is not worse than the first system by 3 points."""
        return self.against_first.not_worse() if self.against_first is not None else None


def standings(results: Results) -> list[Standing]:
    """All systems at each task and length, then over all, if these are the same for every system."""
    cells = grouped(results.rows, lambda row: (row.task, labelled(row)))
    parts = [(task, length, rows) for (task, length), rows in cells]
    if len(parts) > 1 and len({row.unit for row in results.rows}) == 1 and _asked_alike(results.rows):
        parts.append(("all", "all", list(results.rows)))
    found = [each for part in parts for each in _standings(*part, results.systems[0])]
    told = [at for at, each in enumerate(found) if each.against_first is not None]
    for at, one in zip(told, corrected([c for at in told if (c := found[at].against_first)]), strict=True):
        found[at] = replace(found[at], against_first=one)
    return found


def standings_table(found: Sequence[Standing]) -> str:
    """Standings in Markdown."""
    return markdown(standings_cells(found))


def standings_cells(found: Sequence[Standing]) -> list[list[str]]:
    """Standings as rows of cells, the first of them the header; columns without a value for any system are left out."""
    columns: dict[str, Callable[[Standing], str]] = {
        "task": lambda each: each.task,
        "length": lambda each: each.length,
        "system": lambda each: each.system,
        "n (documents)": lambda each: f"{each.n}" + (f" ({each.documents})" if each.documents < each.n else ""),
        "accuracy": lambda each: SCRIPTED if each.scripted else interval(each.accuracy) if each.accuracy else "–",
        "difference": lambda each: each.against_first.points if each.against_first else "",
        "p": lambda each: each.against_first.p if each.against_first else "",
        "not worse": lambda each: {None: "", True: "yes", False: "not shown"}[each.not_worse],
        "tokens in": lambda each: _number(each.prompt_tokens),
        "cached": lambda each: _percent(each.cached_share),
        "tokens out": lambda each: _number(each.completion_tokens),
        "turns": lambda each: _number(each.turns, 1),
        "seconds": lambda each: _number(each.seconds, 2),
        "stopped early": lambda each: _percent(each.premature),
        "lost by it": lambda each: _number(None if each.lost_early is None else 100 * each.lost_early, 1),
        "over-read": lambda each: _number(each.over_read),
        "saving": lambda each: _percent(each.saving),
    }
    cells = {name: [told(each) for each in found] for name, told in columns.items()}
    shown = [name for name, column in cells.items() if any(each not in {"", "–"} for each in column)]
    return [shown, *([cells[name][at] for name in shown] for at in range(len(found)))]


def _standings(task: str, length: str, rows: Sequence[Row], first: str) -> Iterable[Standing]:
    of = rows_by_system(row for row in rows if not row.scripted)
    for system, own in grouped(rows, lambda row: row.system):
        asked = [row for row in own if row.has_costs]
        fits = any(row.outcome is not Outcome.DOES_NOT_FIT for row in own)
        mine, theirs = shared_rows(of.get(system, {}), of.get(first, {}))
        stops = [row for row in asked if row.premature is not None]
        prompt = _mean(row.prompt_tokens for row in asked)
        scripted = any(row.scripted for row in own)
        yield Standing(
            system=system,
            task=task,
            length=length,
            n=len({row.sample_id for row in own}),
            documents=len({row.cluster for row in own}),
            scripted=scripted,
            accuracy=accuracy(own, "lenient") if fits and not scripted else None,
            against_first=paired(mine, theirs, (system, first), "lenient") if mine and system != first else None,
            prompt_tokens=prompt,
            completion_tokens=_mean(row.completion_tokens for row in asked),
            cached_share=(_mean(row.cached_tokens for row in asked) or 0.0) / prompt if prompt else None,
            turns=_mean(row.turns for row in asked),
            seconds=_mean(row.seconds for row in asked),
            premature=_mean(row.premature for row in stops),
            lost_early=None if scripted else _mean((1 - row.lenient) * bool(row.premature) for row in stops),
            over_read=_mean(row.over_read_tokens for row in stops),
            saving=_captured(stops),
        )


def _asked_alike(rows: Sequence[Row]) -> bool:
    """Whether every system was asked the same tasks at the same lengths: otherwise means over all are not
    comparable.
    """
    cells = [{(row.task, row.length) for row in own} for _, own in grouped(rows, lambda row: row.system)]
    return can_be_pooled(rows) and all(each == cells[0] for each in cells)


def _captured(rows: Sequence[Row]) -> float | None:
    """The achieved share of the possible saving."""
    possible = [row.could_save or 0.0 for row in rows]
    got = (0.0 if row.premature else min(row.saved or 0.0, row.could_save or 0.0) for row in rows)
    return sum(got) / sum(possible) if sum(possible) else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return fmean(known) if known else None


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"
