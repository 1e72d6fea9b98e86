"""Ranks systems as far as their differences are significant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from memagent_graph.errors import EvaluationError
from memagent_graph.evaluation.paired_tests import Comparison, compare, corrected
from memagent_graph.evaluation.resampling import RESAMPLES
from memagent_graph.evaluation.statistics import check_scores


@dataclass(frozen=True, slots=True)
class Ranking:
    """Systems in groups, best first; no order is claimed inside a group."""

    groups: tuple[tuple[str, ...], ...]
    """Names, in alphabetical order inside each group."""
    comparisons: tuple[Comparison, ...]
    """All pairs that share questions, with p-values corrected for their number (Holm)."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The ranking as text: places, and which systems share them."""
        lines, place = [], 1
        for group in self.groups:
            last = place + len(group) - 1
            places = f"{place}." if len(group) == 1 else f"{place}. to {last}."
            apart = [f"{ahead} is better than {behind}" for ahead, behind in self._told if {ahead, behind} <= {*group}]
            but = f", but {', '.join(apart)}" if apart else ""
            shared = "" if len(group) == 1 else f" (not distinguishable as a group{but})"
            lines.append(f"{places} {', '.join(group)}{shared}")
            place = last + 1
        return tuple(lines)

    @property
    def _told(self) -> list[tuple[str, str]]:
        """The pairs with a significant difference, the better one first."""
        told = [each for each in self.comparisons if each.told_apart]
        return [(each.first, each.second) if each.difference > 0 else (each.second, each.first) for each in told]


def ranked(
    scores: Mapping[str, Mapping[str, float]],
    *,
    clusters: Mapping[str, str] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Ranking:
    """Rank systems as far as their differences are significant, each pair on the questions that both were asked.

    One group stands before another only if every system of the one is better than every system of the other, by the
    paired test with Holm's correction over all pairs. Inside a group some pairs may still differ significantly:
    `comparisons` has them. Two that share no question are not compared.

    Args:
        scores: by system, then by sample id.
        clusters: the document of each sample; one for each if left out.
        confidence: one minus the probability of any false order.
        seed: of the resampling.
        resamples: how many.

    Raises:
        EvaluationError: no systems, one without scores, or a score that is not 0 to 1.
        MissingExtraError: SciPy is not installed.
    """
    if not scores:
        raise EvaluationError("there are no systems to rank", hint="Name at least one.")
    for name, given in scores.items():
        check_scores(list(given.values()), confidence, name)
    raw = []
    for x, y in combinations(sorted(scores, key=lambda name: (-fmean(scores[name].values()), name)), 2):
        if shared := [each for each in scores[x] if each in scores[y]]:
            one, other = ({each: scores[name][each] for each in shared} for name in (x, y))
            raw.append(
                compare(
                    one,
                    other,
                    names=(x, y),
                    clusters=clusters,
                    confidence=confidence,
                    seed=seed,
                    resamples=resamples,
                )
            )
    return ranking_of(scores, raw)


def ranking_of(names: Iterable[str], raw: Sequence[Comparison]) -> Ranking:
    """The ranking from comparisons of pairs, like `ranked`; their p-values are corrected here."""
    names = list(names)
    comparisons = corrected(raw)
    beats = set(Ranking((), comparisons)._told)
    # Means of different questions give no order. If every system of a group beats all others, its wins minus its losses
    # are more than theirs, so no such group is missed.
    won = {name: sum((name == x) - (name == y) for x, y in beats) for name in names}
    ordered = sorted(names, key=lambda name: (-won[name], name))
    groups: list[list[str]] = [[]]
    for at, name in enumerate(ordered):
        if at and all((before, after) in beats for before in ordered[:at] for after in ordered[at:]):
            groups.append([])
        groups[-1].append(name)
    return Ranking(tuple(tuple(sorted(group)) for group in groups), comparisons)
