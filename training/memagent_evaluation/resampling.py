"""Intervals and p-values by resampling, with NumPy and SciPy (the extra "eval"); equal seeds give equal results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from memagent_evaluation.extra_modules import extra_module

STATISTICS: Final = "the statistics of an evaluation"
RESAMPLES: Final = 9_999
"""Up to 13 differences have fewer sign patterns than that, and all of them are tried."""
_AT_ONCE: Final = 2_000_000
"""How many numbers are in a batch of resamples."""


def bootstrapped_mean(
    values: Sequence[float],
    bounds: tuple[float, float],
    *,
    confidence: float,
    seed: int,
    resamples: int = RESAMPLES,
    counts: Sequence[int] | None = None,
) -> tuple[float, float]:
    """The bootstrap interval of a mean of values between bounds: BCa, or percentiles where BCa is not defined.

    Resampling few values gives too narrow an interval; it is widened by the ratio of Student's to the normal one.

    Args:
        values: the values to draw from: single values, or the sums of clusters that are drawn as a whole.
        bounds: the range of the mean.
        confidence: of the interval.
        seed: of the draws.
        resamples: how many.
        counts: how many values are in each sum; 1 if left out.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    lower, upper = bounds
    stats, numpy = scipy_stats(), extra_module("numpy", STATISTICS)
    sizes = numpy.ones(len(values)) if counts is None else numpy.asarray(counts)
    mean = math.fsum(values) / float(sizes.sum())

    def mean_of(sums: Any, counts: Any, axis: int = -1) -> Any:
        return sums.sum(axis=axis) / counts.sum(axis=axis)

    for method in ("BCa", "percentile"):
        with numpy.errstate(all="ignore"):
            found = stats.bootstrap(
                (numpy.asarray(values), sizes),
                mean_of,
                paired=True,
                vectorized=True,
                n_resamples=resamples,
                batch=max(1, _AT_ONCE // len(values)),
                confidence_level=_expanded(confidence, len(values)),
                method=method,
                rng=numpy.random.default_rng(seed),
            ).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            break
    return max(lower, min(float(found.low), mean)), min(upper, max(float(found.high), mean))


def _expanded(confidence: float, number: int) -> float:
    """The nominal confidence for resampling this many values, to get that confidence: Hesterberg's expanded
    percentiles.

    The American Statistician 69 (2015), arXiv 1411.5279.
    """
    distribution = scipy_stats()
    reach = math.sqrt(number / (number - 1)) * distribution.t.ppf((1 + confidence) / 2, number - 1)
    return float(1 - 2 * distribution.norm.cdf(-reach))


def sign_flip_p_value(differences: Sequence[float], *, seed: int, resamples: int = RESAMPLES) -> float:
    """The probability of such a large mean difference if every difference could have either sign.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    moved = [each for each in differences if each]
    if len(moved) < 2:  # with either sign it is as large
        return 1.0
    numpy = extra_module("numpy", STATISTICS)
    found = scipy_stats().permutation_test(
        (moved,),
        numpy.mean,
        permutation_type="samples",
        n_resamples=resamples,
        batch=max(1, _AT_ONCE // len(moved)),
        rng=numpy.random.default_rng(seed),
    )
    return float(found.pvalue)


def scipy_stats() -> Any:
    """The module scipy.stats.

    Raises:
        MissingExtraError: it is not installed.
    """
    return extra_module("scipy.stats", STATISTICS)
