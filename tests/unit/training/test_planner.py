"""The plan of a step has every row once and equal counts on all ranks, within the budget, in any order of rows."""

import itertools
import random
from array import array
from collections import Counter
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rollouts import make_conversation

from memagent_training.algorithm.advantages import TrainingRow
from memagent_training.algorithm.planner import PADDING_ROW_TOKENS, Layout, StepPlan, count_shared_tokens, plan_step
from memagent_training.training_errors import TrainingError

LAYOUTS = list(Layout)


def make_row(prompt, completion, run_id="run", index=0, weight=0.1):
    """Make a row of these token ids; a number stands for so many distinct ids."""
    new_ids = itertools.count(crc32(f"{run_id} {index}".encode()) % 2**31)
    prompt, completion = (
        [next(new_ids) for _ in range(ids)] if isinstance(ids, int) else ids for ids in (prompt, completion)
    )
    return TrainingRow(make_conversation(prompt, completion, ("update", "", index)), 0.5, weight, run_id, 0, 0, index)


def make_rows(*lengths):
    return [make_row(length - 1, 1, f"run-{index}") for index, length in enumerate(lengths)]


def get_ids(row):
    return row.conversation.prompt_ids_P + row.conversation.completion_ids_T


def count_tokens(layout, rows, padding_row_count):
    """Count the tokens of a micro-batch independently of the planner."""
    if layout is Layout.PADDED:
        prompts = [len(row.conversation.prompt_ids_P) for row in rows] or [1]
        completions = [len(row.conversation.completion_ids_T) for row in rows] or [1]
        return (len(rows) + padding_row_count) * (max(prompts) + max(completions))
    if layout is Layout.PACKED:
        return sum(len(get_ids(row)) for row in rows) + PADDING_ROW_TOKENS * padding_row_count
    nodes = {tuple(get_ids(row)[: end + 1]) for row in rows for end in range(len(get_ids(row)))}
    return len(nodes) + (PADDING_ROW_TOKENS if padding_row_count else 0)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@st.composite
def random_rows(draw):
    """Rows that sometimes share prefixes or have equal tokens."""
    pairs = draw(st.lists(st.tuples(TOKENS, TOKENS), max_size=14))
    return [
        make_row(prompt, completion, f"run-{index}", weight=index) for index, (prompt, completion) in enumerate(pairs)
    ]


def compute_idle_share(plan: StepPlan) -> float:
    """Compute the share of time, in tokens, that ranks spend waiting for each other."""
    return 1 - plan.forwarded_tokens / (len(plan.micro_batches) * plan.critical_tokens)


@settings(max_examples=40)
@given(random_rows(), st.integers(1, 4), st.integers(24, 60), st.sampled_from(LAYOUTS))
def test_plan_has_every_row_once_with_equal_counts_within_the_budget(rows, ranks, budget, layout):
    """A bug of another trainer: it dropped random rows until they divided evenly."""
    plan = plan_step(rows, ranks=ranks, token_budget=budget, layout=layout)
    batches = list(itertools.chain(*plan.micro_batches))
    assert Counter(index for batch in batches for index in batch.rows) == Counter(range(len(rows)))
    assert len(plan.micro_batches) == ranks
    for position in zip(*plan.micro_batches, strict=True):
        assert len({len(batch.rows) + batch.padding_row_count for batch in position}) == 1
        assert any(batch.rows for batch in position)
    for batch in batches:
        assert batch.tokens == count_tokens(layout, [rows[index] for index in batch.rows], batch.padding_row_count)
        assert batch.tokens <= budget
    assert not rows or 0 <= compute_idle_share(plan) < 1
    assert 0 <= plan.padding_tokens <= plan.forwarded_tokens


@given(random_rows(), st.integers(1, 3), st.sampled_from(LAYOUTS), st.randoms())
def test_plan_does_not_depend_on_the_order_of_rows(rows, ranks, layout, rng):
    def plan_run_ids(ordered_rows):
        plan = plan_step(ordered_rows, ranks=ranks, token_budget=40, layout=layout)
        return [[[ordered_rows[index].run_id for index in batch.rows] for batch in rank] for rank in plan.micro_batches]

    assert plan_run_ids(rows) == plan_run_ids(rng.sample(rows, len(rows)))


