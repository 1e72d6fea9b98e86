"""What an evaluation cost: percentiles and prices."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.evaluation import failed, results, row

from memagent_evaluation.report import find_percentile, render_report, summarize
from memagent_graph.errors import EvaluationError
from memagent_graph.results import Prices


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.sampled_from([50, 95, 99, 100]))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values, percent) -> None:
    found = find_percentile(values, percent)
    enough = math.ceil(percent / 100 * len(values))
    assert sum(value <= found for value in values) >= enough
    assert sum(value < found for value in values) < enough


def test_the_report_has_slow_questions_and_the_price() -> None:
    rows = [row(index=index, seconds=float(index + 1), prompt_tokens=1_000_000) for index in range(100)]
    rows.append(failed(index=100))
    report = render_report(results(*rows), prices=Prices(0.5, 2.0))
    assert "| 50.50 | 50.00 | 95.00 | 99.00 |" in report
    assert "| 0.5 | 50 |" in report
    assert "at 0.5 for a million prompt tokens" in report
    (cell,) = summarize(results(*rows), Prices(0.5, 2.0))
    assert cell["seconds"] == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert cell["price"] == pytest.approx(0.5 + 2e-5)
    assert "price" not in render_report(results(*rows)).casefold()
    (nothing,) = summarize(results(failed()), Prices(1, 1))
    assert (nothing["price"], nothing["seconds"]["p50"]) == (None, None)


def test_one_price_alone_is_refused() -> None:
    assert Prices.of(None, None) is None
    assert Prices.of(0.0, 0.0) == Prices(0.0, 0.0)
    with pytest.raises(EvaluationError, match=r"only one.*price_in and price_out"):
        Prices.of(1.0, None)
