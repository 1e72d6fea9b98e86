"""The formats of data files with a row for each question, and what each row means.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from memagent_evaluation.data_files.file_task import (
    DamagedRowError,
    FileExample,
    FileTask,
    RowExamples,
    RowFormat,
    measure_examples,
    require_positive,
    require_text,
    require_texts,
)
from memagent_evaluation.data_files.table_rows import TableRow, open_rows
from memagent_evaluation.samples import LengthUnit, Metric, TaskSettings

ANSWER_TOKENS: Final = 128
"""The longest answer that RULER-HQA allows."""
_DOCUMENT_FIELDS: Final = ("document", "documents", "context")
_PARAGRAPH_BREAK: Final = "\n\n"
_MAX_PATH_LENGTH: Final = 1000
_PASSAGE: Final = re.compile(r"^(?:Document|Passage) \d+:", re.MULTILINE)


def load_rows(name: str, paths: Sequence[Path], settings: TaskSettings) -> FileTask:
    """Return the task of the rows in files of one of `ROW_FORMATS`.

    Raises:
        EvaluationError: a row is damaged; the message names the file and line.
    """
    examples = RowExamples(open_rows(paths), ROW_FORMATS[name])
    lengths, source = measure_examples(examples, settings.tokenizer), ", ".join(map(str, paths))
    return FileTask(name, Metric.ANY, ROW_FORMATS[name].unit, ANSWER_TOKENS, examples, lengths, source)


def _read_own_question(row: TableRow) -> FileExample:
    answers = require_texts(row, "answer" if "answer" in row and "answers" not in row else "answers")
    field = next((field for field in _DOCUMENT_FIELDS if field in row), _DOCUMENT_FIELDS[0])
    document = _PARAGRAPH_BREAK.join(require_texts(row, field))
    if len(document) < _MAX_PATH_LENGTH and os.path.isfile(document):  # noqa: PTH113  no error for texts that are no path
        raise DamagedRowError(f'"{field}" is the path of a file, {document}, not its text')
    question = require_text(row, "input" if "input" in row and "question" not in row else "question")
    return FileExample(question.strip(), answers, document)


def _read_training_question(row: TableRow) -> FileExample:
    extra, reward_model = row.get("extra_info"), row.get("reward_model")
    if not isinstance(reward_model, dict):
        raise DamagedRowError('"reward_model" is not an object with "ground_truth"')
    if isinstance(extra, dict) and isinstance(extra.get("question"), str):
        question = require_text(extra, "question")
    else:
        messages = row.get("prompt")
        if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
            raise DamagedRowError('"prompt" is not a list of messages')
        question = require_text(messages[-1], "content")
    return FileExample(question.strip(), require_texts(reward_model, "ground_truth"), require_text(row, "context"))


def _read_ruler_hqa(row: TableRow) -> FileExample:
    """Return an example whose length is its passages: `num_docs`, or the lines that begin with "Document 1:"."""
    document = require_text(row, "context")
    passages = require_positive(row, "num_docs") if "num_docs" in row else sum(1 for _ in _PASSAGE.finditer(document))
    if not passages:
        raise DamagedRowError('"context" has no line that begins with "Document 1:", and there is no "num_docs"')
    return FileExample(require_text(row, "input").strip(), require_texts(row, "answers"), document, length=passages)


ROW_FORMATS: Final = {
    "qa_files": RowFormat(_read_own_question, "Write each row with a question, its document and its answers."),
    "memagent_files": RowFormat(
        _read_training_question, "MemAgent's rows have prompt, context, reward_model and extra_info."
    ),
    "ruler_hqa_files": RowFormat(
        _read_ruler_hqa, "RULER-HQA's rows have _id, context, input and answers.", LengthUnit.PASSAGES
    ),
}
