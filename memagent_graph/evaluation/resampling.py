"""Intervals and p-values by resampling, with NumPy and SciPy (the extra "eval"); equal seeds give equal results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from memagent_graph.evaluation.extra_modules import extra_module

STATISTICS: Final = "the statistics of an evaluation"
RESAMPLES: Final = 9_999
_FLIPPED_EXHAUSTIVELY: Final = 13
"""Up to so many differences all 2**n signs are tried, which is fewer than RESAMPLES."""
_AT_ONCE: Final = 2_000_000
"""How many numbers a batch of resamples holds."""


def bootstrapped_mean(
    values: Sequence[float], bounds: tuple[float, float], *, confidence: float, seed: int, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """The bootstrap interval of a mean of values between bounds: BCa, or percentiles where BCa is not defined.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    lower, upper = bounds
    stats, numpy = scipy_stats(), extra_module("numpy", STATISTICS)
    mean = math.fsum(values) / len(values)
    for method in ("BCa", "percentile"):
        with numpy.errstate(all="ignore"):
            found = stats.bootstrap(
                (numpy.asarray(values),),
                numpy.mean,
                n_resamples=resamples,
                batch=max(1, _AT_ONCE // len(values)),
                confidence_level=confidence,
                method=method,
                rng=numpy.random.default_rng(seed),
            ).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            break
    return max(lower, min(float(found.low), mean)), min(upper, max(float(found.high), mean))


def sign_flip_p_value(differences: Sequence[float], *, seed: int, resamples: int = RESAMPLES) -> float:
    """How probable a mean difference so large is when every difference might as well have the other sign.

    Raises:
        MissingExtraError: NumPy is not installed.
    """
    numpy = extra_module("numpy", STATISTICS)
    moved = numpy.asarray([each for each in differences if each])
    if not len(moved):
        return 1.0
    observed = abs(math.fsum(moved)) - 1e-9
    if len(moved) <= _FLIPPED_EXHAUSTIVELY:
        signs = 1 - 2 * ((numpy.arange(2 ** len(moved))[:, None] >> numpy.arange(len(moved))) & 1)
        return float((abs(signs @ moved) >= observed).mean())
    random, reached, left = numpy.random.default_rng(seed), 1, resamples
    while left:
        batch = min(left, max(1, _AT_ONCE // len(moved)))
        signs = 1 - 2 * random.integers(0, 2, size=(batch, len(moved)), dtype=numpy.int8)
        reached += int((abs(signs @ moved) >= observed).sum())
        left -= batch
    return reached / (resamples + 1)


def scipy_stats() -> Any:
    """The module scipy.stats.

    Raises:
        MissingExtraError: it is not installed.
    """
    return extra_module("scipy.stats", STATISTICS)
