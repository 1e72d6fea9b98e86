"""Where the data file of a task is."""

from __future__ import annotations

from pathlib import Path

from memagent_graph.errors import EvaluationError
from memagent_graph.evaluation.tasks.task_settings import TaskSettings
from memagent_graph.storage.paths import data_folder


def data_path(task: str, data_set: str, settings: TaskSettings) -> Path:
    """The path that the user gave, or else the folder where data files are looked for.

    Raises:
        EvaluationError: None was given and there is no such folder; says which file is needed and where to put it.
    """
    from memagent_graph.evaluation.data_files.published import published_as  # noqa: PLC0415 - it imports from here

    if settings.data is not None:
        return settings.data
    folder = data_folder() / "evaluation"
    if not folder.is_dir():
        raise EvaluationError(
            f"{task} needs a data file",
            hint=f"It reads {published_as(data_set).what}. Pass its path (--data PATH), or put it into {folder}.",
        )
    return folder
