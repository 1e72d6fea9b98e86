"""Planning before the first question: lengths, plans, and checks of answer lengths and questions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.evaluation import KeyTask

from memagent_evaluation.data_files.qa_records import Paragraph, QARecord
from memagent_evaluation.planning import DEFAULT_LENGTHS, build_plan, check_plan, parse_lengths
from memagent_evaluation.result_table import EvaluationPlan, PlanCell
from memagent_evaluation.samples import LengthUnit
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.passages import make_passage_task
from memagent_graph.errors import BudgetError, EvaluationError
from memagent_graph.tokenizers import load_tokenizer


def make_file_task(counts: dict[int, int]) -> SimpleNamespace:
    """Return a task that has these counts of samples by length, as one from a data file has."""
    return SimpleNamespace(lengths=tuple(counts), count=counts.get)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("1k,8K", (1024, 8192)), ("3.5M, 500", (3_670_016, 500)), ("1k,1024", (1024,)), ("0.25k,", (256,))],
)
def test_lengths_are_parsed_with_suffixes_and_without_duplicates(text, lengths) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", ",", "0", "-1", "8q", "8k 16k", "nan"])
def test_invalid_lengths_are_refused(text) -> None:
    with pytest.raises(EvaluationError, match="length"):
        parse_lengths(text)


def test_explicit_lengths_apply_to_all_tasks() -> None:
    tasks = {"keys": KeyTask(), "file": make_file_task({100: 3})}
    assert build_plan(("memagent",), tasks, (10, 20), 5) == EvaluationPlan.grid(
        ("memagent",), ("keys", "file"), (10, 20), 5
    )


def test_default_lengths_of_a_data_file_are_its_own() -> None:
    passages = SimpleNamespace(unit=LengthUnit.PASSAGES)
    tasks = {"keys": KeyTask(), "passages": passages, "file": make_file_task({100: 3, 4000: 700})}
    plan = build_plan(("memagent",), tasks, None, 5)
    assert [cell for cell in plan.cells if cell.task == "file"] == [PlanCell("file", 100, 3), PlanCell("file", 4000, 5)]
    for name, unit in (("keys", LengthUnit.TOKENS), ("passages", LengthUnit.PASSAGES)):
        cells = [cell for cell in plan.cells if cell.task == name]
        assert cells == [PlanCell(name, length, 5) for length in DEFAULT_LENGTHS[unit]]


@given(
    st.lists(
        st.builds(PlanCell, st.sampled_from(["a", "b"]), st.integers(1, 4), st.integers(1, 4)),
        max_size=6,
        unique_by=lambda cell: (cell.task, cell.length),
    )
)
def test_plan_asks_each_system_every_question_once_longest_first(cells) -> None:
    keys = list(EvaluationPlan(("x", "y"), tuple(cells)).iter_keys())
    assert len(keys) == len(set(keys)) == 2 * sum(cell.count for cell in cells)
    for cell in cells:
        assert {key[3] for key in keys if key[1:3] == (cell.task, cell.length)} == set(range(cell.count))
    assert [key[2] for key in keys] == sorted((key[2] for key in keys), reverse=True)
    assert [key[0] for key in keys] == ["x", "y"] * (len(keys) // 2), "the systems ask about one document together"


async def test_answer_length_that_leaves_no_room_is_refused_with_the_task_name(make_reader) -> None:
    context = await make_reader().aprepare()
    context_without_room = replace(context, budget=replace(context.budget, answer_tokens=5000))
    with pytest.raises(BudgetError, match="keys does not fit in the policy's context window"):
        check_plan(EvaluationPlan.grid((), ("keys",), (100,), 1), {"keys": KeyTask()}, context_without_room)
    check_plan(EvaluationPlan.grid((), ("keys",), (100,), 1), {"keys": KeyTask()}, context)


async def test_length_too_small_for_any_planned_sample_is_refused(make_reader) -> None:
    context = await make_reader(question_tokens=60).aprepare()
    tasks = {"niah_single_1": load_task("niah_single_1", TaskSettings(load_tokenizer("embedded")))}
    tasks["niah_single_1"].sample(171, 127)
    with pytest.raises(EvaluationError, match="171 tokens is too small"):
        check_plan(EvaluationPlan.grid((), tuple(tasks), (171,), 128), tasks, context)
    check_plan(EvaluationPlan.grid((), tuple(tasks), (200,), 128), tasks, context)


async def test_every_question_of_a_data_file_is_checked(make_reader) -> None:
    context = await make_reader(question_tokens=40).aprepare()

    def make_records(long_index: int) -> list[QARecord]:
        return [
            QARecord(str(index), f"Who is pupil {index}?" + " And who?" * (20 if index == long_index else 0), ("Ada",),
                     (Paragraph("Pupil", f"Pupil {index} is Ada."),), (Paragraph("Other", f"Nobody knows {index}."),))
            for index in range(50)
        ]  # fmt: skip

    settings = TaskSettings(context.tokenizer)
    tasks = {"qa_1": make_passage_task(make_records(49), "qa_1", settings)}
    with pytest.raises(BudgetError, match=r"qa_1 .* the question has"):
        check_plan(EvaluationPlan.grid((), ("qa_1",), (100_000,), 50), tasks, context)
    tasks = {"qa_1": make_passage_task(make_records(50), "qa_1", settings)}
    check_plan(EvaluationPlan.grid((), ("qa_1",), (100_000,), 50), tasks, context)
