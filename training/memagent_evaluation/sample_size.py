"""How many questions an evaluation needs before a difference between two systems can be seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from memagent_evaluation.extra_modules import extra_module
from memagent_evaluation.resampling import STATISTICS, scipy_stats
from memagent_graph.errors import EvaluationError


@dataclass(frozen=True, slots=True)
class QuestionsNeeded:
    """How many questions are needed to detect a difference between two accuracies."""

    paired: int
    """Both systems answer the same ones: the exact McNemar test."""
    unpaired: int
    """Each system answers this many of its own."""


def questions_needed(
    first: float,
    second: float,
    *,
    power: float = 0.8,
    alpha: float = 0.05,
    correlation: float = 0.0,
    discordance: float | None = None,
) -> QuestionsNeeded:
    """How many questions show a difference between two accuracies with probability `power`, at two-sided `alpha`.

    Args:
        first: the share that one system has right, 0 to 1.
        second: the other's.
        power: the probability of seeing the difference.
        alpha: the probability of seeing one where there is none.
        correlation: of the systems' results at a question. 0 is careful; systems that share a policy have more, and
            then need fewer questions.
        discordance: the share of questions that only one of them has right, if known, instead of the correlation.

    The paired number has the exact test's power, from the distributions of the number and direction of differing
    questions; the unpaired one is that of the normal test of two shares.

    Raises:
        EvaluationError: equal accuracies, or values that contradict each other.
        MissingExtraError: SciPy is not installed.
    """
    if not (0 <= first <= 1 and 0 <= second <= 1 and 0 < power < 1 and 0 < alpha < 1 and -1 <= correlation <= 1):
        raise EvaluationError(
            f"accuracies {first} and {second}, power {power}, alpha {alpha} and correlation {correlation} are not "
            "all shares",
            hint="Give 0.711, not 71.1.",
        )
    difference = abs(first - second)
    if not difference:
        raise EvaluationError(
            "no number of questions can show a difference between equal accuracies", hint="Name two that differ."
        )
    spread = math.sqrt(first * (1 - first) * second * (1 - second))
    most = min(first + second, 2 - first - second)
    if discordance is None:
        differing = first * (1 - second) + second * (1 - first) - 2 * correlation * spread
        differing = min(max(differing, difference), most)
    elif difference - 1e-9 <= discordance <= most + 1e-9:
        differing = min(max(discordance, difference), most)
    else:
        raise EvaluationError(
            f"systems with accuracies {first} and {second} cannot differ at a share of {discordance} of the questions",
            hint=f"It lies between {difference:g} and {most:g}.",
        )
    z_alpha, z_power = two_sided_quantile(1 - alpha), NormalDist().inv_cdf(power)
    mean = (first + second) / 2
    pooled = math.sqrt(2 * mean * (1 - mean))
    apart = math.sqrt(first * (1 - first) + second * (1 - second))
    unpaired = math.ceil(((z_alpha * pooled + z_power * apart) / difference) ** 2)
    return QuestionsNeeded(_paired(difference, differing, power, alpha), max(unpaired, 2))


def smallest_difference(questions: int) -> float:
    """The smallest difference of two accuracies, in steps of a point, that this many questions show with power 0.8.

    Paired, at level 0.05, around an accuracy of one half, where it is hardest; 1 if none can be shown.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    low, high = 1, 100
    while low < high:
        middle = (low + high) // 2
        if questions_needed(0.5 + middle / 200, 0.5 - middle / 200).paired <= questions:
            high = middle
        else:
            low = middle + 1
    return low / 100


def two_sided_quantile(confidence: float) -> float:
    """How many standard deviations on each side contain that share of a normal distribution."""
    if not 0 < confidence < 1:
        raise EvaluationError(f"the confidence is {confidence}", hint="Give a share such as 0.95.")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _paired(difference: float, differing: float, power: float, alpha: float) -> int:
    """The smallest n, except for the irregularity of a discrete test, whose exact McNemar test has that power."""
    z_alpha, z_power = two_sided_quantile(1 - alpha), NormalDist().inv_cdf(power)
    normal = (z_alpha * math.sqrt(differing) + z_power * math.sqrt(max(0.0, differing - difference**2))) / difference
    low, high = 1, max(2, math.ceil(normal**2))
    while _power(high, difference, differing, alpha) < power:
        low, high = high, high + max(1, high // 8)
    while low < high:
        middle = (low + high) // 2
        if _power(middle, difference, differing, alpha) < power:
            low = middle + 1
        else:
            high = middle
    return high


def _power(n: int, difference: float, differing: float, alpha: float) -> float:
    """The probability that the exact McNemar test on n questions sees the difference."""
    numpy, binom = extra_module("numpy", STATISTICS), scipy_stats().binom
    low, high = binom.ppf([1e-9, 1 - 1e-9], n, differing)
    counts = numpy.arange(int(low), int(high) + 1)
    # The largest number of questions won by the loser at which the test is still significant; -1: none.
    edge = binom.ppf(alpha / 2, counts, 0.5)
    edge = numpy.where(2 * binom.cdf(edge, counts, 0.5) < alpha, edge, edge - 1)
    better = (1 + difference / differing) / 2
    seen = binom.cdf(edge, counts, 1 - better) + binom.cdf(edge, counts, better)
    return float((binom.pmf(counts, n, differing) * seen).sum())
