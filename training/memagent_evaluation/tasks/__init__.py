"""RULER's tasks and others at any length, generated as streams, and the names that tasks are loaded by."""

from memagent_evaluation.samples import TaskSettings
from memagent_evaluation.tasks.registry import find_data_files, list_task_options, list_tasks, load_task

__all__ = ["TaskSettings", "find_data_files", "list_task_options", "list_tasks", "load_task"]
