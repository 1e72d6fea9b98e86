"""The plan of a step: every row once, equal counts on every rank, within the budget, in any order of rows."""

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
from memagent_training.algorithm.planner import (
    PADDING_ROW_TOKENS,
    Layout,
    StepPlan,
    count_shared_tokens,
    plan_step,
)
from memagent_training.training_errors import TrainingError

LAYOUTS = list(Layout)


def make_row(prompt, completion, run_id="run", index=0, weight=0.1):
    """A row of these token ids, or of so many distinct ones where a number is given."""
    numbers = itertools.count(crc32(f"{run_id} {index}".encode()) % 2**31)
    prompt, completion = (
        [next(numbers) for _ in range(part)] if isinstance(part, int) else part for part in (prompt, completion)
    )
    return TrainingRow(make_conversation(prompt, completion, ("update", "", index)), 0.5, weight, run_id, 0, 0, index)


def make_rows(*lengths):
    return [make_row(length - 1, 1, f"run-{place}") for place, length in enumerate(lengths)]


def ids(one):
    return one.conversation.prompt_ids_P + one.conversation.completion_ids_T


def count_tokens(layout, rows, padding_rows):
    """What a micro-batch costs, worked out anew."""
    if layout is Layout.PADDED:
        prompts = [len(row.conversation.prompt_ids_P) for row in rows] or [1]
        completions = [len(row.conversation.completion_ids_T) for row in rows] or [1]
        return (len(rows) + padding_rows) * (max(prompts) + max(completions))
    if layout is Layout.PACKED:
        return sum(len(ids(row)) for row in rows) + PADDING_ROW_TOKENS * padding_rows
    nodes = {tuple(ids(row)[: end + 1]) for row in rows for end in range(len(ids(row)))}
    return len(nodes) + (PADDING_ROW_TOKENS if padding_rows else 0)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@st.composite
def many_rows(draw):
    """Rows that share prefixes now and then; some with the very same tokens."""
    pairs = draw(st.lists(st.tuples(TOKENS, TOKENS), max_size=14))
    return [
        make_row(prompt, completion, f"run-{place}", weight=place) for place, (prompt, completion) in enumerate(pairs)
    ]


def idle_share(plan: StepPlan) -> float:
    """The share of the ranks' time, in tokens, that is spent waiting for another."""
    return 1 - plan.forwarded_tokens / (len(plan.micro_batches) * plan.critical_tokens)


@settings(max_examples=40)
@given(many_rows(), st.integers(1, 4), st.integers(24, 60), st.sampled_from(LAYOUTS))
def test_every_row_once_equal_counts_and_within_the_budget(rows, ranks, budget, layout):
    """A rival's bug: rows dropped at random until they divide evenly."""
    plan = plan_step(rows, ranks=ranks, token_budget=budget, layout=layout)
    batches = list(itertools.chain(*plan.micro_batches))
    assert Counter(index for batch in batches for index in batch.rows) == Counter(range(len(rows)))
    assert len(plan.micro_batches) == ranks
    for position in zip(*plan.micro_batches, strict=True):
        assert len({len(batch.rows) + batch.padding_rows for batch in position}) == 1
        assert any(batch.rows for batch in position)
    for batch in batches:
        assert batch.tokens == count_tokens(layout, [rows[index] for index in batch.rows], batch.padding_rows)
        assert batch.tokens <= budget
    assert not rows or 0 <= idle_share(plan) < 1
    assert 0 <= plan.padding_tokens <= plan.forwarded_tokens


@given(many_rows(), st.integers(1, 3), st.sampled_from(LAYOUTS), st.randoms())
def test_the_order_of_rows_changes_nothing(rows, ranks, layout, rng):
    def content(ordered):
        plan = plan_step(ordered, ranks=ranks, token_budget=40, layout=layout)
        return [[[ordered[index].run_id for index in batch.rows] for batch in rank] for rank in plan.micro_batches]

    assert content(rows) == content(rng.sample(rows, len(rows)))


