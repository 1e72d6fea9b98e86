"""Uncertainty of measured scores: a mean with its interval, counted or resampled.

Scores are between 0 and 1. Scores that are only 0 or 1 are counted (Wilson's interval); others are resampled (bootstrap
intervals). If several questions share a document, their scores may be correlated: then documents are resampled, not
questions.

All intervals are 95 % intervals. Counted ones need only Python; resampling needs the extra "eval" (SciPy). Its draws
are seeded, so equal scores give equal intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

from memagent_graph.errors import EvaluationError
from memagent_graph.extra_modules import extra_module

_MIN_TO_RESAMPLE: Final = 10
"""Resampling fewer values gives intervals that are far too narrow."""
RESAMPLES: Final = 9_999
"""Up to 13 differences have fewer sign patterns than that, and all of them are tried."""
_MAX_BATCH_NUMBERS: Final = 2_000_000
"""Maximum numbers per batch of resamples."""
_NEEDED_FOR: Final = "the statistics of an evaluation"
_CONFIDENCE: Final = 0.95
_QUANTILE: Final = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
"""How many standard deviations on each side contain that share of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean score with its interval. Times 100 it is in percent."""

    mean: float
    low: float
    high: float
    n: int
    """The number of questions."""
    documents: int | None = None
    """The number of documents, if questions share some."""

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def estimate(values: Sequence[float], *, clusters: Sequence[str] | None = None) -> Estimate:
    """Return the mean of 0..1 scores with its interval: Wilson's if all are 0 or 1, otherwise `mean_interval`'s.

    Args:
        values: the scores.
        clusters: the document of each. If some share one, documents are resampled: a bootstrap interval; with fewer
            than 10 documents Wilson's, as if there were only as many questions as documents.

    Raises:
        EvaluationError: there are no values, or some are not between 0 and 1.
    """
    check_scores(values)
    if clusters is not None and len(set(clusters)) < len(values):
        sums, counts = by_cluster(values, clusters)
        mean = math.fsum(values) / len(values)
        low, high = bootstrap_interval(sums, (0.0, 1.0), counts)
        return Estimate(mean, low, high, len(values), len(sums))
    if set(values) <= {0.0, 1.0}:
        return wilson(round(sum(values)), len(values))
    return mean_interval(values)


def wilson(successes: float, n: int) -> Estimate:
    """Return a share with Wilson's score interval, without continuity correction.

    `successes` may be a sum of fractional scores: these vary at most as much as 0 and 1 with the same mean, so the
    interval is then wider than necessary.

    Raises:
        EvaluationError: n is below 1, or successes are not between 0 and n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise EvaluationError(f"successes must be between 0 and n, got {successes} of {n}", hint="Give an n above 0.")
    z, share = _QUANTILE, successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding must not move a bound past the share, or past 0 and 1, where they are at 0 and n successes.
    low = 0.0 if successes == 0 else min(max(centre - half, 0.0), share)
    high = 1.0 if successes == n else max(min(centre + half, 1.0), share)
    return Estimate(share, low, high, n)


