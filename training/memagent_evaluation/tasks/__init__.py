"""RULER's tasks and others at any length, generated as streams, and the names that tasks are loaded by."""

from memagent_evaluation.samples import TaskSettings
from memagent_evaluation.tasks.registry import data_files, load_task, task_names, task_options

__all__ = ["TaskSettings", "data_files", "load_task", "task_names", "task_options"]
