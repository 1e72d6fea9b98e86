"""Compares two systems on the same questions: the difference, its interval, and a p-value. Needs SciPy (extra "eval").

The p-value comes from the sign-flip test: how probable is so large a difference if the two systems were swapped at
random, question by question? For scores of 0 and 1 this is the exact McNemar test. If questions share documents, the
systems are swapped for whole documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from memagent_evaluation.statistics import (
    check_scores,
    compute_bootstrap_interval,
    compute_wilson_interval,
    sign_flip_p_value,
    sum_clusters,
)
from memagent_graph.errors import EvaluationError

MARGIN: Final = 0.03
"""A system that is worse by less than this, 3 points, counts as not worse."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two systems on the same questions."""

    first: str
    second: str
    n: int
    """The number of questions."""
    first_mean: float
    second_mean: float
    low: float
    """The lower end of the interval of the difference, first minus second."""
    high: float
    p_value: float
    corrected_for: int = 1
    """The number of comparisons that the p-value has been corrected for."""
    documents: int | None = None
    """The number of documents, if questions share some."""

    @property
    def difference(self) -> float:
        """First minus second."""
        return self.first_mean - self.second_mean

    @property
    def points(self) -> str:
        """The difference and its interval in points, for tables."""
        return f"{100 * self.difference:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"

    @property
    def p(self) -> str:
        """The p-value, for tables."""
        return "< 0.001" if self.p_value < 0.001 else f"{self.p_value:.3f}"

    @property
    def is_not_worse(self) -> bool:
        """Whether the interval excludes that the first is worse than the second by `MARGIN` or more."""
        return self.low > -MARGIN


def compare(
    first: Mapping[str, float],
    second: Mapping[str, float],
    *,
    names: tuple[str, str] = ("the first", "the second"),
    clusters: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare two systems' 0..1 scores, by sample id. Swapping the systems changes all signs and nothing else.

    The interval is Newcombe's for scores of 0 and 1 on separate documents, otherwise a bootstrap interval.

    Args:
        first: the scores of one system.
        second: the scores of the other system on the same samples.
        names: the names of the systems.
        clusters: the document of each sample; every sample has its own if None.

    Raises:
        EvaluationError: the systems did not have the same questions, or a score is not 0 to 1.
        MissingExtraError: SciPy is not installed.
    """
    if first.keys() != second.keys():
        unpaired = sorted(first.keys() ^ second.keys())
        raise EvaluationError(
            f"{names[0]} and {names[1]} were not asked the same questions: {len(unpaired)} have one score, such as "
            f"{unpaired[0]}",
            hint="Compare on the samples that both have, and count failed reads as 0 instead of leaving them out.",
        )
    ids = sorted(first)
    pairs = [(first[sample_id], second[sample_id]) for sample_id in ids]
    scores = [score for pair in pairs for score in pair]
    check_scores(scores)
    sums, counts = sum_clusters([a - b for a, b in pairs], [(clusters or {}).get(name, name) for name in ids])
    if len(sums) == len(ids) and set(scores) <= {0.0, 1.0}:
        low, high = compute_newcombe_interval(*(pairs.count(pair) for pair in ((1, 1), (1, 0), (0, 1), (0, 0))))
    else:
        low, high = compute_bootstrap_interval(sums, (-1.0, 1.0), counts)
    first_mean, second_mean = (math.fsum(column) / len(ids) for column in zip(*pairs, strict=True))
    documents = len(sums) if len(sums) < len(ids) else None
    return Comparison(
        *names, len(ids), first_mean, second_mean, low, high, sign_flip_p_value(sums), documents=documents
    )


def compute_newcombe_interval(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """Return the interval of the difference of two paired proportions, from the counts of right answers.

    Newcombe 1998, Statistics in Medicine 17, method 10: Wilson's intervals of both proportions, squared and added with
    their correlation. It keeps its confidence if few questions differ, and at proportions of 0 and 1.
    """
    n = both + only_first + only_second + neither
    first = compute_wilson_interval(both + only_first, n)
    second = compute_wilson_interval(both + only_second, n)
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    product = both * neither - only_first * only_second
    phi = (max(product - n / 2, 0.0) if product > 0 else product) / math.sqrt(margins) if margins else 0.0

    def combine(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    difference = (only_first - only_second) / n
    below = combine(first.mean - first.low, second.high - second.mean)
    above = combine(first.high - first.mean, second.mean - second.low)
    return max(-1.0, difference - below), min(1.0, difference + above)


def correct_by_holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Return p-values corrected by Holm's method: compared with one level, they keep the family-wise error below it."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return tuple(corrected)


def correct_p_values(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return comparisons with p-values corrected for their number (Holm)."""
    p_values = correct_by_holm([comparison.p_value for comparison in comparisons])
    return tuple(
        replace(comparison, p_value=p_value, corrected_for=len(comparisons))
        for comparison, p_value in zip(comparisons, p_values, strict=True)
    )
