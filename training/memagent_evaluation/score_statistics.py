"""The uncertainty of measured scores: means with intervals, and two systems compared on the same questions.

Scores are between 0 and 1. Scores of 0 and 1 get Wilson's interval, others a bootstrap interval. If several questions
share a document, their scores may be correlated: then documents are resampled, not questions. All intervals are 95 %
intervals. Wilson's interval needs only Python; resampling and p-values need SciPy (the extra "eval"). Resampling is
seeded, so equal scores give equal intervals.

The p-value of a comparison comes from the sign-flip test: how probable is so large a difference if the two systems were
swapped at random, question by question? For scores of 0 and 1 this is the exact McNemar test. If questions share
documents, the systems are swapped for whole documents.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final

from memagent_graph.errors import EvaluationError, load_extra
from memagent_graph.grouping import group_values

_MIN_CLUSTERS: Final = 10
"""Resampling fewer values would give intervals that are far too narrow."""
NON_INFERIORITY_MARGIN: Final = 0.03
"""A system that is worse by less than this, 3 points, counts as not worse."""
RESAMPLE_COUNT: Final = 9_999
"""Resamples per test or interval. Up to 13 differences have fewer sign patterns than this, and all are tried."""
_MAX_BATCH_VALUES: Final = 2_000_000
"""The maximum number of values in a batch of resamples."""
_EXTRA_PURPOSE: Final = "the statistics of an evaluation"
_CONFIDENCE: Final = 0.95
_NORMAL_QUANTILE: Final = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
"""The number of standard deviations around the mean of a normal distribution that contain this proportion."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean score with its interval, 0 to 1."""

    mean: float
    low: float
    high: float
    n: int
    """The number of questions."""

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
    return Estimate(math.fsum(values) / len(values), low, high, len(values))


