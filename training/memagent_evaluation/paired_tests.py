"""Two systems on the same questions: the difference, its interval, and whether a test finds it significant.

The exact McNemar test for scores of 0 and 1, the sign-flip test for others. Both ask how probable such a difference is
if the two systems could be swapped at every question; McNemar's is the sign-flip test of scores that are 0 or 1. If
questions share a document, the systems are swapped for whole documents. They need the extra "eval" (SciPy).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from memagent_evaluation.statistics import (
    bootstrap_interval,
    by_cluster,
    check_scores,
    scipy_stats,
    sign_flip_p_value,
    wilson,
)
from memagent_graph.errors import EvaluationError

MARGIN: Final = 0.03
"""How much worse a system may be and still count as not worse: 3 points."""


class Test(StrEnum):
    """How a p-value was found."""

    __test__ = False  # pytest would collect a class named Test

    MCNEMAR = "exact McNemar"
    """For scores of 0 or 1: a binomial test on the questions that only one system has right."""
    SIGN_FLIP = "sign flips"
    """For fractional scores: the signs of the differences, flipped in all ways, or in 9,999 random ones."""
    BY_DOCUMENT = "sign flips by document"
    """If questions share documents: the signs of all differences of a document, flipped together."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two systems on the same questions."""

    first: str
    second: str
    n: int
    first_mean: float
    second_mean: float
    low: float
    """The interval of the difference, first minus second."""
    high: float
    p_value: float
    test: Test
    only_first: int
    """At how many questions the first has the higher score."""
    only_second: int
    corrected_for: int = 1
    """For how many comparisons the p-value has been corrected."""
    documents: int | None = None
    """On how many documents the questions are, if some share one."""

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

    def not_worse(self) -> bool:
        """Return whether the first is not worse than the second by `MARGIN`: the interval's lower end decides."""
        return self.low > -MARGIN


def compare(
    first: Mapping[str, float],
    second: Mapping[str, float],
    *,
    names: tuple[str, str] = ("the first", "the second"),
    clusters: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare two systems' 0..1 scores, by sample id.

    Scores of 0 and 1: the exact McNemar test, and Newcombe's interval for a difference of paired shares. Others: the
    sign-flip test, and a bootstrap interval over the questions. Where questions share documents: both of these, over
    the documents. Swapping the systems changes all signs and nothing else.

    Args:
        first: one system's scores.
        second: the other's, of the same samples.
        names: of the systems.
        clusters: the document of each sample; one for each if left out.

    Raises:
        EvaluationError: the systems did not have the same questions, or a score is not 0 to 1.
        MissingExtraError: SciPy is not installed.
    """
    if first.keys() != second.keys():
        odd = sorted(first.keys() ^ second.keys())
        raise EvaluationError(
            f"{names[0]} and {names[1]} were not asked the same questions: {len(odd)} have one score, such as {odd[0]}",
            hint="Compare on the samples that both have, and count failed reads as 0 instead of leaving them out.",
        )
    ids = sorted(first)
    a, b = [first[sample_id] for sample_id in ids], [second[sample_id] for sample_id in ids]
    check_scores(a)
    check_scores(b)
    only_first = sum(x > y for x, y in zip(a, b, strict=True))
    only_second = sum(x < y for x, y in zip(a, b, strict=True))
    documents = [clusters[sample_id] for sample_id in ids] if clusters is not None else ids
    shared = len(set(documents)) if len(set(documents)) < len(ids) else None
    if shared is not None:
        sums, counts = by_cluster([x - y for x, y in zip(a, b, strict=True)], documents)
        low, high = bootstrap_interval(sums, (-1.0, 1.0), counts)
        p_value, test = sign_flip_p_value(sums), Test.BY_DOCUMENT
    elif set(a) | set(b) <= {0.0, 1.0}:
        both = round(math.fsum(a)) - only_first
        low, high = newcombe(both, only_first, only_second, len(ids) - both - only_first - only_second)
        p_value, test = mcnemar(only_first, only_second), Test.MCNEMAR
    else:
        differences = [x - y for x, y in zip(a, b, strict=True)]
        low, high = bootstrap_interval(differences, (-1.0, 1.0))
        p_value, test = sign_flip_p_value(differences), Test.SIGN_FLIP
    means = math.fsum(a) / len(ids), math.fsum(b) / len(ids)
    return Comparison(*names, len(ids), *means, low, high, p_value, test, only_first, only_second, documents=shared)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of the exact McNemar test, from how many questions only one system has right.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    differing = only_first + only_second
    return float(scipy_stats().binomtest(only_first, differing, 0.5).pvalue) if differing else 1.0


def newcombe(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """Return the interval of a difference of paired shares: square and add Wilson's, with their correlation.

    Newcombe 1998, Statistics in Medicine 17, method 10: it keeps its confidence where few questions differ, and at
    shares of 0 and 1.
    """
    n = both + only_first + only_second + neither
    first = wilson(both + only_first, n)
    second = wilson(both + only_second, n)
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    product = both * neither - only_first * only_second
    phi = (max(product - n / 2, 0.0) if product > 0 else product) / math.sqrt(margins) if margins else 0.0

    def reach(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    difference = (only_first - only_second) / n
    below = reach(first.mean - first.low, second.high - second.mean)
    above = reach(first.high - first.mean, second.mean - second.low)
    return max(-1.0, difference - below), min(1.0, difference + above)


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's correction: p-values which, compared with one level, keep the chance of any false find below it."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = largest
    return tuple(adjusted)


def correct_for_number(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Comparisons with p-values corrected for their number (Holm)."""
    p_values = holm([comparison.p_value for comparison in comparisons])
    number = len(comparisons)
    return tuple(
        replace(comparison, p_value=p, corrected_for=number)
        for comparison, p in zip(comparisons, p_values, strict=True)
    )
