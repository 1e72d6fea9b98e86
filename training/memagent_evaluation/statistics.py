"""The uncertainty of measured scores: means with intervals, and p-values.

Scores are between 0 and 1. Scores of 0 and 1 get Wilson's interval, others a bootstrap interval. If several questions
share a document, their scores may be correlated: then documents are resampled, not questions.

All intervals are 95 % intervals. Wilson's needs only Python; resampling and p-values need SciPy (the extra "eval"). Its
draws are seeded, so equal scores give equal intervals.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

from memagent_graph.errors import EvaluationError, load_extra

_MIN_TO_RESAMPLE: Final = 10
"""Resampling fewer values would give intervals that are far too narrow."""
RESAMPLES: Final = 9_999
"""Up to 13 differences have fewer sign patterns than this, and all of them are tried."""
_MAX_BATCH_NUMBERS: Final = 2_000_000
"""Maximum numbers per batch of resamples."""
_NEEDED_FOR: Final = "the statistics of an evaluation"
_CONFIDENCE: Final = 0.95
_NORMAL_QUANTILE: Final = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
"""A normal distribution has this proportion within so many standard deviations."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean score with its interval, 0 to 1."""

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
    """Return the mean of 0..1 scores with its interval: Wilson's if all are 0 or 1, otherwise a bootstrap interval.

    Args:
        values: the scores.
        clusters: the document of each score. If scores share documents, the interval is a bootstrap interval over
            documents.

    Raises:
        EvaluationError: there are no values, or some are not between 0 and 1.
        MissingExtraError: SciPy is needed and not installed.
    """
    check_scores(values)
    if set(values) <= {0.0, 1.0} and (clusters is None or len(set(clusters)) == len(values)):
        return compute_wilson_interval(round(sum(values)), len(values))
    sums, counts = sum_clusters(values, clusters if clusters is not None else range(len(values)))
    low, high = compute_bootstrap_interval(sums, (0.0, 1.0), counts)
    documents = len(sums) if len(sums) < len(values) else None
    return Estimate(math.fsum(values) / len(values), low, high, len(values), documents)


def compute_wilson_interval(successes: float, n: int) -> Estimate:
    """Return a proportion with Wilson's score interval, without continuity correction.

    `successes` may be a sum of fractional scores. They vary at most as much as scores of 0 and 1 with the same mean, so
    the interval is then wider than necessary.

    Raises:
        EvaluationError: n is below 1, or successes are not between 0 and n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise EvaluationError(f"successes must be between 0 and n, got {successes} of {n}", hint="Pass an n above 0.")
    z, proportion = _NORMAL_QUANTILE, successes / n
    centre = (proportion + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(proportion * (1 - proportion) / n + z * z / (4 * n * n))
    # Rounding must not move a bound past the proportion, or past 0 and 1, where they are at 0 and n successes.
    low = 0.0 if successes == 0 else min(max(centre - half, 0.0), proportion)
    high = 1.0 if successes == n else max(min(centre + half, 1.0), proportion)
    return Estimate(proportion, low, high, n)


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Return the chance that at least one of k samples is right, from the number of right samples; k <= samples."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def sum_clusters(values: Sequence[float], clusters: Iterable[Hashable]) -> tuple[list[float], list[int]]:
    """Return the sum and the number of the values of each cluster."""
    groups: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        groups.setdefault(cluster, []).append(value)
    return [math.fsum(group) for group in groups.values()], [len(group) for group in groups.values()]


def compute_bootstrap_interval(
    sums: Sequence[float], bounds: tuple[float, float], counts: Sequence[int]
) -> tuple[float, float]:
    """Return the interval of a mean, resampled from clusters of values.

    Fewer than 10 clusters say too little about their variance. They get Wilson's interval, as if each were a single
    value. If all clusters have equal means, the proportion of others is bounded instead.

    Args:
        sums: the sum of each cluster's values.
        bounds: the smallest and the largest possible value.
        counts: the number of values in each cluster.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    lower, upper = bounds
    span, number = upper - lower, len(sums)
    mean = math.fsum(sums) / sum(counts)
    if number < _MIN_TO_RESAMPLE:
        proportion = compute_wilson_interval(min(max((mean - lower) / span, 0.0), 1.0) * number, number)
        return lower + span * proportion.low, lower + span * proportion.high
    if len({total / count for total, count in zip(sums, counts, strict=True)}) == 1:
        others = compute_wilson_interval(0, number).high
        return mean - others * (mean - lower), mean + others * (upper - mean)
    low, high = _resample_interval(sums, counts)
    return max(lower, min(low, mean)), min(upper, max(high, mean))


def check_scores(values: Sequence[float]) -> None:
    """Raise `EvaluationError` if there are no scores, or some are not between 0 and 1."""
    if not values:
        raise EvaluationError("the evaluation has no scores", hint="Measure at least one question.")
    for value in values:
        if not 0 <= value <= 1:
            raise EvaluationError(f"the evaluation has the score {value}", hint="Scores lie between 0 and 1.")


def _resample_interval(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """Return the bootstrap interval of a mean: BCa, or percentiles if BCa is not defined.

    Resampling few clusters gives too narrow an interval, which `_expand_confidence` compensates.
    """
    stats, numpy = _scipy_stats(), load_extra("numpy", "eval", _NEEDED_FOR)

    def mean_of(sums: Any, counts: Any, axis: int = -1) -> Any:
        return sums.sum(axis=axis) / counts.sum(axis=axis)

    for method in ("BCa", "percentile"):
        with numpy.errstate(all="ignore"):
            interval = stats.bootstrap(
                (numpy.asarray(sums), numpy.asarray(counts, dtype=float)),
                mean_of,
                paired=True,
                vectorized=True,
                n_resamples=RESAMPLES,
                batch=max(1, _MAX_BATCH_NUMBERS // len(sums)),
                confidence_level=_expand_confidence(len(sums)),
                method=method,
                rng=numpy.random.default_rng(0),
            ).confidence_interval
        if math.isfinite(interval.low) and math.isfinite(interval.high):
            break
    return float(interval.low), float(interval.high)


def _expand_confidence(number: int) -> float:
    """Return the nominal confidence at which resampling so few values has the real one.

    Hesterberg's expanded percentiles, The American Statistician 69 (2015), arXiv 1411.5279.
    """
    stats = _scipy_stats()
    deviations = math.sqrt(number / (number - 1)) * stats.t.ppf((1 + _CONFIDENCE) / 2, number - 1)
    return float(1 - 2 * stats.norm.cdf(-deviations))


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Return the probability of so large a mean difference if each difference had either sign with equal probability.

    It is exact if all differences are equally large (the binomial test), or if they are few; otherwise `RESAMPLES`
    random patterns of signs are tried.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    nonzero = [difference for difference in differences if difference]
    if len(nonzero) < 2:  # with either sign it is as large
        return 1.0
    stats = _scipy_stats()
    if len({abs(difference) for difference in nonzero}) == 1:
        return float(stats.binomtest(sum(difference > 0 for difference in nonzero), len(nonzero)).pvalue)
    numpy = load_extra("numpy", "eval", _NEEDED_FOR)
    result = stats.permutation_test(
        (nonzero,),
        numpy.mean,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        batch=max(1, _MAX_BATCH_NUMBERS // len(nonzero)),
        rng=numpy.random.default_rng(0),
    )
    return float(result.pvalue)


def _scipy_stats() -> Any:
    return load_extra("scipy.stats", "eval", _NEEDED_FOR)
