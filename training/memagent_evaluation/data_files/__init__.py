"""Tasks from local copies of published data files; nothing is downloaded.

>>> task = load_data_task("hotpotqa", Path("hotpot_dev_distractor_v1.json"), settings)  # doctest: +SKIP
>>> task.lengths, task.count(2048)  # doctest: +SKIP

`file_task` decides which examples belong to a length; `formats` and `qa_records` measure each example.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from memagent_evaluation.data_files.file_task import FileTask
from memagent_evaluation.data_files.formats import ROW_FORMATS, load_rows
from memagent_evaluation.data_files.published import data_paths
from memagent_evaluation.data_files.qa_records import RECORD_NAMES, load_records
from memagent_evaluation.data_files.table_rows import open_rows
from memagent_evaluation.samples import TaskSettings
from memagent_graph.errors import EvaluationError

__all__ = ["FileTask", "data_paths", "data_task_names", "data_task_of", "load_data_task"]

_FIELDS: Final[Sequence[tuple[str, frozenset[str]]]] = (
    ("hotpotqa", frozenset({"supporting_facts"})),
    ("squad", frozenset({"paragraphs"})),
    ("memagent_files", frozenset({"context", "reward_model"})),
    ("qa_files", frozenset({"input", "context", "answers", "dataset"})),
    ("ruler_hqa_files", frozenset({"input", "context", "answers"})),
    ("qa_files", frozenset({"question"})),
)
"""The fields that identify a data set's rows, the most special ones first."""


def data_task_names() -> tuple[str, ...]:
    """Return the names that `load_data_task` takes."""
    return (*RECORD_NAMES, *ROW_FORMATS)


def data_task_of(path: Path) -> str:
    """Return the one of `data_task_names()` that reads a file or dataset folder, by the fields of its first row.

    Raises:
        EvaluationError: the file cannot be read, or no task knows its fields.
    """
    if not path.exists():
        raise EvaluationError(f"there is no data file {path}", hint="Name a file, or a folder that datasets saved.")
    row = open_rows([path])[0]
    if {"title", "context", "question"} <= row.keys() and isinstance(row.get("answers"), dict):
        return "squad"
    for name, fields in _FIELDS:
        if fields <= row.keys():
            return name
    raise EvaluationError(
        f"{path} has rows with {', '.join(sorted(map(str, row))) or 'nothing'}, not with questions",
        hint="Give each row a question, its document (or documents) and its answers.",
    )


def load_data_task(name: str, path: Path | None, settings: TaskSettings) -> FileTask:
    """Return a task from a data file, a folder of such files, or a folder that `datasets.Dataset.save_to_disk` wrote.

    Every row is checked once, with one of them in memory at a time.

    Args:
        name: one of `data_task_names()`.
        path: the file or folder; the data folder's `evaluation` if None. In a folder of plain files, those with the
            data set's published names are used, in its subfolder `name` if there is one.
        settings: the tokenizer measures lengths, the seed orders HotpotQA's and SQuAD's paragraphs.

    Raises:
        EvaluationError: there is no such file, or a row is damaged; the message names the file and line.
        MissingExtraError: the file needs pyarrow (the extra "eval").
    """
    paths = data_paths(name, path, name)
    return (load_rows if name in ROW_FORMATS else load_records)(name, paths, settings)
