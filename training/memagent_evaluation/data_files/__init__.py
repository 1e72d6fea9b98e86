"""Tasks from local copies of published data files; nothing is downloaded.

>>> task = load_data_task("hotpotqa", Path("hotpot_dev_distractor_v1.json"), settings)  # doctest: +SKIP
>>> task.lengths, task.count(2048)  # doctest: +SKIP

`file_task` defines which examples belong to a length; each format's module defines its own length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from memagent_evaluation.data_files.file_task import FileTask
from memagent_evaluation.data_files.longbench import load_longbench
from memagent_evaluation.data_files.mrcr import load_mrcr
from memagent_evaluation.data_files.published import data_paths
from memagent_evaluation.data_files.qa_files import load_qa_files
from memagent_evaluation.data_files.qa_records import read_records
from memagent_evaluation.data_files.record_tasks import load_records
from memagent_evaluation.data_files.ruler_files import load_ruler_files
from memagent_evaluation.data_files.ruler_hqa_files import load_ruler_hqa_files
from memagent_evaluation.samples import TaskSettings
from memagent_graph.errors import EvaluationError

__all__ = ["FileTask", "data_paths", "data_task_names", "load_data_task", "read_records"]

_LOADERS: Final[Mapping[str, Callable[[Sequence[Path], TaskSettings], FileTask]]] = {
    "hotpotqa": partial(load_records, "hotpotqa"),
    "squad": partial(load_records, "squad"),
    "qa_files": load_qa_files,
    "longbench": load_longbench,
    "mrcr": load_mrcr,
    "ruler_files": load_ruler_files,
    "ruler_hqa_files": load_ruler_hqa_files,
}


def data_task_names() -> tuple[str, ...]:
    """The names that `load_data_task` takes."""
    return tuple(_LOADERS)


def load_data_task(name: str, path: Path | None, settings: TaskSettings) -> FileTask:
    """A task from a data file, a folder of such files, or a folder that `datasets.Dataset.save_to_disk` wrote.

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
    return _LOADERS[name](paths, settings)
