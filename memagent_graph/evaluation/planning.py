"""Everything about an evaluation that is settled, and checked, before its first question."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from memagent_graph.errors import BudgetError, EvaluationError
from memagent_graph.evaluation.result_table import Cell, Plan
from memagent_graph.evaluation.sample_documents import sample_of
from memagent_graph.evaluation.samples import LengthUnit, Task
from memagent_graph.evaluation.tasks import TaskSettings, data_files, load_task
from memagent_graph.events import EventKind, UpdateRule
from memagent_graph.reading.graph import check_question
from memagent_graph.reading.state import ReaderContext, UpdateRules

DEFAULT_LENGTHS: Final = {
    LengthUnit.TOKENS: (8 << 10, 32 << 10, 128 << 10),
    LengthUnit.PASSAGES: (50, 200, 800),
}
"""Three lengths that double twice from each to the next; 50 passages of RULER-HQA have about 7K tokens."""
_CHECKED: Final = {LengthUnit.TOKENS: 1 << 17, LengthUnit.PASSAGES: 1 << 10}
"""How much text is planned to check a task at a length before the first question: about as many tokens, a second's work
at most."""
_LENGTH: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")
_FACTOR: Final = {"": 1, "k": 1 << 10, "m": 1 << 20}


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths as people write them: "1k,8k,3.5M". As in RULER, 1k is 1024 and 1M is 1024k.

    Raises:
        EvaluationError: one is not a number, or less than 1.
    """
    lengths = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        found = _LENGTH.fullmatch(part)
        length = round(float(found[1]) * _FACTOR[found[2].lower()]) if found else 0
        if length < 1:
            raise EvaluationError(
                f"{part!r} is not a length", hint="Lengths are numbers from 1 on, as in 500,8k,64k,3.5M."
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


@runtime_checkable
class OwnLengths(Protocol):
    """A task whose data decides which lengths there are, and how many samples of each."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """All of them."""
        ...

    def count(self, length: int) -> int:
        """How many samples there are of a length."""
        ...


@runtime_checkable
class OwnQuestions(Protocol):
    """A task whose questions can be had without making their documents."""

    def question(self, length: int, index: int) -> str:
        """The question of a sample."""
        ...


def plan_of(
    systems: Sequence[str], tasks: Mapping[str, Task], lengths: Sequence[int] | None, count: int, repeats: int = 1
) -> Plan:
    """What is asked, where `count` questions of each task are wanted at each length, `repeats` times.

    Where no lengths are given, tasks that have their own are asked at all of these, with as many questions as they
    have, up to `count`; the others at some usual ones (`DEFAULT_LENGTHS`).
    """
    if lengths is not None:
        return Plan.grid(systems, tuple(tasks), lengths, count, repeats)
    cells = []
    for name, task in tasks.items():
        if isinstance(task, OwnLengths):
            cells += [Cell(name, length, min(count, task.count(length))) for length in task.lengths]
        else:
            cells += [Cell(name, length, count) for length in DEFAULT_LENGTHS[task.unit]]
    return Plan(tuple(systems), tuple(cells), repeats=repeats)


def completion_tokens(task: Task, answer_tokens: int) -> int:
    """How many tokens a completion with an answer may have: what the reader's budget gives it, or the task's, if more.

    The bounds that RULER publishes (30 tokens for variable tracking) are for a model that continues a prompt in
    which the answer has begun. A policy that is asked in a chat, for a box, says something before the box; cut off at
    such a bound, it would be measured by how little it says. What `read` gives an answer, an evaluation gives it, too.

    Args:
        task: what the answer is for.
        answer_tokens: the budget of the reader for an answer.
    """
    return max(task.answer_tokens, answer_tokens)


def check_plan(plan: Plan, tasks: Mapping[str, Task], context: ReaderContext, *, seed: int | None = None) -> None:
    """Check that there are so many samples of each length, and that questions and answers fit the reader's budget.

    Of a task that can tell its questions (`OwnQuestions`), as those of data files can, all of these are looked at. Its
    samples, and those of other tasks with their questions, are made as far as that takes no time: all of short
    documents, whose length may be too small for some of them, the last and some others of long ones. One that cannot
    be made later is reported at the evaluation's end.

    Raises:
        EvaluationError: a length is too small for a task, it has fewer samples, or its own code fails.
        BudgetError: a task's question or answer does not fit the window.
    """
    templates = (
        context.tokenizer.count(context.prompts.update.literal),
        context.tokenizer.count(context.prompts.answer.literal),
    )
    for task in tasks.values():
        try:
            bound = completion_tokens(task, context.budget.answer_tokens)
            replace(context.budget, answer_tokens=bound).require(*templates)
            for cell in sorted((cell for cell in plan.cells if cell.task == task.name), key=lambda cell: cell.length):
                for index in _checked(cell, task.unit):
                    check_question(sample_of(task, cell.length, index, seed).question, context)
                if isinstance(task, OwnQuestions):
                    for index in range(cell.count):
                        check_question(task.question(cell.length, index), context)
        except BudgetError as error:
            error.message = f"{task.name} needs more than the policy's window has: {error.message}"
            raise


def _checked(cell: Cell, unit: LengthUnit) -> list[int]:
    """The samples of a cell that are made to see whether they can be: the last one, and others evenly before it."""
    number = min(cell.count, max(1, _CHECKED[unit] // cell.length))
    return [cell.count - 1 - place * cell.count // number for place in range(number)]


def settings_that_count(context: ReaderContext, tasks: TaskSettings, *, model: str | None = None) -> dict[str, Any]:
    """What decides on a row, JSON-ready: an evaluation is resumed with the same, or not at all.

    Names of tasks and systems, lengths and counts are not part of it; nor is where the server is, or how it is used.
    The data files of each task, and what each system is, stand in the plan, as more of both may be asked for.
    """
    sampling = context.sampling
    return {
        "policy": {
            "model": model or context.policy.name,
            "context_window": context.window or context.budget.context_window,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        },
        "reader": {
            "tokenizer": context.tokenizer.fingerprint,
            "prompts": context.prompts.fingerprint,
            "own_words_only": context.own_words_only,
            "boundary": context.boundary,
            "rules": _rules_that_count(context.rules),
            **asdict(context.budget),
        },
        "tasks": {
            "seed": tasks.seed,
            "small": tasks.small,
            "haystack": _described(tasks.haystack) if tasks.haystack else None,
            "data": _described(tasks.data) if tasks.data else None,
            "prompt_tokens": tasks.prompt_tokens,
            # Left out where it is one, as it was not there once.
            **({"questions_per_document": tasks.questions_per_document} if tasks.questions_per_document > 1 else {}),
        },
    }


def _rules_that_count(rules: UpdateRules) -> dict[str, Any]:
    """All but one that does nothing, as it was not there once."""
    told = {name: getattr(value, "value", value) for name, value in asdict(rules).items()}
    if rules.rule_for(EventKind.INVENTED) is UpdateRule.ACCEPT:
        del told["invented"]
    return told


def data_that_counts(names: Sequence[str], settings: TaskSettings) -> tuple[tuple[str, str], ...]:
    """For each of these tasks that reads data files, its name and which these are.

    Raises:
        EvaluationError: they are not there.
    """
    files = {name: data_files(name, settings) for name in dict.fromkeys(names)}
    return tuple((name, "; ".join(map(_described, paths))) for name, paths in files.items() if paths)


def _described(path: Path) -> str:
    """A file or folder by name and size: it may be moved, but not be changed."""
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return f"{path.resolve().name}, {sum(each.stat().st_size for each in files)} bytes"
