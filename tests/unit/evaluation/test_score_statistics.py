"""Intervals, paired comparisons and corrections, checked against known values, SciPy and simulations."""

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


def make_scores_by_id(values) -> dict[str, float]:
    return {f"task/{index}": float(value) for index, value in enumerate(values)}


def make_binary_scores(question_count: int, right_count: int) -> dict[str, float]:
    return make_scores_by_id([1] * right_count + [0] * (question_count - right_count))


scores = st.lists(st.floats(0, 1), min_size=1, max_size=40)
paired = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


# Intervals


@given(st.integers(1, 500), st.floats(0, 1))
def test_wilson_interval_equals_scipy_and_contains_the_share(n, share) -> None:
    right_count = round(share * n)
    interval = compute_wilson_interval(right_count, n)
    scipy_interval = stats.binomtest(right_count, n).proportion_ci(method="wilson")
    assert (interval.low, interval.high) == pytest.approx((scipy_interval.low, scipy_interval.high), abs=1e-9)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    mirrored_interval = compute_wilson_interval(n - right_count, n)
    assert mirrored_interval.low == pytest.approx(1 - interval.high, abs=1e-12)


def test_128_questions_give_an_interval_of_seven_points_on_each_side() -> None:
    interval = estimate([1.0] * 102 + [0.0] * 26)
    assert interval.high - interval.low == pytest.approx(0.138, abs=0.002)
    assert str(interval) == "79.7 % [71.9, 85.7]"


@settings(max_examples=20)
@example([6.66e-09])
@given(scores)
def test_bootstrap_interval_contains_the_mean_and_lies_between_0_and_1(values) -> None:
    interval = estimate(values)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert interval.mean == pytest.approx(sum(values) / len(values))
    assert interval == estimate(values)


def test_few_or_equal_values_get_a_wide_interval() -> None:
    equal_values_interval = estimate([0.1] * 22, clusters=["a"] * 3 + list(map(str, range(19))))  # 0.3 / 3 is not 0.1
    wilson_high = compute_wilson_interval(0, 20).high
    assert equal_values_interval.low == pytest.approx(0.1 - 0.1 * wilson_high)
    assert equal_values_interval.high == pytest.approx(0.1 + 0.9 * wilson_high)
    two_values_interval = estimate([0.25, 0.5])
    assert two_values_interval.high - two_values_interval.low > 0.5
    assert estimate([1.0] * 12).low == pytest.approx(compute_wilson_interval(12, 12).low)


