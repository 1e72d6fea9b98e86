"""Plans an evaluation, and checks everything that can be checked before the first question."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from memagent_evaluation.data_files import FileTask
from memagent_evaluation.result_table import EvaluationPlan, PlanCell
from memagent_evaluation.sample_documents import make_sample
from memagent_evaluation.samples import LengthUnit, Task
from memagent_evaluation.tasks import TaskSettings, find_data_files, load_task
from memagent_evaluation.tasks.passages import PassagesTask
from memagent_graph.errors import BudgetError, EvaluationError
from memagent_graph.reading.inputs import check_question
from memagent_graph.reading.state import ReaderContext
from memagent_graph.roles import ANSWER, UPDATE, require_room

DEFAULT_LENGTHS: Final = {
    LengthUnit.TOKENS: (8 << 10, 32 << 10, 128 << 10),
    LengthUnit.PASSAGES: (50, 200, 800),
}
"""Three lengths, each four times the previous length. 50 passages of RULER-HQA have about 7K tokens."""
_CHECKED_LENGTH_UNITS: Final = {LengthUnit.TOKENS: 1 << 17, LengthUnit.PASSAGES: 1 << 10}
"""The approximate amount of text, in the task's unit, that is planned to check a task at one length. This takes at most
a second."""
_LENGTH_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")
_SUFFIX_FACTORS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20}


def parse_lengths(text: str) -> tuple[int, ...]:
    """Parse lengths as people write them: "1k,8k,3.5M". As in RULER, 1k is 1024 and 1M is 1024k.

    Raises:
        EvaluationError: a length is not a number, or less than 1.
    """
    lengths = []
    for length_text in filter(None, (length_text.strip() for length_text in text.split(","))):
        match = _LENGTH_PATTERN.fullmatch(length_text)
        length = round(float(match[1]) * _SUFFIX_FACTORS[match[2].lower()]) if match else 0
        if length < 1:
            raise EvaluationError(
                f"{length_text!r} is not a length", hint="Lengths are numbers from 1 on, as in 500,8k,64k,3.5M."
            )
        lengths.append(length)
    if not lengths:
        raise EvaluationError("no length was given", hint="Pass some, as in --lengths 8k,64k.")
    return tuple(dict.fromkeys(lengths))


def load_tasks(names: Sequence[str], settings: TaskSettings) -> dict[str, Task]:
    """Return the tasks with these names, keyed by task name.

    Raises:
        EvaluationError: a task does not exist, its data is missing, or two tasks have the same name.
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
    """A task whose data determines its lengths and the number of samples of each length."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """All lengths."""
        ...

    def count(self, length: int) -> int:
        """Return how many samples there are of a length."""
        ...


def build_plan(
    systems: Sequence[str], tasks: Mapping[str, Task], lengths: Sequence[int] | None, count: int, repeats: int = 1
) -> EvaluationPlan:
    """Return the plan for `count` questions of each task at each length, `repeats` times.

    If no lengths are given, tasks with their own lengths run at all their lengths, with as many questions as they have,
    up to `count`; the other tasks run at `DEFAULT_LENGTHS`.
    """
    if lengths is not None:
        return EvaluationPlan.grid(systems, tuple(tasks), lengths, count, repeats)
    cells = []
    for name, task in tasks.items():
        if isinstance(task, OwnLengths):
            cells += [PlanCell(name, length, min(count, task.count(length))) for length in task.lengths]
        else:
            cells += [PlanCell(name, length, count) for length in DEFAULT_LENGTHS[task.unit]]
    return EvaluationPlan(tuple(systems), tuple(cells), repeats=repeats)


def check_plan(
    plan: EvaluationPlan, tasks: Mapping[str, Task], context: ReaderContext, *, seed: int | None = None
) -> None:
    """Check that there are enough samples of each length, and that questions and answers fit the reader's budget.

    All questions of tasks from data files are checked. Short documents may be too short for some samples, so all of
    them are made; of long documents, only the last sample and some others. Samples that cannot be made later are
    reported at the end of the evaluation.

    Raises:
        EvaluationError: a length is too small for a task, the task has fewer samples, or its own code fails.
        BudgetError: a task's question or answer does not fit the window.
    """
    count_tokens = context.tokenizer.count
    for task in tasks.values():
        try:
            max_answer_tokens = max(task.answer_tokens, context.budget.answer_tokens)
            require_room(
                (UPDATE, ANSWER),
                context.prompts,
                replace(context.budget, answer_tokens=max_answer_tokens),
                count_tokens,
            )
            for cell in sorted((cell for cell in plan.cells if cell.task == task.name), key=lambda cell: cell.length):
                # The last sample, and others at equal distances.
                check_count = min(cell.count, max(1, _CHECKED_LENGTH_UNITS[task.unit] // cell.length))
                for step in range(check_count):
                    index = cell.count - 1 - step * cell.count // check_count
                    check_question(make_sample(task, cell.length, index, seed).question, context)
                if isinstance(task, FileTask | PassagesTask):
                    for index in range(cell.count):
                        check_question(task.get_question(cell.length, index), context)
        except BudgetError as error:
            error.message = f"{task.name} does not fit in the policy's context window: {error.message}"
            raise


def collect_resume_settings(context: ReaderContext, tasks: TaskSettings) -> dict[str, Any]:
    """Return the settings that determine a row, JSON-ready; an evaluation can be resumed only with equal settings.

    Tasks, systems, lengths, counts, and the server's address and load are left out: a resumed evaluation may have other
    ones. The plan has the data files of each task and the identity of each system.
    """
    sampling = context.sampling
    return {
        "policy": {
            "model": context.policy.name,
            "context_window": context.window or context.budget.context_window,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        },
        "reader": {
            "tokenizer": context.tokenizer.fingerprint,
            "prompts": context.prompts.fingerprint,
            "own_words_only": context.trained_prompts_only,
            "boundary": context.boundary,
            "rules": {name: getattr(value, "value", value) for name, value in asdict(context.rules).items()},
            **asdict(context.budget),
        },
        "tasks": {
            "seed": tasks.seed,
            "small": tasks.small,
            "haystack": _describe_path(tasks.haystack) if tasks.haystack else None,
            "data": _describe_path(tasks.data) if tasks.data else None,
            "prompt_tokens": tasks.prompt_tokens,
            "questions_per_document": tasks.questions_per_document,
        },
    }


def describe_data_files(names: Sequence[str], settings: TaskSettings) -> tuple[tuple[str, str], ...]:
    """Return the name and the data files of each task that reads data files.

    Raises:
        EvaluationError: the data files do not exist.
    """
    files = {name: find_data_files(name, settings) for name in dict.fromkeys(names)}
    return tuple((name, "; ".join(map(_describe_path, paths))) for name, paths in files.items() if paths)


def _describe_path(path: Path) -> str:
    """Return the name and size of a file or folder, so that data may be moved, but not replaced by other data."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return f"{path.resolve().name}, {sum(file.stat().st_size for file in files)} bytes"