class TestLayouts:
    def test_padding_puts_rows_of_like_length_together(self):
        rows = make_rows(4, 40, 4, 40, 4, 40)
        plan = plan_step(rows, ranks=1, token_budget=120, layout=Layout.PADDED)
        assert plan.forwarded_tokens == sum(len(ids(row)) for row in rows)

    def test_packed_rows_fill_the_budget(self):
        plan = plan_step(make_rows(7, 6, 4, 3), ranks=1, token_budget=10, layout=Layout.PACKED)
        assert sorted(batch.tokens for batch in plan.micro_batches[0]) == [10, 10]
        assert plan.padding_tokens == 0

    def test_a_prefix_is_forwarded_once_and_rows_that_share_it_stay_together(self):
        sections = [list(range(100 * s, 100 * s + 20)) for s in range(1, 4)]
        rows = [make_row([*section, run], [7, run], f"run-{run}") for run in range(4) for section in sections]
        plan = plan_step(rows, ranks=1, token_budget=40, layout=Layout.PREFIX_TREE)
        assert plan.forwarded_tokens == 3 * (20 + 4 * 3)
        for batch in plan.micro_batches[0]:
            assert len({ids(rows[index])[0] for index in batch.rows}) == 1

    def test_a_tree_too_large_for_the_budget_is_cut_where_least_is_shared(self):
        """In order the tree takes rows 0 to 2 first, and cuts between 2 and 3 who share most; better is 0, 1 | 2, 3."""
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
    def test_ranks_share_rows_that_would_fit_on_one(self, layout):
        plan = plan_step(make_rows(*[10] * 8), ranks=4, token_budget=1000, layout=layout)
        assert [[batch.tokens for batch in rank] for rank in plan.micro_batches] == [[20]] * 4
        assert idle_share(plan) == 0

    @pytest.mark.parametrize(("layout", "critical"), [*zip(LAYOUTS, [148, 152, 168], strict=True)])
    def test_ranks_stay_within_the_budget_with_one_long_row_and_many_short_ones(self, layout, critical):
        rows = make_rows(100, *[4] * 25)
        plan = plan_step(rows, ranks=2, token_budget=100, layout=layout)
        assert max(batch.tokens for rank in plan.micro_batches for batch in rank) == 100
        assert plan.critical_tokens == critical, "what has too many rows is halved"

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_ranks_are_nearly_always_busy(self, layout):
        rng = random.Random(1)
        rows = make_rows(*(int(10 ** rng.uniform(1.5, 3)) for _ in range(800)))
        plan = plan_step(rows, ranks=4, token_budget=4000, layout=layout)
        assert idle_share(plan) < 0.08
        assert len(plan.micro_batches[0]) < 1.3 * sum(len(ids(row)) for row in rows) / (4 * 4000)

    def test_the_heaviest_micro_batch_comes_first(self):
        plan = plan_step(make_rows(*range(10, 90)), ranks=2, token_budget=200, layout=Layout.PADDED)
        heaviest = [max(batch.tokens for batch in position) for position in zip(*plan.micro_batches, strict=True)]
        assert heaviest == sorted(heaviest, reverse=True)

    def test_padding_rows_count_as_padding(self):
        plan = plan_step(make_rows(700, 500, 600), ranks=2, token_budget=1200, layout=Layout.PACKED)
        assert (plan.row_tokens, plan.forwarded_tokens, len(plan.micro_batches[0])) == (1800, 1802, 1)
        assert f"{plan.padding_tokens} {idle_share(plan):.1%}" == "2 18.1%"


class TestRefusals:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_row_beyond_the_budget_names_its_run_and_the_remedy(self, layout):
        with pytest.raises(TrainingError, match=r"30 tokens exceeds.*run-1.*at least 30"):
            plan_step(make_rows(10, 30), ranks=1, token_budget=29, layout=layout)


class TestPrefixes:
    @given(TOKENS, TOKENS, st.sampled_from([0, 511, 512, 513, 2000]))
    def test_shared_prefix_is_that_of_a_plain_count(self, left, right, same):
        left, right = (array("I", [5] * same + tail) for tail in (left, right))
        expected = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
        assert count_shared_tokens(left, right) == count_shared_tokens(right, left) == expected
