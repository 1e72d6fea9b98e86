"""Intervals, paired comparison and corrections: beside known values and by simulation."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from math import comb

import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from memagent_evaluation.score_statistics import (
    compare,
    compute_newcombe_interval,
    compute_sign_flip_p_value,
    compute_wilson_interval,
    correct_p_values,
    estimate,
)
from memagent_graph.errors import EvaluationError, MissingExtraError


def by_id(values) -> dict[str, float]:
    return {f"task/{at}": float(value) for at, value in enumerate(values)}


def binary(n: int, right: int) -> dict[str, float]:
    return by_id([1] * right + [0] * (n - right))


scores = st.lists(st.floats(0, 1), min_size=1, max_size=40)
paired = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


# Intervals


@given(st.integers(1, 500), st.floats(0, 1))
def test_wilsons_interval_equals_scipys_and_holds_the_share(n, share) -> None:
    right = round(share * n)
    result = compute_wilson_interval(right, n)
    theirs = stats.binomtest(right, n).proportion_ci(method="wilson")
    assert (result.low, result.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
    assert 0 <= result.low <= result.mean <= result.high <= 1
    mirrored = compute_wilson_interval(n - right, n)
    assert mirrored.low == pytest.approx(1 - result.high, abs=1e-12)


def test_128_questions_leave_seven_points_on_each_side() -> None:
    result = estimate([1.0] * 102 + [0.0] * 26)
    assert result.high - result.low == pytest.approx(0.138, abs=0.002)
    assert str(result) == "79.7 % [71.9, 85.7]"


@settings(max_examples=20)
@example([6.66e-09])
@given(scores)
def test_a_bootstrap_interval_holds_the_mean_and_lies_between_0_and_1(values) -> None:
    result = estimate(values)
    assert 0 <= result.low <= result.mean <= result.high <= 1
    assert result.mean == pytest.approx(sum(values) / len(values))
    assert result == estimate(values)


def test_values_that_are_few_or_all_alike_get_a_wide_interval_and_not_none() -> None:
    alike = estimate([0.5] * 20)
    others = compute_wilson_interval(0, 20).high
    assert alike.low == pytest.approx(0.5 - 0.5 * others)
    assert alike.high == pytest.approx(0.5 + 0.5 * others)
    few = estimate([0.25, 0.5])
    assert few.high - few.low > 0.5
    assert estimate([1.0] * 12).low == pytest.approx(compute_wilson_interval(12, 12).low)


def test_systems_alike_at_every_question_are_as_near_each_other_as_so_many_documents_show() -> None:
    scores = {f"{number}": float(number % 3 > 0) for number in range(300)}
    documents = {question: str(int(question) // 2) for question in scores}
    result = compare(scores, scores, clusters=documents)
    assert result.high == pytest.approx(compute_wilson_interval(0, 150).high)
    assert result.low == pytest.approx(-result.high)
    assert result.is_non_inferior
    assert result.p_value == 1


def test_intervals_of_questions_that_share_documents_keep_their_confidence() -> None:
    """Where the questions of a document rise and fall together; counted as if they did not, 70 to 80 % are right."""
    source = numpy.random.default_rng(3)
    truth, hits, times, documents, share = 0.7, 0, 120, 12, 6
    clusters = [str(number // share) for number in range(documents * share)]
    for _ in range(times):
        chances = numpy.repeat(source.beta(2 * truth, 2 * (1 - truth), size=documents), share)
        values = (source.random(documents * share) < chances).astype(float).tolist()
        interval = estimate(values, clusters=clusters)
        hits += interval.low <= truth <= interval.high
    assert 0.88 <= hits / times <= 0.99


def test_questions_of_a_document_are_swapped_together() -> None:
    first = {f"{number}": 1.0 for number in range(40)}
    second = {f"{number}": 0.0 for number in range(40)}
    result = compare(first, second, clusters={question: str(int(question) // 10) for question in first})
    assert result.p_value == pytest.approx(2 / 2**4), (
        "four documents have 16 ways of swapping, and two are as far apart"
    )


def test_where_bca_is_not_defined_percentiles_take_its_place(monkeypatch) -> None:
    class Undefined:
        class confidence_interval:  # noqa: N801
            low = high = math.nan

    bootstrap = stats.bootstrap
    monkeypatch.setattr(
        stats,
        "bootstrap",
        lambda *args, **options: Undefined if options["method"] == "BCa" else bootstrap(*args, **options),
    )
    interval = estimate([0.1, 0.9] * 10)
    assert 0.2 < interval.low < 0.5 < interval.high < 0.8


def test_values_that_are_no_scores_and_shares_that_cannot_be_are_refused() -> None:
    for values in ([], [1.5], [-0.1], [math.nan], [0.5, 100.0]):
        with pytest.raises(EvaluationError):
            estimate(values)
    for right, n in ((0, 0), (5, 4), (-1, 4)):
        with pytest.raises(EvaluationError):
            compute_wilson_interval(right, n)


# Paired comparison


@given(st.integers(0, 60), st.integers(0, 60), st.sampled_from([0.5, 1.0]), st.integers(0, 40))
def test_the_p_value_of_differences_of_one_size_is_that_of_tossing_a_coin(first, second, size, equal) -> None:
    """McNemar's, exactly; what is equal counts for nothing."""
    n, least = first + second, min(first, second)
    tail = sum(comb(n, index) for index in range(least + 1)) / 2**n
    differences = [size] * first + [-size] * second + [0.0] * equal
    assert compute_sign_flip_p_value(differences) == pytest.approx(min(1.0, 2 * tail))


