"""Tasks by name: generated tasks, RULER's and others at any length, tasks from data files, and users' own.

niah_*, vt, cwe, fwe, qa_*   RULER's thirteen; ruler_hqa is RULER-HQA
state_1, state_2, state_3    where a person is, where a thing is, where it was before
english_KIND                 facts in plain English: one (fact), one of a kind that no policy was trained on (new), one
                             that changes (change), several (list), a chain (hop_2, hop_3), a chain with the last fact
                             first (hop_2_backward, hop_3_backward), or no fact that answers (absent)

Some have options after the name: "state_2:facts=50:people=3", "english_fact:foreign=100".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memagent_evaluation.data_files import find_data_paths, list_data_tasks, load_data_task
from memagent_evaluation.samples import Task, TaskSettings
from memagent_evaluation.tasks.english import ENGLISH, EnglishTask, make_english_task
from memagent_evaluation.tasks.generated import GeneratedTask
from memagent_evaluation.tasks.lists import LIST_TASK_NAMES, make_list_task
from memagent_evaluation.tasks.needles import NEEDLE_CONFIGS, make_needle_task, make_variables_task
from memagent_evaluation.tasks.passages import PASSAGE_TASKS, load_passage_task
from memagent_evaluation.tasks.state_tracking import STATE_TASK_NAMES, StateTask, make_state_task
from memagent_graph.errors import EvaluationError, StrategyError
from memagent_graph.own_code import is_own_code_name, load_own_code
from memagent_graph.plain_text import did_you_mean
from memagent_graph.strategies import convert_options, split_options

__all__ = ["TaskSettings", "find_data_files", "list_task_options", "list_tasks", "load_task"]

_GENERATED_TASKS: dict[str, Callable[[str, TaskSettings], GeneratedTask]] = {
    **dict.fromkeys(NEEDLE_CONFIGS, make_needle_task),
    "vt": make_variables_task,
    **dict.fromkeys(LIST_TASK_NAMES, make_list_task),
    **dict.fromkeys(PASSAGE_TASKS, load_passage_task),
    **dict.fromkeys(STATE_TASK_NAMES, make_state_task),
    **dict.fromkeys(ENGLISH, make_english_task),
}
_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(STATE_TASK_NAMES, StateTask.options),
    **dict.fromkeys(ENGLISH, EnglishTask.options),
}
_TASK_ATTRIBUTES = ("name", "metric", "unit", "answer_tokens", "sample")


def list_tasks() -> tuple[str, ...]:
    """Return the names that `load_task` takes, except those of users' own tasks."""
    return (*_GENERATED_TASKS, *list_data_tasks())


def list_task_options(name: str) -> tuple[str, ...]:
    """Return the options of a task."""
    return _OPTIONS.get(name, ())


def load_task(name: str, settings: TaskSettings) -> Task:
    """Return a task by its name, perhaps with options, or a user's own task by `path/to/file.py:Name` or `module:Name`.

    A user's `Name` is a class whose constructor takes `settings` or nothing, or a task itself. It sets
    `shares_documents = True` if it uses `TaskSettings.questions_per_document`.

    Raises:
        EvaluationError: there is no such task or option, an option has no such value, the data file is missing, or the
            task cannot have several questions on a document.
        MissingExtraError: the task needs an extra that is not installed.
    """
    task = _load(name, settings)
    if settings.questions_per_document > 1 and not getattr(task, "shares_documents", False):
        raise EvaluationError(
            f"{name} has one question on each document",
            hint="Ask for one question per document, or measure it apart from the tasks that can have more.",
        )
    return task


def _load(name: str, settings: TaskSettings) -> Task:
    try:
        base_name, options = split_options(name)
        if base_name in _GENERATED_TASKS:
            return _apply_options(_GENERATED_TASKS[base_name](base_name, settings), name, options)
    except StrategyError as error:
        raise EvaluationError(error.message, hint=error.hint) from error
    if is_own_code_name(name):
        return _load_own_task(name, settings)
    if name in list_data_tasks():
        return load_data_task(name, settings.data, settings)
    hint = f"Tasks are: {', '.join(list_tasks())}; your own: path/to/file.py:Name."
    raise EvaluationError(f"there is no task {name!r}", hint=did_you_mean(name, list_tasks(), hint))


def find_data_files(name: str, settings: TaskSettings) -> list[Path]:
    """Return the data files, or dataset folders, that the task of a name reads; none for generated tasks.

    Raises:
        EvaluationError: the files do not exist where they are expected.
    """
    data_set = PASSAGE_TASKS.get(name, name)
    if data_set not in list_data_tasks():
        return []
    return find_data_paths(data_set, settings.data, name)


def _apply_options(task: GeneratedTask, name: str, options: Mapping[str, str]) -> Task:
    """Return a generated task with options, which are part of its name."""
    if not options:
        return task
    if unknown := [option for option in options if option not in task.options]:
        raise EvaluationError(
            f"{task.name} has no option {unknown[0]!r}", hint=f"Its options: {', '.join(task.options) or 'none'}."
        )
    return replace(task, name=name, **convert_options(type(task), task.name, options))


def _load_own_task(name: str, settings: TaskSettings) -> Task:
    task_or_class = load_own_code(
        name, noun="a task", error=EvaluationError, hint="Name the task's class after the colon."
    )
    task = _instantiate(task_or_class, settings, name) if isinstance(task_or_class, type) else task_or_class
    missing_attributes = [attribute for attribute in _TASK_ATTRIBUTES if not hasattr(task, attribute)]
    if missing_attributes:
        raise EvaluationError(
            f"{name} is not a task: it has no {', '.join(missing_attributes)}",
            hint="The example at the top of memagent_evaluation.samples is a complete one.",
        )
    return task  # type: ignore[no-any-return]


def _instantiate(task_class: type, settings: TaskSettings, name: str) -> Any:
    """Return an instance, made with the settings if the constructor has a parameter of that name."""
    signature = inspect.signature(task_class)
    arguments = {"settings": settings} if "settings" in signature.parameters else {}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise EvaluationError(
            f"{name} cannot be made: its constructor takes {signature}",
            hint="Let it take the TaskSettings as `settings`, or nothing.",
        ) from error
    return task_class(**arguments)
