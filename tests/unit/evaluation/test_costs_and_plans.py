"""What an evaluation costs, before and after: percentiles, prices, the plan, and the table for papers and sheets."""

from __future__ import annotations

import csv
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.evaluation import Keys, failed, results, row

from memagent_evaluation.planned_costs import plan_as_json, planned_costs, render_plan
from memagent_evaluation.report import percentile, render_report, summary
from memagent_evaluation.result_table import EvaluationPlan
from memagent_evaluation.standings import as_csv, as_latex, standings
from memagent_evaluation.systems import load_system
from memagent_graph import Document
from memagent_graph.errors import EvaluationError
from memagent_graph.prices import Prices, prices_of


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.sampled_from([50, 95, 99, 100]))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values, percent) -> None:
    found = percentile(values, percent)
    enough = math.ceil(percent / 100 * len(values))
    assert sum(each <= found for each in values) >= enough
    assert sum(each < found for each in values) < enough


def test_the_report_has_slow_questions_and_the_price() -> None:
    rows = [row(index=index, seconds=float(index + 1), prompt_tokens=1_000_000) for index in range(100)]
    rows.append(failed(index=100))
    report = render_report(results(*rows), prices=Prices(0.5, 2.0))
    assert "| 50.50 | 50.00 | 95.00 | 99.00 |" in report
    assert "| 0.5 | 50 |" in report
    assert "at 0.5 for a million prompt tokens" in report
    (cell,) = summary(results(*rows), Prices(0.5, 2.0))
    assert cell["seconds"] == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert cell["price"] == pytest.approx(0.5 + 2e-5)
    assert "price" not in render_report(results(*rows)).casefold()
    (nothing,) = summary(results(failed()), Prices(1, 1))
    assert (nothing["price"], nothing["seconds"]["p50"]) == (None, None)


def test_one_price_alone_is_refused() -> None:
    assert prices_of(None, None) is None
    assert prices_of(0.0, 0.0) == Prices(0.0, 0.0)
    with pytest.raises(EvaluationError, match=r"only one.*--price-in and --price-out"):
        prices_of(1.0, None)


async def planned(make_reader, systems, lengths, count=5, **plan):
    reader = make_reader()
    plan = EvaluationPlan.grid(systems, ("keys",), lengths, count, **plan)
    strategies = {name: load_system(name, reader).strategy for name in systems}
    return plan, planned_costs(plan, {"keys": Keys()}, strategies, await reader.aprepare())


async def test_a_plan_bounds_what_is_then_asked(make_reader) -> None:
    systems = ("memagent", "full_context", "middle_truncation", "refine")
    plan, costs = await planned(make_reader, systems, (300, 4000))
    found = {(each.system, each.length): each for each in costs}
    assert found["full_context", 4000].calls == 0
    assert found["full_context", 300].calls == 5
    for (system, length), cost in found.items():
        reader = make_reader()
        task = Keys()
        for index in range(plan.cells[0].count):
            sample = task.sample(length // 2, index)  # whose words have about two tokens each
            document = reader.store.add(Document.of("".join(sample.text())))
            attempt = await load_system(system, reader).attempt(
                document, sample.question, answer_tokens=60, run_id=f"{system} {length} {index}"
            )
            if cost.calls:
                assert attempt.usage.turns <= cost.calls / 5 + 1
                assert attempt.usage.completion_tokens <= cost.completion_tokens / 5
                assert attempt.usage.prompt_tokens <= cost.prompt_tokens / 5


async def test_repeats_and_prices_multiply_and_totals_add_up(make_reader) -> None:
    _, once = await planned(make_reader, ("memagent",), (300, 4000))
    _, twice = await planned(make_reader, ("memagent",), (300, 4000), repeats=2)
    assert [each.prompt_tokens for each in twice] == [2 * each.prompt_tokens for each in once]
    told = plan_as_json(twice, prices=Prices(1.0, 0.0), tokens_per_second=100.0)
    assert told["total"]["prompt_tokens"] == sum(each.prompt_tokens for each in twice)
    assert told["price"] == told["total"]["prompt_tokens"] / 1e6
    assert told["seconds"] == (told["total"]["prompt_tokens"] + told["total"]["completion_tokens"]) / 100
    text = render_plan(twice, prices=Prices(1.0, 0.0), tokens_per_second=100.0)
    assert "| all |" in text


def test_the_main_table_is_there_for_spreadsheets_and_papers() -> None:
    rows = [row(index=index) for index in range(4)] + [row("a_b", index=index, right=index < 2) for index in range(4)]
    found = standings(results(*rows))
    first, second = csv.DictReader(io.StringIO(as_csv(found)))
    assert (first["system"], float(first["accuracy_mean"]), first["against_first_p_value"]) == ("memagent", 1.0, "")
    assert (second["system"], float(second["against_first_difference"])) == ("a_b", -0.5)
    table = as_latex(found)
    assert r"keys & 1K tokens & a\_b & 4 & 50.0 [" in table
    assert table.count(r"\\") == 3
    assert r"0 \%" in table
    assert as_csv([]) == "system\n"
