"""Tasks from local copies of published data files; nothing is downloaded.

>>> task = load_data_task("hotpotqa", Path("hotpot_dev_distractor_v1.json"), settings)  # doctest: +SKIP
>>> task.lengths, task.count(2048)  # doctest: +SKIP

`file_task` decides which examples belong to a length; `formats` and `qa_records` measure each example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memagent_evaluation.data_files.file_task import FileTask
from memagent_evaluation.data_files.formats import ROW_FORMATS, load_rows
from memagent_evaluation.data_files.qa_records import RECORD_NAMES, load_records
from memagent_evaluation.data_files.table_rows import open_rows
from memagent_evaluation.samples import TaskSettings
from memagent_graph.errors import EvaluationError
from memagent_graph.storage.paths import data_folder

__all__ = ["FileTask", "detect_data_task", "find_data_paths", "list_data_tasks", "load_data_task"]

_FIELDS: Final[Sequence[tuple[str, frozenset[str]]]] = (
    ("hotpotqa", frozenset({"supporting_facts"})),
    ("squad", frozenset({"paragraphs"})),
    ("memagent_files", frozenset({"context", "reward_model"})),
    ("qa_files", frozenset({"input", "context", "answers", "dataset"})),
    ("ruler_hqa_files", frozenset({"input", "context", "answers"})),
    ("qa_files", frozenset({"question"})),
)
"""The fields that identify a data set's rows, the most special ones first."""


def list_data_tasks() -> tuple[str, ...]:
    """Return the names that `load_data_task` takes."""
    return (*RECORD_NAMES, *ROW_FORMATS)


def detect_data_task(path: Path) -> str:
    """Return the one of `list_data_tasks()` that reads a file or dataset folder, by the fields of its first row.

    Raises:
        EvaluationError: the file cannot be read, or no task knows its fields.
    """
    if not path.exists():
        raise EvaluationError(f"there is no data file {path}", hint="Name a file, or a folder that datasets saved.")
    row = open_rows([path])[0]
    for name, fields in _FIELDS:
        if fields <= row.keys():
            return name
    raise EvaluationError(
        f"{path} has rows with {', '.join(sorted(map(str, row))) or 'nothing'}, not with questions",
        hint="Write each row with a question, its document (or documents) and its answers.",
    )


def load_data_task(name: str, path: Path | None, settings: TaskSettings) -> FileTask:
    """Return a task from a data file, a folder of such files, or a folder that `datasets.Dataset.save_to_disk` wrote.

    Every row is checked once, with one of them in memory at a time.

    Args:
        name: one of `list_data_tasks()`.
        path: the file or folder; the data folder's `evaluation` if None. In a folder of plain files, those with the
            data set's published names are used, in its subfolder `name` if there is one.
        settings: the tokenizer measures lengths, the seed orders HotpotQA's and SQuAD's paragraphs.

    Raises:
        EvaluationError: there is no such file, or a row is damaged; the message names the file and line.
        MissingExtraError: the file needs pyarrow (the extra "eval").
    """
    paths = find_data_paths(name, path, name)
    return (load_rows if name in ROW_FORMATS else load_records)(name, paths, settings)


@dataclass(frozen=True, slots=True)
class Published:
    """A data set and the names of its files."""

    source: str
    """The place where its files are published, with their names."""
    patterns: tuple[str, ...]
    """Names of its files in a folder; the matches of the first pattern that has any."""


_ANY_ROWS: Final = ("*.jsonl", "*.parquet", "*.json", "*.csv", "*.tsv")
PUBLISHED: Final = {
    "hotpotqa": Published(
        "hotpot_dev_distractor_v1.json from HotpotQA's home page, or the dataset hotpot_qa on Hugging Face",
        ("hotpot_dev_distractor*.json", "hotpot_train*.json", "hotpot*.json", "hotpot*.jsonl", "hotpot*.parquet"),
    ),
    "squad": Published(
        "dev-v2.0.json from SQuAD's home page",
        ("dev-v2*.json", "dev-v1*.json", "train-v2*.json", "train-v1*.json", "squad*.json"),
    ),
    "qa_files": Published("a file of your own: rows with question, document and answers", _ANY_ROWS),
    "memagent_files": Published(
        "hotpotqa_train_32k.parquet from the dataset BytedTsinghua-SIA/hotpotqa on Hugging Face",
        ("hotpotqa_train*.parquet", *_ANY_ROWS),
    ),
    "ruler_hqa_files": Published(
        "eval_50.json and its like from the dataset BytedTsinghua-SIA/hotpotqa on Hugging Face",
        ("eval_[0-9]*.json", "eval_[0-9]*.jsonl"),
    ),
}


def find_data_paths(name: str, path: Path | None, task: str | None = None) -> list[Path]:
    """Return the files of a data set: the path if it is a file or a dataset folder, otherwise those in the folder.

    A folder that several data sets share may have a subfolder for each, named like the task.

    Args:
        name: the data set, a key of `PUBLISHED`.
        path: where to look; `evaluation` in the data folder if None.
        task: the task that needs the data set, for messages.

    Raises:
        EvaluationError: there are no files; the message says where the file is published and how to pass it.
    """
    published, given_path = PUBLISHED[name], path
    path = path or data_folder() / "evaluation"
    if path.is_file() or any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return [path]
    remedy = f"{name} reads {published.source}. Pass where it is (--data PATH), or put it into {path}."
    if not path.is_dir():
        message = f"there is no data file {path}" if given_path or not task else f"{task} needs a data file"
        raise EvaluationError(message, hint=remedy)
    if (path / name).is_dir():
        return find_data_paths(name, path / name)
    for pattern in published.patterns:  # shorter names come first, so that eval_50 is before eval_100
        if matches := sorted(filter(Path.is_file, path.glob(pattern)), key=lambda match: (len(match.name), match.name)):
            return matches
    raise EvaluationError(f"the folder {path} has no file called {' or '.join(published.patterns)}", hint=remedy)