def compute_wilson_interval(successes: float, n: int) -> Estimate:
    """Return a proportion with Wilson's score interval, without continuity correction.

    `successes` may be a sum of fractional scores. They vary at most as much as scores of 0 and 1 with the same mean, so
    the interval is then wider than necessary.
    """
    z, proportion = _NORMAL_QUANTILE, successes / n
    centre = (proportion + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(proportion * (1 - proportion) / n + z * z / (4 * n * n))
    # Rounding must not move a bound past the proportion. At 0 and n successes, one bound is exactly 0 or 1.
    low = 0.0 if successes == 0 else min(max(centre - half_width, 0.0), proportion)
    high = 1.0 if successes == n else max(min(centre + half_width, 1.0), proportion)
    return Estimate(proportion, low, high, n)


def pass_at_k(correct_count: int, sample_count: int, k: int) -> float:
    """Return the chance that at least one of k samples is correct, from the counts of samples; k <= `sample_count`."""
    return 1 - math.comb(sample_count - correct_count, k) / math.comb(sample_count, k)


def sum_clusters(values: Sequence[float], clusters: Iterable[Hashable]) -> tuple[list[float], list[int]]:
    """Return the sum and the number of the values of each cluster."""
    groups = group_values(zip(clusters, values, strict=True)).values()
    return [math.fsum(group) for group in groups], [len(group) for group in groups]


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
    span, cluster_count = upper - lower, len(sums)
    mean = math.fsum(sums) / sum(counts)
    if cluster_count < _MIN_CLUSTERS:
        interval = compute_wilson_interval(min(max((mean - lower) / span, 0.0), 1.0) * cluster_count, cluster_count)
        return lower + span * interval.low, lower + span * interval.high
    if len({round(total / count, 9) for total, count in zip(sums, counts, strict=True)}) == 1:
        max_other_share = compute_wilson_interval(0, cluster_count).high
        return mean - max_other_share * (mean - lower), mean + max_other_share * (upper - mean)
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
    stats, numpy = _import_scipy_stats(), load_extra("numpy", "eval", _EXTRA_PURPOSE)

    def compute_mean(sums: Any, counts: Any, axis: int = -1) -> Any:
        return sums.sum(axis=axis) / counts.sum(axis=axis)

    for method in ("BCa", "percentile"):
        with numpy.errstate(all="ignore"):
            interval = stats.bootstrap(
                (numpy.asarray(sums), numpy.asarray(counts, dtype=float)),
                compute_mean,
                paired=True,
                vectorized=True,
                n_resamples=RESAMPLE_COUNT,
                batch=max(1, _MAX_BATCH_VALUES // len(sums)),
                confidence_level=_expand_confidence(len(sums)),
                method=method,
                rng=numpy.random.default_rng(0),
            ).confidence_interval
        if math.isfinite(interval.low) and math.isfinite(interval.high):
            break
    return float(interval.low), float(interval.high)


def _expand_confidence(cluster_count: int) -> float:
    """Return the nominal confidence at which an interval from so few clusters has the intended coverage.

    Hesterberg's expanded percentiles, The American Statistician 69 (2015), arXiv 1411.5279.
    """
    stats = _import_scipy_stats()
    deviations = math.sqrt(cluster_count / (cluster_count - 1)) * stats.t.ppf((1 + _CONFIDENCE) / 2, cluster_count - 1)
    return float(1 - 2 * stats.norm.cdf(-deviations))


def compute_sign_flip_p_value(differences: Sequence[float]) -> float:
    """Return the probability of so large a mean difference if each difference had either sign with equal probability.

    It is exact if all differences are equally large (the binomial test), or if they are few; otherwise `RESAMPLE_COUNT`
    random patterns of signs are tried.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    nonzero = [difference for difference in differences if difference]
    if len(nonzero) < 2:  # either sign gives the same size
        return 1.0
    stats = _import_scipy_stats()
    if len({abs(difference) for difference in nonzero}) == 1:
        return float(stats.binomtest(sum(difference > 0 for difference in nonzero), len(nonzero)).pvalue)
    numpy = load_extra("numpy", "eval", _EXTRA_PURPOSE)
    result = stats.permutation_test(
        (nonzero,),
        numpy.mean,
        permutation_type="samples",
        n_resamples=RESAMPLE_COUNT,
        batch=max(1, _MAX_BATCH_VALUES // len(nonzero)),
        rng=numpy.random.default_rng(0),
    )
    return float(result.pvalue)


def _import_scipy_stats() -> Any:
    return load_extra("scipy.stats", "eval", _EXTRA_PURPOSE)


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

    @property
    def difference(self) -> float:
        """First minus second."""
        return self.first_mean - self.second_mean

    @property
    def formatted_difference(self) -> str:
        """The difference and its interval in points, for tables."""
        return f"{100 * self.difference:+.1f} [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"

    @property
    def formatted_p_value(self) -> str:
        """The p-value, for tables."""
        return "< 0.001" if self.p_value < 0.001 else f"{self.p_value:.3f}"

    @property
    def is_non_inferior(self) -> bool:
        """Whether the interval excludes that the first is worse than the second by `NON_INFERIORITY_MARGIN` or more."""
        return self.low > -NON_INFERIORITY_MARGIN


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
    return Comparison(*names, len(ids), first_mean, second_mean, low, high, compute_sign_flip_p_value(sums))


def compute_newcombe_interval(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """Return the interval of the difference of two paired proportions, from the counts of right answers.

    Newcombe 1998, Statistics in Medicine 17, method 10: Wilson's intervals of both proportions, squared and added with
    their correlation. It keeps its confidence if few questions differ, and at proportions of 0 and 1.
    """
    n = both + only_first + only_second + neither
    first = compute_wilson_interval(both + only_first, n)
    second = compute_wilson_interval(both + only_second, n)
    margin_product = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    product = both * neither - only_first * only_second
    phi = (max(product - n / 2, 0.0) if product > 0 else product) / math.sqrt(margin_product) if margin_product else 0.0

    def combine(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    difference = (only_first - only_second) / n
    lower_margin = combine(first.mean - first.low, second.high - second.mean)
    upper_margin = combine(first.high - first.mean, second.mean - second.low)
    return max(-1.0, difference - lower_margin), min(1.0, difference + upper_margin)


def correct_p_values(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return comparisons with p-values corrected by Holm's method, which controls the family-wise error rate."""
    corrected = list(comparisons)
    max_p_value = 0.0
    for rank, index in enumerate(sorted(range(len(comparisons)), key=lambda index: comparisons[index].p_value)):
        max_p_value = max(max_p_value, min(1.0, (len(comparisons) - rank) * comparisons[index].p_value))
        corrected[index] = replace(comparisons[index], p_value=max_p_value, corrected_for=len(comparisons))
    return tuple(corrected)
