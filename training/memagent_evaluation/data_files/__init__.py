"""Tasks from local copies of published data files; nothing is downloaded.

>>> task = load_data_task("hotpotqa", Path("hotpot_dev_distractor_v1.json"), settings)  # doctest: +SKIP
>>> task.lengths, task.count(2048)  # doctest: +SKIP

`file_task` defines which examples belong to a length, `formats` and `qa_records` their own lengths.
"""

from __future__ import annotations

from pathlib import Path

from memagent_evaluation.data_files.file_task import FileTask
from memagent_evaluation.data_files.formats import ROW_FORMATS, load_rows
from memagent_evaluation.data_files.published import data_paths
from memagent_evaluation.data_files.qa_records import RECORD_NAMES, load_records, read_records
from memagent_evaluation.samples import TaskSettings
from memagent_graph.errors import EvaluationError

__all__ = ["FileTask", "data_paths", "data_task_names", "load_data_task", "read_records"]


def data_task_names() -> tuple[str, ...]:
    """Return the names that `load_data_task` takes."""
    return (*RECORD_NAMES, *ROW_FORMATS)


def load_data_task(name: str, path: Path | None, settings: TaskSettings) -> FileTask:
    """Return a task from a data file, a folder of such files, or a folder that `datasets.Dataset.save_to_disk` wrote.

    Every row is checked once, with one of them in memory at a time.

    Args:
        name: one of `data_task_names()`.
        path: the file or folder; the data folder's `evaluation` if None. In a folder of plain files, those with the
            data set's published names are used, in its subfolder `name` if there is one.
        settings: the tokenizer measures lengths, the seed orders HotpotQA's and SQuAD's paragraphs.

    Raises:
        EvaluationError: there is no such name or file, or a row is damaged; the message names the file and line.
        MissingExtraError: the file needs pyarrow (the extra "eval").
    """
    if not isinstance(settings, TaskSettings):
        raise EvaluationError(f"{name} needs the policy's tokenizer", hint="Pass TaskSettings(tokenizer=...).")
    paths = data_paths(name, path, name)
    return (load_rows if name in ROW_FORMATS else load_records)(name, paths, settings)
