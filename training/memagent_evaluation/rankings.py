"""Ranks systems as far as their differences are significant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memagent_evaluation.paired_tests import Comparison, corrected


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
            apart = [
                f"{ahead} is better than {behind}" for ahead, behind in self._decided if {ahead, behind} <= {*group}
            ]
            but = f", but {', '.join(apart)}" if apart else ""
            shared = "" if len(group) == 1 else f" (not distinguishable as a group{but})"
            lines.append(f"{places} {', '.join(group)}{shared}")
            place = last + 1
        return tuple(lines)

    @property
    def _decided(self) -> list[tuple[str, str]]:
        """The pairs with a significant difference, the better one first."""
        apart = [each for each in self.comparisons if each.is_significant]
        return [(each.first, each.second) if each.difference > 0 else (each.second, each.first) for each in apart]


def ranking_of(names: Iterable[str], raw: Sequence[Comparison]) -> Ranking:
    """Rank systems as far as their differences are significant.

    One group stands before another only if every system of the one is better than every system of the other, by the
    paired test with Holm's correction over all pairs. Inside a group some pairs may still differ significantly:
    `comparisons` has them.

    Args:
        names: the systems.
        raw: the comparisons of all pairs that share questions; their p-values are corrected here.
    """
    names = list(names)
    comparisons = corrected(raw)
    beats = set(Ranking((), comparisons)._decided)
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