@given(paired)
def test_comparing_the_other_way_round_turns_every_sign_and_nothing_else(pairs) -> None:
    a, b = by_id(x for x, _ in pairs), by_id(y for _, y in pairs)
    there, back = compare(a, b), compare(b, a)
    assert there.difference == pytest.approx(-back.difference)
    assert there.p_value == back.p_value
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert -1 <= there.low <= there.difference + 1e-12
    assert there.difference - 1e-12 <= there.high <= 1


def test_the_sign_flip_test_is_scipys_permutation_test() -> None:
    source = random.Random(3)
    a = [source.random() for _ in range(11)]
    b = [source.random() * 0.7 for _ in range(11)]
    theirs = stats.permutation_test(
        (a, b), lambda x, y: numpy.mean(x - y), permutation_type="samples", n_resamples=numpy.inf
    )
    assert compare(by_id(a), by_id(b)).p_value == pytest.approx(theirs.pvalue)


def test_random_patterns_of_signs_are_seeded_and_near_the_normal_distribution() -> None:
    differences = [0.5 + number / 1e4 for number in range(25)] + [-0.5 - number / 1e4 for number in range(12)]
    assert compute_sign_flip_p_value(differences) == compute_sign_flip_p_value(differences)
    deviations = math.fsum(differences) / math.hypot(*differences)
    assert compute_sign_flip_p_value(differences) == pytest.approx(2 * stats.norm.sf(deviations), abs=0.015)


def test_the_interval_of_uncorrelated_pairs_squares_and_adds_wilsons() -> None:
    # Correlation is 0 where both * neither equals the product of the others.
    result = compute_newcombe_interval(12, 28, 18, 42)
    a, b = compute_wilson_interval(40, 100), compute_wilson_interval(30, 100)
    below = math.hypot(a.mean - a.low, b.high - b.mean)
    above = math.hypot(a.high - a.mean, b.mean - b.low)
    assert result == pytest.approx((0.1 - below, 0.1 + above))


def test_the_interval_of_a_paired_difference_covers_the_truth() -> None:
    shares = (0.6, 0.15, 0.08, 0.17)
    tables = numpy.random.default_rng(7).multinomial(128, shares, size=1200)
    intervals = [compute_newcombe_interval(*map(int, table)) for table in tables]
    hits = sum(low <= shares[1] - shares[2] <= high for low, high in intervals)
    assert 0.935 <= hits / len(intervals) <= 0.99


def test_systems_that_had_different_questions_are_not_compared() -> None:
    with pytest.raises(EvaluationError, match="not asked the same questions: 2 have one score, such as task/2"):
        compare(by_id([1, 0, 1, 0]), by_id([1, 0]))
    with pytest.raises(EvaluationError, match="no scores"):
        compare({}, {})


# Corrections


def test_holms_correction_has_known_values_and_says_for_how_many() -> None:
    pair = compare(binary(128, 100), binary(128, 70))
    corrected = correct_p_values([replace(pair, p_value=value) for value in (0.01, 0.04, 0.03, 0.005)])
    assert [comparison.p_value for comparison in corrected] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert {comparison.corrected_for for comparison in corrected} == {4}
    assert pair.formatted_p_value == "< 0.001"
    assert correct_p_values([]) == ()


def test_without_scipy_the_extra_is_named_and_wilsons_interval_still_there(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert estimate([1, 0, 1]).mean == pytest.approx(2 / 3)
    for needs in (lambda: compare(binary(9, 3), binary(9, 6)), lambda: estimate([0.1, 0.7] * 9)):
        with pytest.raises(MissingExtraError, match=r"pip install .*\[eval\]"):
            needs()
