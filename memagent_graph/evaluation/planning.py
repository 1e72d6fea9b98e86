"""Everything about an evaluation that is settled, and checked, before its first question."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from memagent_graph.budget import Budget
from memagent_graph.errors import BudgetError, EvaluationError
from memagent_graph.evaluation.results import Plan
from memagent_graph.evaluation.samples import Task
from memagent_graph.evaluation.systems import SystemSettings
from memagent_graph.evaluation.tasks import TaskSettings, load_task
from memagent_graph.graph import check_question
from memagent_graph.state import ReaderContext

_LENGTH: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")
_FACTOR: Final = {"": 1, "k": 1 << 10, "m": 1 << 20}


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths as people write them: "1k,8k,3.5M". As in RULER, 1k is 1024 and 1M is 1024k.

    Raises:
        EvaluationError: one is no number, or not at least 1.
    """
    lengths = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        found = _LENGTH.fullmatch(part)
        length = round(float(found[1]) * _FACTOR[found[2].lower()]) if found else 0
        if length < 1:
            raise EvaluationError(
                f"{part!r} is no length", hint="Lengths are numbers from 1 on, as in 500,8k,64k,3.5M."
            )
        lengths.append(length)
    if not lengths:
        raise EvaluationError("no length was given", hint="Give some, as in --lengths 8k,64k.")
    return tuple(dict.fromkeys(lengths))


def load_tasks(names: Sequence[str], settings: TaskSettings) -> dict[str, Task]:
    """The tasks of these names, by the names that they call themselves.

    Raises:
        EvaluationError: there is no such task, its data is missing, or two call themselves the same.
    """
    tasks: dict[str, Task] = {}
    for name in dict.fromkeys(names):
        task = load_task(name, settings)
        if task.name in tasks:
            raise EvaluationError(f"two tasks are called {task.name}", hint="Run them one after the other.")
        tasks[task.name] = task
    return tasks


def check_plan(plan: Plan, tasks: Mapping[str, Task], context: ReaderContext) -> None:
    """Check that there are so many samples of each length, and that question and answer fit the reader's budget.

    Raises:
        EvaluationError: a length is too small for a task, or it has fewer samples.
        BudgetError: a task's question or answer does not fit the window.
    """
    templates = (
        context.tokenizer.count(context.prompts.update.literal),
        context.tokenizer.count(context.prompts.answer.literal),
    )
    for task in tasks.values():
        try:
            replace(context.budget, answer_tokens=task.answer_tokens).require(*templates)
            for length in sorted(plan.lengths):
                check_question(task.sample(length, plan.count - 1).question, context)
        except BudgetError as error:
            error.message = f"{task.name} needs more than the policy's window has: {error.message}"
            raise


def settings_that_count(systems: SystemSettings, tasks: TaskSettings, *, model: str | None = None) -> dict[str, Any]:
    """What decides on a row, JSON-ready: an evaluation is resumed with the same, or not at all.

    Names of tasks and systems, lengths and counts are no part of it; nor is where the server is, or how it is used.
    """
    context = systems.context
    sampling = context.sampling
    return {
        "policy": {
            "model": model or context.policy.name,
            "context_window": systems.context_window,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        },
        "reader": {
            "tokenizer": context.tokenizer.fingerprint,
            "prompts": context.prompts.fingerprint,
            "boundary": context.boundary,
            "rules": {name: getattr(value, "value", value) for name, value in asdict(context.rules).items()},
            **_without_answer(context.budget),
        },
        "baselines": {
            "wording": systems.wording.value,
            "retrieved_chunks": systems.retrieved_chunks,
            "retrieval_chunk_tokens": systems.retrieval_chunk_tokens,
        },
        "tasks": {
            "seed": tasks.seed,
            "small": tasks.small,
            "haystack": _described(tasks.haystack),
            "data": _described(tasks.data),
        },
    }


def _without_answer(budget: Budget) -> dict[str, int]:
    """The budget, except for the answer's part: each task has its own."""
    return {name: value for name, value in asdict(budget).items() if name != "answer_tokens"}


def _described(path: Path | None) -> str | None:
    """A file or folder by name and size: it may be moved, but not be changed."""
    if path is None:
        return None
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return f"{path.resolve().name}, {sum(each.stat().st_size for each in files)} bytes"
