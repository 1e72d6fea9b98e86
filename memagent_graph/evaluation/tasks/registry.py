"""Tasks by name: the generated ones, those that need a data file, and users' own."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memagent_graph.errors import EvaluationError
from memagent_graph.evaluation.data_files import data_paths, data_task_names, load_data_task
from memagent_graph.evaluation.samples import Task, TaskSettings
from memagent_graph.evaluation.tasks.lists import LISTS, list_task
from memagent_graph.evaluation.tasks.needles import SHAPES, needle_task
from memagent_graph.evaluation.tasks.passages import PASSAGE_TASKS, passage_task
from memagent_graph.evaluation.tasks.variables import variables_task
from memagent_graph.own_code import load_own, names_own_code

_GENERATED: dict[str, Callable[[str, TaskSettings], Task]] = {
    **dict.fromkeys(SHAPES, needle_task),
    "vt": variables_task,
    **dict.fromkeys(LISTS, list_task),
    **dict.fromkeys(PASSAGE_TASKS, passage_task),
}
_PARTS = ("name", "metric", "unit", "answer_tokens", "sample")


def task_names() -> tuple[str, ...]:
    """The names that `load_task` knows, beside users' own tasks."""
    return (*_GENERATED, *data_task_names())


def load_task(name: str, settings: TaskSettings) -> Task:
    """The task of a name, or a user's own as `path/to/file.py:Name` or `module:Name`.

    A user's `Name` is a class whose constructor takes nothing or the settings, or a task itself.

    Raises:
        EvaluationError: There is no such task, or its data file is missing.
        MissingExtraError: It needs an extra that is not installed.
    """
    if name in _GENERATED:
        return _GENERATED[name](name, settings)
    if names_own_code(name):
        return _own_task(name, settings)
    if name in data_task_names():
        return load_data_task(name, settings.data, settings)
    near = difflib.get_close_matches(name, task_names(), n=3, cutoff=0.5)
    guess = f"Did you mean {' or '.join(near)}? " if near else ""
    raise EvaluationError(
        f"there is no task {name!r}",
        hint=f"{guess}Tasks are: {', '.join(task_names())}; your own: path/to/file.py:Name.",
    )


def data_files(name: str, settings: TaskSettings) -> list[Path]:
    """The data files, or dataset folders, that the task of a name reads; none for those that generate all they ask.

    Raises:
        EvaluationError: There are none where they are looked for.
    """
    data_set = PASSAGE_TASKS.get(name, name)
    if data_set not in data_task_names():
        return []
    return data_paths(data_set, settings.data, name)


def _own_task(name: str, settings: TaskSettings) -> Task:
    found = load_own(name, what="a task", error=EvaluationError, hint="Name the task's class after the colon.")
    task = _instance(found, settings, name) if isinstance(found, type) else found
    missing = [part for part in _PARTS if not hasattr(task, part)]
    if missing:
        raise EvaluationError(
            f"{name} is not a task: it has no {', '.join(missing)}",
            hint="The example at the top of memagent_graph.evaluation.samples shows a whole one.",
        )
    return task  # type: ignore[no-any-return]


def _instance(kind: type, settings: TaskSettings, name: str) -> Any:
    """A class called with the settings or with nothing, as its constructor asks."""
    signature = inspect.signature(kind)
    # One that can do without an argument gets none, unless it asks for the settings by name.
    for arguments in ((settings,), ()) if "settings" in signature.parameters else ((), (settings,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return kind(*arguments)
    raise EvaluationError(
        f"{name} cannot be made: its constructor takes {signature}",
        hint="Let it take the TaskSettings, or nothing.",
    )
