"""RULER's tasks at any length, generated as streams, and the names that tasks are loaded by."""

from memagent_graph.evaluation.tasks.registry import data_files, load_task, task_names
from memagent_graph.evaluation.tasks.task_settings import TaskSettings

__all__ = ["TaskSettings", "data_files", "load_task", "task_names"]