def mean_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of 0..1 scores with a bootstrap interval: BCa, or percentiles where BCa is not defined.

    Fewer than 10 values say too little about their variance: they get `wilson`'s interval, which is safe. If all values
    are equal, the share of other values is bounded.

    Raises:
        EvaluationError: there are no values, or some are not between 0 and 1.
        MissingExtraError: SciPy is not installed.
    """
    check_scores(values)
    mean = math.fsum(values) / len(values)
    low, high = bootstrap_interval(values, (0.0, 1.0))
    return Estimate(mean, low, high, len(values))


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Return the chance that at least one of k samples is right, from the number of right samples.

    Raises:
        EvaluationError: k is not between 1 and the number of samples, or more samples are right than there are.
    """
    if not (1 <= k <= samples and 0 <= right <= samples):
        raise EvaluationError(
            f"pass@{k} is not defined for {right} right of {samples} samples", hint="Give a k of 1 to the samples."
        )
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def by_cluster(values: Sequence[float], clusters: Sequence[str]) -> tuple[list[float], list[int]]:
    """Return the sum and the number of values of each cluster."""
    groups: dict[str, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        groups.setdefault(cluster, []).append(value)
    return [math.fsum(group) for group in groups.values()], [len(group) for group in groups.values()]


def bootstrap_interval(
    sums: Sequence[float], bounds: tuple[float, float], counts: Sequence[int] | None = None
) -> tuple[float, float]:
    """Return the interval of a mean of values between bounds, from the sums and sizes of clusters."""
    lower, upper = bounds
    span, number = upper - lower, len(sums)
    means = [total / count for total, count in zip(sums, counts or [1] * number, strict=True)]
    mean = math.fsum(sums) / (sum(counts) if counts is not None else number)
    if number >= _MIN_TO_RESAMPLE and len(set(means)) == 1:
        # If all are equal, other values have at most the share of Wilson's bound for 0 successes.
        others = wilson(0, number).high
        return mean - others * (mean - lower), mean + others * (upper - mean)
    if number < _MIN_TO_RESAMPLE:
        safe = wilson(min(max((mean - lower) / span, 0.0), 1.0) * number, number)
        return lower + span * safe.low, lower + span * safe.high
    return _resample_interval(sums, bounds, counts)


def check_scores(values: Sequence[float]) -> None:
    """Raise `EvaluationError` if there are no scores, or some are not between 0 and 1."""
    if not values:
        raise EvaluationError("the evaluation has no scores", hint="Measure at least one question.")
    for value in values:
        if not 0 <= value <= 1:
            raise EvaluationError(f"the evaluation has the score {value}", hint="Scores lie between 0 and 1.")


def _resample_interval(
    values: Sequence[float], bounds: tuple[float, float], counts: Sequence[int] | None
) -> tuple[float, float]:
    """Return the bootstrap interval of a mean of values between bounds: BCa, or percentiles where BCa is not defined.

    Resampling few values gives too narrow an interval; it is widened by the ratio of Student's to the normal one.

    Args:
        values: the values to draw from: single values, or the sums of clusters that are drawn as a whole.
        bounds: the range of the mean.
        counts: how many values are in each sum; None if 1.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    lower, upper = bounds
    stats, numpy = scipy_stats(), extra_module("numpy", "eval", _NEEDED_FOR)
    sizes = numpy.ones(len(values)) if counts is None else numpy.asarray(counts)
    mean = math.fsum(values) / float(sizes.sum())

    def mean_of(sums: Any, counts: Any, axis: int = -1) -> Any:
        return sums.sum(axis=axis) / counts.sum(axis=axis)

    for method in ("BCa", "percentile"):
        with numpy.errstate(all="ignore"):
            interval = stats.bootstrap(
                (numpy.asarray(values), sizes),
                mean_of,
                paired=True,
                vectorized=True,
                n_resamples=RESAMPLES,
                batch=max(1, _MAX_BATCH_NUMBERS // len(values)),
                confidence_level=_expand_confidence(len(values)),
                method=method,
                rng=numpy.random.default_rng(0),
            ).confidence_interval
        if math.isfinite(interval.low) and math.isfinite(interval.high):
            break
    return max(lower, min(float(interval.low), mean)), min(upper, max(float(interval.high), mean))


def _expand_confidence(number: int) -> float:
    """Return the nominal confidence for resampling this many values, to get the real one: Hesterberg's expanded
    percentiles.

    The American Statistician 69 (2015), arXiv 1411.5279.
    """
    distribution = scipy_stats()
    reach = math.sqrt(number / (number - 1)) * distribution.t.ppf((1 + _CONFIDENCE) / 2, number - 1)
    return float(1 - 2 * distribution.norm.cdf(-reach))


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Return the probability of such a large mean difference if every difference could have either sign.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    nonzero = [difference for difference in differences if difference]
    if len(nonzero) < 2:  # with either sign it is as large
        return 1.0
    numpy = extra_module("numpy", "eval", _NEEDED_FOR)
    result = scipy_stats().permutation_test(
        (nonzero,),
        numpy.mean,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        batch=max(1, _MAX_BATCH_NUMBERS // len(nonzero)),
        rng=numpy.random.default_rng(0),
    )
    return float(result.pvalue)


def scipy_stats() -> Any:
    """Return the module scipy.stats.

    Raises:
        MissingExtraError: it is not installed.
    """
    return extra_module("scipy.stats", "eval", _NEEDED_FOR)
