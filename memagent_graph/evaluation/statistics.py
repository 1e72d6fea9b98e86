"""How sure a measured score is: intervals, paired comparisons, how many questions it takes, and rankings.

Scores lie between 0 and 1. Those that are only ever 0 or 1 are counted (Wilson's interval, exact McNemar test); others
are resampled (bootstrap intervals, sign-flip test). Both tests ask how probable such a difference is if the two systems
could be swapped at every question; McNemar's is the sign-flip test of scores that are 0 or 1. Where several questions
share a document, their scores may rise and fall together: then documents are resampled and swapped, not questions.

Intervals of single systems need nothing but Python; resampling and tests need the extra "eval" (SciPy).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from statistics import fmean
from typing import Final

from memagent_graph.errors import EvaluationError
from memagent_graph.evaluation.resampling import RESAMPLES, bootstrapped_mean, scipy_stats, sign_flip_p_value
from memagent_graph.evaluation.sample_size import QuestionsNeeded, questions_needed, two_sided_quantile

__all__ = [
    "Comparison",
    "Estimate",
    "QuestionsNeeded",
    "Ranking",
    "Test",
    "compare",
    "estimate",
    "holm",
    "mcnemar",
    "mean_interval",
    "newcombe",
    "questions_needed",
    "ranked",
    "wilson",
]

MARGIN: Final = 0.03
"""How much worse a system may be that counts as not worse: 3 points."""
_FEWEST_TO_RESAMPLE: Final = 10
"""Resampling fewer values gives intervals that are far too narrow."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean score with its interval. Times 100 it is in percent."""

    mean: float
    low: float
    high: float
    n: int
    """How many questions it rests on."""
    confidence: float = 0.95
    documents: int | None = None
    """On how many documents the questions are, where some share one."""

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


class Test(StrEnum):
    """How a p-value was found."""

    __test__ = False  # pytest takes what is called Test for one of its own

    MCNEMAR = "exact McNemar"
    """For scores of 0 or 1: the questions that only one system has right, as tosses of a coin."""
    SIGN_FLIP = "sign flips"
    """For fractional scores: the signs of the differences, flipped in all ways, or in 9,999 random ones."""
    BY_DOCUMENT = "sign flips by document"
    """Where questions share documents: the signs of all differences at a document, flipped together."""


