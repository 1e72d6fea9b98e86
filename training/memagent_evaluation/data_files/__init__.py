"""Tasks from local copies of published data files; nothing is downloaded.

>>> task = load_data_task("hotpotqa", Path("hotpot_dev_distractor_v1.json"), settings)  # doctest: +SKIP
>>> task.lengths, task.count(2048)  # doctest: +SKIP

`file_task` decides which examples belong to a length; `qa_records` reads files of paragraphs. This module reads files
with a row for each question:

qa_files          your own questions: {"question": ..., "document": "the whole text", "answers": ["a", "wording"]}; also
                  "input" for the question, "documents" (a list of texts) or "context" for the document, and "answer".
                  LongBench's questions have this form
memagent_files    MemAgent's training questions, hotpotqa_train.parquet: prompt, context, reward_model and extra_info
ruler_hqa_files   MemAgent's RULER-HQA, eval_50.json to eval_25600.json: _id, context, input and answers

The length of an example is its number of passages in `ruler_hqa_files`, otherwise the number of tokens of document and
question, estimated with the policy's tokenizer. Other fields are ignored.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from memagent_evaluation.data_files.file_task import (
    DamagedRowError,
    FileExample,
    FileTask,
    RowFormat,
    measure_example,
    read_row_example,
    require_positive,
    require_text,
    require_texts,
)
from memagent_evaluation.data_files.qa_records import RECORD_NAMES, load_record_task
from memagent_evaluation.data_files.table_rows import TableRow, open_rows
from memagent_evaluation.samples import LengthUnit, TaskSettings
from memagent_graph.errors import EvaluationError
from memagent_graph.storage.private_files import get_data_folder

__all__ = ["FileTask", "detect_data_task", "find_data_paths", "list_data_tasks", "load_data_task"]

_IDENTIFYING_FIELDS: Final[Sequence[tuple[str, frozenset[str]]]] = (
    ("hotpotqa", frozenset({"supporting_facts"})),
    ("squad", frozenset({"paragraphs"})),
    ("memagent_files", frozenset({"context", "reward_model"})),
    ("qa_files", frozenset({"input", "context", "answers", "dataset"})),
    ("ruler_hqa_files", frozenset({"input", "context", "answers"})),
    ("qa_files", frozenset({"question"})),
    ("qa_files", frozenset({"input"})),
)
"""The fields that identify a data set's rows, the most specific first."""


def list_data_tasks() -> tuple[str, ...]:
    """Return the names that `load_data_task` takes."""
    return (*RECORD_NAMES, *ROW_FORMATS)


