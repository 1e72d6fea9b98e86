"""Estimates an evaluation before it begins: documents, chunks, calls, tokens, time and price."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final

from memagent_evaluation.markdown_tables import length_label, markdown
from memagent_evaluation.planning import completion_tokens
from memagent_evaluation.result_table import EvaluationPlan
from memagent_evaluation.sample_documents import sample_of
from memagent_evaluation.samples import LengthUnit, Task
from memagent_evaluation.tasks.generated import GeneratedTask
from memagent_graph.prices import Prices
from memagent_graph.reading.state import ReaderContext
from memagent_graph.strategies import Strategy
from memagent_graph.strategies.excerpts import QUESTION, Excerpt, words_around
from memagent_graph.strategies.full_context import FullContext

_TOKENS_OF_A_PASSAGE: Final = 140
"""RULER-HQA's, about."""
_NUMBERS: Final = {
    "questions": "questions",
    "documents": "documents",
    "chunks": "chunks",
    "calls": "calls",
    "prompt_tokens": "tokens in",
    "completion_tokens": "tokens out",
}
"""Fields of `PlannedCost`, with their titles in the table."""
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
    plan: EvaluationPlan, tasks: Mapping[str, Task], strategies: Mapping[str, Strategy], context: ReaderContext
) -> list[PlannedCost]:
    """Return the costs by task, length and system.

    Args:
        plan: the questions.
        tasks: by name.
        strategies: how each system reads.
        context: what they read with.
    """
    costs = []
    for cell in plan.cells:
        task = tasks[cell.task]
        question = sample_of(task, cell.length, 0).question
        if task.unit is LengthUnit.PASSAGES:
            document = cell.length * _TOKENS_OF_A_PASSAGE
        else:
            document = task.room(cell.length, question) if isinstance(task, GeneratedTask) else cell.length
        number = cell.count * plan.repeats
        for system in plan.systems:
            costs_of_one = _one_question(strategies[system], document, question, task, context)
            documents = number if costs_of_one[1] else 0
            costs.append(
                PlannedCost(system, cell.task, cell.length, task.unit.value, number, documents,
                            *(number * cost for cost in costs_of_one))
            )  # fmt: skip
    return costs


def render_plan(
    costs: Sequence[PlannedCost], *, prices: Prices | None = None, tokens_per_second: float | None = None
) -> str:
    """Return the plan as Markdown."""
    heads = [*_NUMBERS.values(), *(["price"] if prices else []), *(["time"] if tokens_per_second else [])]
    table = [["task", "length", "system", *heads]]
    places = [[cost.task, f"{length_label(cost.length, cost.unit)} {cost.unit}", cost.system] for cost in costs]
    for place, numbers in zip([*places, ["all", "", ""]], [*map(asdict, costs), _total(costs)], strict=True):
        tokens = numbers["prompt_tokens"], numbers["completion_tokens"]
        price = [f"{prices.of(*tokens):,.2f}"] if prices else []
        time = [str(timedelta(seconds=round(sum(tokens) / tokens_per_second)))] if tokens_per_second else []
        table.append([*place, *(f"{numbers[name]:,}" for name in _NUMBERS), *price, *time])
    return "\n\n".join(["# Plan", _LEGEND, markdown(table)]) + "\n"


def plan_as_json(
    costs: Sequence[PlannedCost], *, prices: Prices | None = None, tokens_per_second: float | None = None
) -> dict[str, Any]:
    """Return the plan, JSON-ready."""
    sums = _total(costs)
    tokens = sums["prompt_tokens"], sums["completion_tokens"]
    return {
        "plan": [asdict(cost) for cost in costs],
        "total": sums,
        "price": prices.of(*tokens) if prices else None,
        "seconds": sum(tokens) / tokens_per_second if tokens_per_second else None,
    }


def _total(costs: Sequence[PlannedCost]) -> dict[str, int]:
    return {name: sum(getattr(cost, name) for cost in costs) for name in _NUMBERS}


def _one_question(
    strategy: Strategy, document: int, question: str, task: Task, context: ReaderContext
) -> tuple[int, int, int, int]:
    """Return chunks, calls, prompt tokens and completion tokens of a question on a document of that many tokens."""
    budget, prompts, count = context.budget, context.prompts, context.tokenizer.count
    answer = completion_tokens(task, budget.answer_tokens)
    answer_prompt = count(prompts.answer.literal) + count(question) + budget.memory_tokens
    if isinstance(strategy, Excerpt):
        is_one_call = not context.own_words_only or prompts.has(QUESTION.name)
        reply = answer if is_one_call else budget.memory_tokens
        around = words_around(context) + count(question)
        is_whole = isinstance(strategy, FullContext)
        least_reply = min(task.answer_tokens, reply) if is_whole else reply
        room = (context.window or budget.context_window) - around - least_reply
        if is_whole and document > room:
            return 0, 0, 0, 0
        tries, shown = strategy.tries, min(document, max(room, 0)) + around
        if is_one_call:
            return 0, tries, tries * shown, tries * reply
        return 0, 2 * tries, tries * (shown + answer_prompt), tries * (reply + answer)
    chunks = math.ceil(document / budget.chunk_tokens)
    update_prompt = count(prompts.update.literal) + count(question) + budget.memory_tokens
    return chunks, chunks + 1, document + chunks * update_prompt + answer_prompt, chunks * budget.memory_tokens + answer
