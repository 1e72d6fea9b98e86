"""Uncertainty of measured scores: a mean with its interval, and how many questions a difference needs.

Scores are between 0 and 1. Scores that are only 0 or 1 are counted (Wilson's interval); others are resampled (bootstrap
intervals). If several questions share a document, their scores may be correlated: then documents are resampled, not
questions.

Counted intervals need only Python; resampling needs the extra "eval" (SciPy).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memagent_evaluation.resampling import RESAMPLES, bootstrapped_mean
from memagent_evaluation.sample_size import two_sided_quantile
from memagent_graph.errors import EvaluationError

_FEWEST_TO_RESAMPLE: Final = 10
"""Resampling fewer values gives intervals that are far too narrow."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean score with its interval. Times 100 it is in percent."""

    mean: float
    low: float
    high: float
    n: int
    """How many questions it is based on."""
    confidence: float = 0.95
    documents: int | None = None
    """On how many documents the questions are, if some share one."""

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def estimate(
    values: Sequence[float], *, clusters: Sequence[str] | None = None, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """The mean of 0..1 scores with its interval: Wilson's if all are 0 or 1, otherwise `mean_interval`'s.

    Args:
        values: the scores.
        clusters: the document of each. If some share one, documents are resampled: a bootstrap interval; with fewer
            than 10 documents Wilson's, as if there were only as many questions as documents.
        confidence: of the interval.
        seed: of the resampling.

    Raises:
        EvaluationError: no values, or some that are not 0 to 1.
    """
    check_scores(values, confidence)
    if clusters is not None and len(set(clusters)) < len(values):
        sums, counts = by_cluster(values, clusters)
        mean = math.fsum(values) / len(values)
        low, high = bootstrapped(sums, (0.0, 1.0), confidence, seed, RESAMPLES, counts)
        return Estimate(mean, low, high, len(values), confidence, len(sums))
    if set(values) <= {0.0, 1.0}:
        return wilson(round(sum(values)), len(values), confidence=confidence)
    return mean_interval(values, confidence=confidence, seed=seed)


def wilson(successes: float, n: int, *, confidence: float = 0.95) -> Estimate:
    """A share with Wilson's score interval, without continuity correction.

    `successes` may be a sum of fractional scores: these vary at most as much as 0 and 1 with the same mean, so the
    interval is then wider than necessary.

    Raises:
        EvaluationError: no questions, or not between 0 and n successes.
    """
    if n < 1 or not 0 <= successes <= n:
        raise EvaluationError(f"there is no share of {successes} successes in {n}", hint="Give 0 to n of at least 1.")
    z, share = two_sided_quantile(confidence), successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding must not move a bound past the share, or past 0 and 1, where they are at 0 and n successes.
    low = 0.0 if successes == 0 else min(max(centre - half, 0.0), share)
    high = 1.0 if successes == n else max(min(centre + half, 1.0), share)
    return Estimate(share, low, high, n, confidence)


def mean_interval(
    values: Sequence[float], *, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """The mean of 0..1 scores with a bootstrap interval: BCa, or percentiles where BCa is not defined.

    Fewer than 10 values say too little about their variance: they get `wilson`'s interval, which is safe. If all values
    are equal, the share of other values is bounded. Equal seeds give equal intervals.

    Raises:
        EvaluationError: no values, or some that are not 0 to 1.
        MissingExtraError: SciPy is not installed.
    """
    check_scores(values, confidence)
    mean = math.fsum(values) / len(values)
    low, high = bootstrapped(values, (0.0, 1.0), confidence, seed, resamples)
    return Estimate(mean, low, high, len(values), confidence)


def by_cluster(values: Sequence[float], clusters: Sequence[str]) -> tuple[list[float], list[int]]:
    """The sum of the values of each cluster, and how many they are."""
    found: dict[str, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        found.setdefault(cluster, []).append(value)
    return [math.fsum(each) for each in found.values()], [len(each) for each in found.values()]


def bootstrapped(
    sums: Sequence[float],
    bounds: tuple[float, float],
    confidence: float,
    seed: int,
    resamples: int,
    counts: Sequence[int] | None = None,
) -> tuple[float, float]:
    """The interval of a mean of values between bounds, from the sums and sizes of clusters."""
    lower, upper = bounds
    span, number = upper - lower, len(sums)
    means = [total / count for total, count in zip(sums, counts or [1] * number, strict=True)]
    mean = math.fsum(sums) / (sum(counts) if counts is not None else number)
    if number >= _FEWEST_TO_RESAMPLE and len(set(means)) == 1:
        # If all are equal, other values have at most the share of Wilson's bound for 0 successes.
        others = wilson(0, number, confidence=confidence).high
        return mean - others * (mean - lower), mean + others * (upper - mean)
    if number < _FEWEST_TO_RESAMPLE:
        safe = wilson(min(max((mean - lower) / span, 0.0), 1.0) * number, number, confidence=confidence)
        return lower + span * safe.low, lower + span * safe.high
    return bootstrapped_mean(sums, bounds, confidence=confidence, seed=seed, resamples=resamples, counts=counts)


def check_scores(values: Sequence[float], confidence: float, name: str = "the evaluation") -> None:
    """Raise `EvaluationError` for no scores, for some that are not 0 to 1, and for a confidence that is not a share."""
    if not values:
        raise EvaluationError(f"{name} has no scores", hint="Measure at least one question.")
    for each in values:
        if not 0 <= each <= 1:
            raise EvaluationError(f"{name} has the score {each}", hint="Scores lie between 0 and 1.")
    if not 0 < confidence < 1:
        raise EvaluationError(f"the confidence is {confidence}", hint="Give a share such as 0.95.")