def test_equal_systems_have_an_interval_as_wide_as_their_documents_allow() -> None:
    scores = {f"{number}": float(number % 3 > 0) for number in range(300)}
    documents = {question: str(int(question) // 2) for question in scores}
    comparison = compare(scores, scores, clusters=documents)
    assert comparison.high == pytest.approx(compute_wilson_interval(0, 150).high)
    assert comparison.low == pytest.approx(-comparison.high)
    assert comparison.is_non_inferior
    assert comparison.p_value == 1


def test_clustered_intervals_keep_their_coverage() -> None:
    """Questions of a document are correlated here; if that were ignored, coverage would be 70 to 80 %."""
    generator = numpy.random.default_rng(3)
    true_mean, hit_count, trial_count, count, size = 0.7, 0, 120, 12, 6
    clusters = [str(question // size) for question in range(count * size)]  # documents of six questions
    for _ in range(trial_count):
        chances = numpy.repeat(generator.beta(2 * true_mean, 2 * (1 - true_mean), size=count), size)
        values = (generator.random(count * size) < chances).astype(float).tolist()
        interval = estimate(values, clusters=clusters)
        hit_count += interval.low <= true_mean <= interval.high
    assert 0.88 <= hit_count / trial_count <= 0.99


def test_sign_flips_apply_to_all_questions_of_a_document() -> None:
    all_right = {f"{number}": 1.0 for number in range(40)}
    all_wrong = {f"{number}": 0.0 for number in range(40)}
    comparison = compare(all_right, all_wrong, clusters={question: str(int(question) // 10) for question in all_right})
    assert comparison.p_value == pytest.approx(2 / 2**4), "four documents have 16 sign patterns, and two are as extreme"


def test_percentile_bootstrap_replaces_an_undefined_bca(monkeypatch) -> None:
    class UndefinedResult:
        class confidence_interval:  # noqa: N801
            low = high = math.nan

    bootstrap = stats.bootstrap
    monkeypatch.setattr(
        stats,
        "bootstrap",
        lambda *args, **options: UndefinedResult if options["method"] == "BCa" else bootstrap(*args, **options),
    )
    interval = estimate([0.1, 0.9] * 10)
    assert 0.2 < interval.low < 0.5 < interval.high < 0.8


def test_invalid_scores_are_refused() -> None:
    for values in ([], [1.5], [-0.1], [math.nan], [0.5, 100.0]):
        with pytest.raises(EvaluationError):
            estimate(values)


# Paired comparison


@given(st.integers(0, 60), st.integers(0, 60), st.sampled_from([0.5, 1.0]), st.integers(0, 40))
def test_p_value_of_differences_of_one_size_is_binomial(positive_count, negative_count, size, tie_count) -> None:
    """This is McNemar's exact test; ties are ignored."""
    n, smaller_count = positive_count + negative_count, min(positive_count, negative_count)
    tail_probability = sum(comb(n, index) for index in range(smaller_count + 1)) / 2**n
    differences = [size] * positive_count + [-size] * negative_count + [0.0] * tie_count
    assert compute_sign_flip_p_value(differences) == pytest.approx(min(1.0, 2 * tail_probability))


@given(paired)
def test_swapping_the_systems_only_flips_signs(pairs) -> None:
    a, b = make_scores_by_id(x for x, _ in pairs), make_scores_by_id(y for _, y in pairs)
    comparison, swapped_comparison = compare(a, b), compare(b, a)
    assert comparison.difference == pytest.approx(-swapped_comparison.difference)
    assert comparison.p_value == swapped_comparison.p_value
    assert (comparison.low, comparison.high) == pytest.approx((-swapped_comparison.high, -swapped_comparison.low))
    assert -1 <= comparison.low <= comparison.difference + 1e-12
    assert comparison.difference - 1e-12 <= comparison.high <= 1


def test_sign_flip_test_equals_scipy_permutation_test() -> None:
    generator = random.Random(3)
    a = [generator.random() for _ in range(11)]
    b = [generator.random() * 0.7 for _ in range(11)]
    scipy_test = stats.permutation_test(
        (a, b), lambda x, y: numpy.mean(x - y), permutation_type="samples", n_resamples=numpy.inf
    )
    assert compare(make_scores_by_id(a), make_scores_by_id(b)).p_value == pytest.approx(scipy_test.pvalue)


def test_sampled_sign_flips_are_seeded_and_close_to_the_normal_p_value() -> None:
    differences = [0.5 + number / 1e4 for number in range(25)] + [-0.5 - number / 1e4 for number in range(12)]
    assert compute_sign_flip_p_value(differences) == compute_sign_flip_p_value(differences)
    z_score = math.fsum(differences) / math.hypot(*differences)
    assert compute_sign_flip_p_value(differences) == pytest.approx(2 * stats.norm.sf(z_score), abs=0.015)


def test_newcombe_interval_of_uncorrelated_pairs_combines_wilson_intervals() -> None:
    # The correlation is 0 where both * neither equals only_first * only_second.
    interval = compute_newcombe_interval(12, 28, 18, 42)
    a, b = compute_wilson_interval(40, 100), compute_wilson_interval(30, 100)
    width_below = math.hypot(a.mean - a.low, b.high - b.mean)
    width_above = math.hypot(a.high - a.mean, b.mean - b.low)
    assert interval == pytest.approx((0.1 - width_below, 0.1 + width_above))


def test_newcombe_interval_has_nominal_coverage() -> None:
    shares = (0.6, 0.15, 0.08, 0.17)
    tables = numpy.random.default_rng(7).multinomial(128, shares, size=1200)
    intervals = [compute_newcombe_interval(*map(int, table)) for table in tables]
    hit_count = sum(low <= shares[1] - shares[2] <= high for low, high in intervals)
    assert 0.935 <= hit_count / len(intervals) <= 0.99


def test_systems_with_different_questions_are_not_compared() -> None:
    with pytest.raises(EvaluationError, match="not asked the same questions: 2 have one score, such as task/2"):
        compare(make_scores_by_id([1, 0, 1, 0]), make_scores_by_id([1, 0]))
    with pytest.raises(EvaluationError, match="no scores"):
        compare({}, {})


# Corrections


def test_holm_correction_has_known_values_and_records_the_count() -> None:
    original = compare(make_binary_scores(128, 100), make_binary_scores(128, 70))
    comparisons = correct_p_values([replace(original, p_value=value) for value in (0.01, 0.04, 0.03, 0.005)])
    assert [comparison.p_value for comparison in comparisons] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert {comparison.corrected_for for comparison in comparisons} == {4}
    assert original.formatted_p_value == "< 0.001"
    assert correct_p_values([]) == ()


def test_wilson_interval_needs_no_scipy_and_other_statistics_name_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert estimate([1, 0, 1]).mean == pytest.approx(2 / 3)
    first, second = make_binary_scores(9, 3), make_binary_scores(9, 6)
    for use_scipy in (lambda: compare(first, second), lambda: estimate([0.1, 0.7] * 9)):
        with pytest.raises(MissingExtraError, match=r"pip install .*\[eval\]"):
            use_scipy()