def estimate(
    values: Sequence[float], *, clusters: Sequence[str] | None = None, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """The mean of 0..1 scores with its interval: Wilson's where all are 0 or 1, otherwise `mean_interval`'s.

    Args:
        values: the scores.
        clusters: the document of each. Where some share one, documents are resampled: a bootstrap interval; of fewer
            than 10 documents Wilson's, as if there were no more questions than documents.
        confidence: of the interval.
        seed: of the resampling.

    Raises:
        EvaluationError: no values, or some that are not 0 to 1.
    """
    _check(values, confidence)
    if clusters is not None and len(set(clusters)) < len(values):
        sums, counts = _by_cluster(values, clusters)
        mean = math.fsum(values) / len(values)
        low, high = _bootstrapped(sums, (0.0, 1.0), confidence, seed, RESAMPLES, counts)
        return Estimate(mean, low, high, len(values), confidence, len(sums))
    if set(values) <= {0.0, 1.0}:
        return wilson(round(sum(values)), len(values), confidence=confidence)
    return mean_interval(values, confidence=confidence, seed=seed)


def wilson(successes: float, n: int, *, confidence: float = 0.95) -> Estimate:
    """A share with Wilson's score interval, without continuity correction.

    `successes` may be a sum of fractional scores: these vary no more than 0 and 1 with the same mean do, so that the
    interval is then wider than it need be.

    Raises:
        EvaluationError: no questions, or not between 0 and n successes.
    """
    if n < 1 or not 0 <= successes <= n:
        raise EvaluationError(f"there is no share of {successes} successes in {n}", hint="Give 0 to n of at least 1.")
    z, share = two_sided_quantile(confidence), successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding must push neither bound past the share, nor past 0 and 1, where they lie at 0 and n successes.
    low = 0.0 if successes == 0 else min(max(centre - half, 0.0), share)
    high = 1.0 if successes == n else max(min(centre + half, 1.0), share)
    return Estimate(share, low, high, n, confidence)


def mean_interval(
    values: Sequence[float], *, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """The mean of 0..1 scores with a bootstrap interval: BCa, or percentiles where BCa is not defined.

    Fewer than 10 values tell too little of how they vary: they get `wilson`'s interval, which is safe for them. Of
    values that are all alike, it is bounded how many others there may be. Equal seeds give equal intervals.

    Raises:
        EvaluationError: no values, or some that are not 0 to 1.
        MissingExtraError: SciPy is not installed.
    """
    _check(values, confidence)
    mean = math.fsum(values) / len(values)
    low, high = _bootstrapped(values, (0.0, 1.0), confidence, seed, resamples)
    return Estimate(mean, low, high, len(values), confidence)


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
    confidence: float = 0.95
    corrected_for: int = 1
    """For how many comparisons the p-value has been corrected."""
    documents: int | None = None
    """On how many documents the questions are, where some share one."""

    @property
    def difference(self) -> float:
        """First minus second."""
        return self.first_mean - self.second_mean

    @property
    def told_apart(self) -> bool:
        """Whether the test tells the systems apart; it decides, not the interval."""
        return self.p_value < 1 - self.confidence

    def not_worse(self, margin: float = MARGIN) -> bool:
        """Whether the first is not worse than the second by as much as a margin: the interval's lower end decides."""
        return self.low > -margin

    @property
    def sentence(self) -> str:
        """What may be said of the two, in words."""
        level = f"{100 * self.confidence:g} % interval"
        corrected = f", corrected for {self.corrected_for} comparisons" if self.corrected_for > 1 else ""
        documents = f" on {self.documents} documents" if self.documents is not None else ""
        figures = (
            f"{self.first} {100 * self.first_mean:.1f} % and {self.second} {100 * self.second_mean:.1f} % on the same "
            f"{self.n} questions{documents}: {100 * self.difference:+.1f} points ({level} {100 * self.low:+.1f} to "
            f"{100 * self.high:+.1f}, {self.test.value} {_p(self.p_value)}{corrected})"
        )
        if self.told_apart:
            ahead, behind = (self.first, self.second) if self.difference > 0 else (self.second, self.first)
            return f"{figures}. {ahead} is better than {behind}."
        needed = self._questions_that_would_do()
        remedy = f"; about {_round(needed):,} questions would tell a difference of this size" if needed else ""
        return f"{figures}. They cannot be told apart{remedy}."

    def _questions_that_would_do(self) -> int | None:
        if self.test is not Test.MCNEMAR or self.only_first == self.only_second:
            return None
        discordance = (self.only_first + self.only_second) / self.n
        alpha = (1 - self.confidence) / self.corrected_for
        needed = questions_needed(self.first_mean, self.second_mean, alpha=alpha, discordance=discordance).paired
        return needed if needed > self.n else None


def compare(
    first: Mapping[str, float],
    second: Mapping[str, float],
    *,
    names: tuple[str, str] = ("the first", "the second"),
    clusters: Mapping[str, str] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare two systems' 0..1 scores, by sample id.

    Scores of 0 and 1: the exact McNemar test, and Newcombe's interval for a difference of paired shares. Others: the
    sign-flip test, and a bootstrap interval over the questions. Where questions share documents: both of these, over
    the documents. Swapping the systems turns all signs and nothing else.

    Args:
        first: one system's scores.
        second: the other's, of the same samples.
        names: of the systems.
        clusters: the document of each sample; one for each if left out.
        confidence: of the interval.
        seed: of the resampling.
        resamples: how many.

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
    a, b = [first[each] for each in ids], [second[each] for each in ids]
    _check(a, confidence)
    _check(b, confidence)
    only_first = sum(x > y for x, y in zip(a, b, strict=True))
    only_second = sum(x < y for x, y in zip(a, b, strict=True))
    documents = [clusters[each] for each in ids] if clusters is not None else ids
    shared = len(set(documents)) if len(set(documents)) < len(ids) else None
    if shared is not None:
        sums, counts = _by_cluster([x - y for x, y in zip(a, b, strict=True)], documents)
        low, high = _bootstrapped(sums, (-1.0, 1.0), confidence, seed, resamples, counts)
        p_value, test = sign_flip_p_value(sums, seed=seed, resamples=resamples), Test.BY_DOCUMENT
    elif set(a) | set(b) <= {0.0, 1.0}:
        both = round(math.fsum(a)) - only_first
        low, high = newcombe(both, only_first, only_second, len(ids) - both - only_first - only_second, confidence)
        p_value, test = mcnemar(only_first, only_second), Test.MCNEMAR
    else:
        differences = [x - y for x, y in zip(a, b, strict=True)]
        low, high = _bootstrapped(differences, (-1.0, 1.0), confidence, seed, resamples)
        p_value, test = sign_flip_p_value(differences, seed=seed, resamples=resamples), Test.SIGN_FLIP
    means = math.fsum(a) / len(ids), math.fsum(b) / len(ids)
    return Comparison(
        *names, len(ids), *means, low, high, p_value, test, only_first, only_second, confidence, documents=shared
    )


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value of the exact McNemar test, from how many questions only one system has right.

    Raises:
        MissingExtraError: SciPy is not installed.
    """
    differing = only_first + only_second
    return float(scipy_stats().binomtest(only_first, differing, 0.5).pvalue) if differing else 1.0


def newcombe(
    both: int, only_first: int, only_second: int, neither: int, confidence: float = 0.95
) -> tuple[float, float]:
    """The interval of a difference of paired shares: square and add Wilson's, with their correlation.

    Newcombe 1998, Statistics in Medicine 17, method 10: it keeps its confidence where few questions differ, and at
    shares of 0 and 1.
    """
    n = both + only_first + only_second + neither
    first = wilson(both + only_first, n, confidence=confidence)
    second = wilson(both + only_second, n, confidence=confidence)
    margins = (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    product = both * neither - only_first * only_second
    phi = (max(product - n / 2, 0.0) if product > 0 else product) / math.sqrt(margins) if margins else 0.0

    def reach(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    difference = (only_first - only_second) / n
    below = reach(first.mean - first.low, second.high - second.mean)
    above = reach(first.high - first.mean, second.mean - second.low)
    return max(-1.0, difference - below), min(1.0, difference + above)


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
            apart = [f"{ahead} is better than {behind}" for ahead, behind in self._told if {ahead, behind} <= {*group}]
            but = f", but {', '.join(apart)}" if apart else ""
            shared = "" if len(group) == 1 else f" (not told apart as a group{but})"
            lines.append(f"{places} {', '.join(group)}{shared}")
            place = last + 1
        return tuple(lines)

    @property
    def _told(self) -> list[tuple[str, str]]:
        """The pairs that are told apart, the better one first."""
        told = [each for each in self.comparisons if each.told_apart]
        return [(each.first, each.second) if each.difference > 0 else (each.second, each.first) for each in told]


def ranked(
    scores: Mapping[str, Mapping[str, float]],
    *,
    clusters: Mapping[str, str] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Ranking:
    """Rank systems as far as the questions tell them apart, each pair on the questions that both were asked.

    One group stands before another only if every system of the one is better than every system of the other, by the
    paired test with Holm's correction over all pairs. Inside a group some pairs may still be told apart: `comparisons`
    has them. Two that share no question are not told apart.

    Args:
        scores: by system, then by sample id.
        clusters: the document of each sample; one for each if left out.
        confidence: one minus the probability of any false order.
        seed: of the resampling.
        resamples: how many.

    Raises:
        EvaluationError: no systems, one without scores, or a score that is not 0 to 1.
        MissingExtraError: SciPy is not installed.
    """
    if not scores:
        raise EvaluationError("there are no systems to rank", hint="Name at least one.")
    for name, given in scores.items():
        _check(list(given.values()), confidence, name)
    raw = []
    for x, y in combinations(sorted(scores, key=lambda name: (-fmean(scores[name].values()), name)), 2):
        if shared := [each for each in scores[x] if each in scores[y]]:
            one, other = ({each: scores[name][each] for each in shared} for name in (x, y))
            raw.append(
                compare(
                    one,
                    other,
                    names=(x, y),
                    clusters=clusters,
                    confidence=confidence,
                    seed=seed,
                    resamples=resamples,
                )
            )
    return ranking_of(scores, raw)


def ranking_of(names: Iterable[str], raw: Sequence[Comparison]) -> Ranking:
    """The ranking that comparisons of pairs allow, as `ranked`; their p-values are corrected here."""
    names = list(names)
    comparisons = corrected(raw)
    beats = set(Ranking((), comparisons)._told)
    # Means of different questions are no order. Where every system of a group beats all others, its wins less its
    # losses are more than theirs, so no such group is missed.
    won = {name: sum((name == x) - (name == y) for x, y in beats) for name in names}
    ordered = sorted(names, key=lambda name: (-won[name], name))
    groups: list[list[str]] = [[]]
    for at, name in enumerate(ordered):
        if at and all((before, after) in beats for before in ordered[:at] for after in ordered[at:]):
            groups.append([])
        groups[-1].append(name)
    return Ranking(tuple(tuple(sorted(group)) for group in groups), comparisons)


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's correction: p-values which, compared with one level, keep the chance of any false find below it."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = largest
    return tuple(adjusted)


def corrected(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Comparisons with p-values corrected for their number (Holm)."""
    p_values = holm([each.p_value for each in comparisons])
    number = len(comparisons)
    return tuple(replace(each, p_value=p, corrected_for=number) for each, p in zip(comparisons, p_values, strict=True))


def _by_cluster(values: Sequence[float], clusters: Sequence[str]) -> tuple[list[float], list[int]]:
    """The sum of the values of each cluster, and how many they are."""
    found: dict[str, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        found.setdefault(cluster, []).append(value)
    return [math.fsum(each) for each in found.values()], [len(each) for each in found.values()]


def _bootstrapped(
    sums: Sequence[float],
    bounds: tuple[float, float],
    confidence: float,
    seed: int,
    resamples: int,
    counts: Sequence[int] | None = None,
) -> tuple[float, float]:
    """The interval of a mean of values between bounds, from the sums of clusters of so many, or of 1 each."""
    lower, upper = bounds
    span, number = upper - lower, len(sums)
    means = [total / count for total, count in zip(sums, counts or [1] * number, strict=True)]
    mean = math.fsum(sums) / (sum(counts) if counts is not None else number)
    if number >= _FEWEST_TO_RESAMPLE and len(set(means)) == 1:
        # Of so many that are alike, others have a share of Wilson's bound for none at most, whatever these are.
        others = wilson(0, number, confidence=confidence).high
        return mean - others * (mean - lower), mean + others * (upper - mean)
    if number < _FEWEST_TO_RESAMPLE:
        safe = wilson(min(max((mean - lower) / span, 0.0), 1.0) * number, number, confidence=confidence)
        return lower + span * safe.low, lower + span * safe.high
    return bootstrapped_mean(sums, bounds, confidence=confidence, seed=seed, resamples=resamples, counts=counts)


def _check(values: Sequence[float], confidence: float, name: str = "the evaluation") -> None:
    if not values:
        raise EvaluationError(f"{name} has no scores", hint="Measure at least one question.")
    for each in values:
        if not 0 <= each <= 1:
            raise EvaluationError(f"{name} has the score {each}", hint="Scores lie between 0 and 1.")
    if not 0 < confidence < 1:
        raise EvaluationError(f"the confidence is {confidence}", hint="Give a share such as 0.95.")


def _round(number: int) -> int:
    """To two digits; more would say more than is known."""
    return int(float(f"{number:.1e}"))


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"
