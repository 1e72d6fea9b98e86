"""Estimates an evaluation before it begins: documents, chunks, calls, tokens, time and price."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, Final

from memagent_evaluation.markdown_tables import length_label, markdown
from memagent_evaluation.planning import completion_tokens
from memagent_evaluation.result_table import Cell, Plan
from memagent_evaluation.sample_documents import sample_of
from memagent_evaluation.sample_size import smallest_difference
from memagent_evaluation.samples import LengthUnit, Task
from memagent_evaluation.tasks.generated import GeneratedTask
from memagent_graph.prices import Prices
from memagent_graph.reading.state import ReaderContext
from memagent_graph.strategies import Strategy
from memagent_graph.strategies.excerpts import QUESTION, Excerpt, words_around
from memagent_graph.strategies.full_context import FullContext

_TOKENS_OF_A_PASSAGE: Final = 140
"""RULER-HQA's, about."""
_LEGEND: Final = (
    "At most, with memories and answers as long as they may be. One pass over the chunks and an answer is counted: a "
    "strategy that merges, looks back or reads again takes more, one that stops early less. 0 calls: it does not fit."
)


@dataclass(frozen=True, slots=True)
class PlannedCost:
    """The cost of one system at one task and length, for all its questions."""

    system: str
    task: str
    length: int
    unit: str
    questions: int
    """With repeats."""
    documents: int
    """The documents it reads; each question on the same document counts."""
    chunks: int
    calls: int
    prompt_tokens: int
    completion_tokens: int


def planned_costs(
    plan: Plan, tasks: Mapping[str, Task], strategies: Mapping[str, Strategy], context: ReaderContext
) -> list[PlannedCost]:
    """By task, length and system.

    Args:
        plan: the questions.
        tasks: by name.
        strategies: how each system reads.
        context: what they read with.
    """
    found = []
    for cell in plan.cells:
        task = tasks[cell.task]
        asked = sample_of(task, cell.length, 0).question
        question = context.tokenizer.count(asked)
        if task.unit is LengthUnit.PASSAGES:
            document = cell.length * _TOKENS_OF_A_PASSAGE
        else:
            document = task.room(cell.length, asked) if isinstance(task, GeneratedTask) else cell.length
        answers = task.answer_tokens, completion_tokens(task, context.budget.answer_tokens)
        for system in plan.systems:
            read = _read(strategies[system], document, question, answers, context)
            found.append(_all(read, system, cell, task, plan.repeats))
    return found


def total(costs: Sequence[PlannedCost]) -> dict[str, int]:
    """The sums over all systems, tasks and lengths."""
    names = [each.name for each in fields(PlannedCost)][4:]
    return {name: sum(getattr(each, name) for each in costs) for name in names}


def render_plan(
    costs: Sequence[PlannedCost], plan: Plan, *, prices: Prices | None = None, tokens_per_second: float | None = None
) -> str:
    """The plan as Markdown, with the differences that this number of questions can show."""
    more = (["price"] if prices else []) + (["time"] if tokens_per_second else [])
    heads = ["questions", "documents", "chunks", "calls", "tokens in", "tokens out", *more]
    table = [["task", "length", "system", *heads]]
    for each in costs:
        length = f"{length_label(each.length, each.unit)} {each.unit}"
        table.append([each.task, length, each.system, *_cells(asdict(each), prices, tokens_per_second)])
    table.append(["all", "", "", *_cells(total(costs), prices, tokens_per_second)])
    differences = [
        f"With {count:,} questions, a difference of {100 * smallest_difference(count):.0f} points or more between two "
        "systems can be shown (with 80 % power at the 5 % level, paired, near 50 % accuracy)."
        for count in sorted({cell.count for cell in plan.cells})
        if count > 1
    ]
    return "\n\n".join(["# Plan", _LEGEND, markdown(table), *differences]) + "\n"


def plan_as_json(
    costs: Sequence[PlannedCost], *, prices: Prices | None = None, tokens_per_second: float | None = None
) -> dict[str, Any]:
    """The plan, JSON-ready."""
    sums = total(costs)
    tokens = sums["prompt_tokens"], sums["completion_tokens"]
    return {
        "plan": [asdict(each) for each in costs],
        "total": sums,
        "price": prices.of(*tokens) if prices else None,
        "seconds": sum(tokens) / tokens_per_second if tokens_per_second else None,
    }


def _cells(of: Mapping[str, Any], prices: Prices | None, tokens_per_second: float | None) -> list[str]:
    names = ("questions", "documents", "chunks", "calls", "prompt_tokens", "completion_tokens")
    tokens = of["prompt_tokens"], of["completion_tokens"]
    price = [f"{prices.of(*tokens):,.2f}"] if prices else []
    time = [str(timedelta(seconds=round(sum(tokens) / tokens_per_second)))] if tokens_per_second else []
    return [*(f"{of[name]:,}" for name in names), *price, *time]


@dataclass(frozen=True, slots=True)
class _Read:
    chunks: int
    calls: int
    prompt_tokens: int
    completion_tokens: int


def _read(strategy: Strategy, document: int, question: int, answers: tuple[int, int], context: ReaderContext) -> _Read:
    """One question on one document of that many tokens; `answers` are the task's maximum and the completion's."""
    budget, prompts, count, (least, answer) = context.budget, context.prompts, context.tokenizer.count, answers
    asks_answer = count(prompts.answer.literal) + question + budget.memory_tokens
    if isinstance(strategy, Excerpt):
        asks_once = not context.own_words_only or prompts.has(QUESTION.name)
        reply = answer if asks_once else budget.memory_tokens
        around = words_around(context) + question
        is_whole = isinstance(strategy, FullContext)
        room = (context.window or budget.context_window) - around - (min(least, reply) if is_whole else reply)
        if is_whole and document > room:
            return _Read(0, 0, 0, 0)
        shown = min(document, max(room, 0)) + around
        one = (1, shown, reply) if asks_once else (2, shown + asks_answer, reply + answer)
        return _Read(0, *(strategy.tries * number for number in one))
    chunks = math.ceil(document / budget.chunk_tokens)
    each = count(prompts.update.literal) + question + budget.memory_tokens
    return _Read(chunks, chunks + 1, document + chunks * each + asks_answer, chunks * budget.memory_tokens + answer)


def _all(read: _Read, system: str, cell: Cell, task: Task, repeats: int) -> PlannedCost:
    number = cell.count * repeats
    return PlannedCost(
        system, cell.task, cell.length, task.unit.value, number, number if read.calls else 0,
        read.chunks * number, read.calls * number, read.prompt_tokens * number, read.completion_tokens * number,
    )  # fmt: skip