def detect_data_task(path: Path) -> str:
    """Return the name of the data task that reads a file or dataset folder, from the fields of its first row.

    Raises:
        EvaluationError: the file cannot be read, or no task knows its fields.
    """
    if not path.exists():
        raise EvaluationError(f"there is no data file {path}", hint="Give a file, or a folder that datasets saved.")
    row = open_rows([path])[0]
    for name, fields in _IDENTIFYING_FIELDS:
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
    return (load_rows if name in ROW_FORMATS else load_record_task)(name, paths, settings)


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set and the names of its files."""

    source: str
    """Where its files are published, with their names, for messages."""
    patterns: tuple[str, ...]
    """Patterns of file names in a folder. The first pattern with matches is used."""


_ROW_FILE_PATTERNS: Final = ("*.jsonl", "*.parquet", "*.json", "*.csv", "*.tsv")
DATA_SETS: Final = {
    "hotpotqa": DataSet(
        "hotpot_dev_distractor_v1.json from HotpotQA's home page, or the dataset hotpot_qa on Hugging Face",
        ("hotpot_dev_distractor*.json", "hotpot_train*.json", "hotpot*.json", "hotpot*.jsonl", "hotpot*.parquet"),
    ),
    "squad": DataSet(
        "dev-v2.0.json from SQuAD's home page",
        ("dev-v2*.json", "dev-v1*.json", "train-v2*.json", "train-v1*.json", "squad*.json"),
    ),
    "qa_files": DataSet("a file of your own: rows with question, document and answers", _ROW_FILE_PATTERNS),
    "memagent_files": DataSet(
        "hotpotqa_train_32k.parquet from the dataset BytedTsinghua-SIA/hotpotqa on Hugging Face",
        ("hotpotqa_train*.parquet", *_ROW_FILE_PATTERNS),
    ),
    "ruler_hqa_files": DataSet(
        "eval_50.json or a similar file from the dataset BytedTsinghua-SIA/hotpotqa on Hugging Face",
        ("eval_[0-9]*.json", "eval_[0-9]*.jsonl"),
    ),
}


def find_data_paths(name: str, path: Path | None, task: str | None = None) -> list[Path]:
    """Return the files of a data set: the path if it is a file or a dataset folder, otherwise those in the folder.

    A folder that several data sets share may have a subfolder for each, named like the task.

    Args:
        name: the data set, a key of `DATA_SETS`.
        path: where to look; `evaluation` in the data folder if None.
        task: the task that needs the data set, for messages.

    Raises:
        EvaluationError: there are no files; the message says where the file is published and how to pass it.
    """
    data_set, given_path = DATA_SETS[name], path
    path = path or get_data_folder() / "evaluation"
    if path.is_file() or any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return [path]
    hint = f"{name} reads {data_set.source}. Pass where it is (--data PATH), or put it into {path}."
    if not path.is_dir():
        message = f"there is no data file {path}" if given_path or not task else f"{task} needs a data file"
        raise EvaluationError(message, hint=hint)
    if (path / name).is_dir():
        return find_data_paths(name, path / name)
    for pattern in data_set.patterns:  # shorter names come first, so that eval_50 is before eval_100
        if matches := sorted(filter(Path.is_file, path.glob(pattern)), key=lambda match: (len(match.name), match.name)):
            return matches
    raise EvaluationError(f"the folder {path} has no file called {' or '.join(data_set.patterns)}", hint=hint)


_DOCUMENT_FIELDS: Final = ("document", "documents", "context")
_PARAGRAPH_BREAK: Final = "\n\n"
_MAX_PATH_CHARACTERS: Final = 1000
_PASSAGE_HEADING: Final = re.compile(r"^(?:Document|Passage) \d+:", re.MULTILINE)


def load_rows(name: str, paths: Sequence[Path], settings: TaskSettings) -> FileTask:
    """Return the task of the rows in files of one of `ROW_FORMATS`.

    Raises:
        EvaluationError: a row is damaged; the message names the file and line.
    """
    rows, row_format = open_rows(paths), ROW_FORMATS[name]
    read_example = partial(read_row_example, rows, row_format)
    # One example at a time is in memory.
    lengths = array("Q", (measure_example(read_example(index), settings.tokenizer) for index in range(len(rows))))
    return FileTask(name, row_format.unit, read_example, lengths, ", ".join(map(str, paths)))


def _read_own_question(row: TableRow) -> FileExample:
    answers = require_texts(row, "answer" if "answer" in row and "answers" not in row else "answers")
    field = next((field for field in _DOCUMENT_FIELDS if field in row), _DOCUMENT_FIELDS[0])
    document = _PARAGRAPH_BREAK.join(require_texts(row, field))
    if len(document) < _MAX_PATH_CHARACTERS and os.path.isfile(document):  # noqa: PTH113  no error for other texts
        raise DamagedRowError(f'"{field}" is the path of a file, {document}, not its text')
    question = require_text(row, "input" if "input" in row and "question" not in row else "question")
    return FileExample(question.strip(), answers, document)


def _read_training_question(row: TableRow) -> FileExample:
    extra_info, reward_model = row.get("extra_info"), row.get("reward_model")
    if not isinstance(reward_model, dict):
        raise DamagedRowError('"reward_model" is not an object with "ground_truth"')
    if isinstance(extra_info, dict) and isinstance(extra_info.get("question"), str):
        question = require_text(extra_info, "question")
    else:
        messages = row.get("prompt")
        if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
            raise DamagedRowError('"prompt" is not a list of messages')
        question = require_text(messages[-1], "content")
    return FileExample(question.strip(), require_texts(reward_model, "ground_truth"), require_text(row, "context"))


def _read_ruler_hqa(row: TableRow) -> FileExample:
    """Return an example whose length is its passages: `num_docs`, or the number of lines such as "Document 1:"."""
    document = require_text(row, "context")
    passage_count = (
        require_positive(row, "num_docs") if "num_docs" in row else sum(1 for _ in _PASSAGE_HEADING.finditer(document))
    )
    if not passage_count:
        raise DamagedRowError('"context" has no line such as "Document 1:", and there is no "num_docs"')
    return FileExample(
        require_text(row, "input").strip(), require_texts(row, "answers"), document, length=passage_count
    )


ROW_FORMATS: Final = {
    "qa_files": RowFormat(_read_own_question, "Write each row with a question, its document and its answers."),
    "memagent_files": RowFormat(
        _read_training_question, "MemAgent's rows have prompt, context, reward_model and extra_info."
    ),
    "ruler_hqa_files": RowFormat(
        _read_ruler_hqa, "RULER-HQA's rows have _id, context, input and answers.", LengthUnit.PASSAGES
    ),
}