class TestLayouts:
    def test_padded_batches_have_rows_of_similar_length(self):
        rows = make_rows(4, 40, 4, 40, 4, 40)
        plan = plan_step(rows, ranks=1, token_budget=120, layout=Layout.PADDED)
        assert plan.forwarded_tokens == sum(len(get_ids(row)) for row in rows)

    def test_packed_rows_fill_the_budget(self):
        plan = plan_step(make_rows(7, 6, 4, 3), ranks=1, token_budget=10, layout=Layout.PACKED)
        assert sorted(batch.tokens for batch in plan.micro_batches[0]) == [10, 10]
        assert plan.padding_tokens == 0

    def test_shared_prefix_is_forwarded_once_in_one_batch(self):
        sections = [list(range(100 * number, 100 * number + 20)) for number in range(1, 4)]
        rows = [make_row([*section, run], [7, run], f"run-{run}") for run in range(4) for section in sections]
        plan = plan_step(rows, ranks=1, token_budget=40, layout=Layout.PREFIX_TREE)
        assert plan.forwarded_tokens == 3 * (20 + 4 * 3)
        for batch in plan.micro_batches[0]:
            assert len({get_ids(rows[index])[0] for index in batch.rows}) == 1

    def test_tree_above_the_budget_is_cut_where_least_is_shared(self):
        """In order, rows 0 to 2 come first and the cut separates 2 and 3, which share most; better is 0, 1 | 2, 3."""
        rows = [
            make_row([1], [10], "a"),
            make_row([1], [11], "b"),
            make_row([1, 5, 5, 5], [12], "c"),
            make_row([1, 5, 5, 5], [13], "d"),
        ]
        plan = plan_step(rows, ranks=1, token_budget=7, layout=Layout.PREFIX_TREE)
        assert {batch.rows for batch in plan.micro_batches[0]} == {(0, 1), (2, 3)}
        assert plan.forwarded_tokens == 9


class TestRanks:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_rows_that_fit_on_one_rank_are_spread_over_all(self, layout):
        plan = plan_step(make_rows(*[10] * 8), ranks=4, token_budget=1000, layout=layout)
        assert [[batch.tokens for batch in rank] for rank in plan.micro_batches] == [[20]] * 4
        assert compute_idle_share(plan) == 0

    @pytest.mark.parametrize(("layout", "critical_tokens"), [*zip(LAYOUTS, [148, 152, 168], strict=True)])
    def test_ranks_stay_within_the_budget_with_one_long_row_and_many_short_ones(self, layout, critical_tokens):
        plan = plan_step(make_rows(100, *[4] * 25), ranks=2, token_budget=100, layout=layout)
        assert max(batch.tokens for rank in plan.micro_batches for batch in rank) == 100
        assert plan.critical_tokens == critical_tokens, "micro-batches with too many rows are halved"

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_ranks_are_idle_less_than_8_percent_of_the_time(self, layout):
        rng = random.Random(1)
        rows = make_rows(*(int(10 ** rng.uniform(1.5, 3)) for _ in range(800)))
        plan = plan_step(rows, ranks=4, token_budget=4000, layout=layout)
        assert compute_idle_share(plan) < 0.08
        assert len(plan.micro_batches[0]) < 1.3 * sum(len(get_ids(row)) for row in rows) / (4 * 4000)

    def test_largest_micro_batch_comes_first(self):
        plan = plan_step(make_rows(*range(10, 90)), ranks=2, token_budget=200, layout=Layout.PADDED)
        largest_tokens = [max(batch.tokens for batch in position) for position in zip(*plan.micro_batches, strict=True)]
        assert largest_tokens == sorted(largest_tokens, reverse=True)

    def test_padding_rows_count_as_padding(self):
        plan = plan_step(make_rows(700, 500, 600), ranks=2, token_budget=1200, layout=Layout.PACKED)
        assert (plan.row_tokens, plan.forwarded_tokens, len(plan.micro_batches[0])) == (1800, 1802, 1)
        assert f"{plan.padding_tokens} {compute_idle_share(plan):.1%}" == "2 18.1%"


class TestRefusals:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_row_above_the_budget_names_its_run_and_the_remedy(self, layout):
        with pytest.raises(TrainingError, match=r"30 tokens exceeds.*run-1.*at least 30"):
            plan_step(make_rows(10, 30), ranks=1, token_budget=29, layout=layout)


class TestPrefixes:
    @given(TOKENS, TOKENS, st.sampled_from([0, 511, 512, 513, 2000]))
    def test_shared_token_count_equals_a_simple_loop(self, left, right, shared_count):
        left, right = (array("I", [5] * shared_count + suffix) for suffix in (left, right))
        expected = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
        assert count_shared_tokens(left, right) == count_shared_tokens(right, left) == expected
