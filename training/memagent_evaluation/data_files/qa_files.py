"""Your own questions: JSON lines with question, context and answers; also JSON or Parquet.

    {"question": "Who built the pier?", "context": "...the whole document...", "answers": ["Rosa Brandt", "R. Brandt"]}

`answers` are wordings of one answer, a list or one text. Other fields are ignored. An example's own length is its
document's and question's tokens, estimated with the policy's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from memagent_evaluation.data_files.file_task import (
    Example,
    FileTask,
    RowExamples,
    estimated_lengths,
    text_of,
    texts_of,
)
from memagent_evaluation.data_files.row_files import Row, open_rows
from memagent_evaluation.samples import LengthUnit, Metric, TaskSettings

ANSWER_TOKENS: Final = 128


def load_qa_files(paths: Sequence[Path], settings: TaskSettings) -> FileTask:
    """The examples of such files."""
    examples = RowExamples(open_rows(paths), example_of, "Give each row a question, its context and its answers.")
    lengths = estimated_lengths(examples, settings.tokenizer)
    source = ", ".join(map(str, paths))
    return FileTask("qa_files", Metric.ANY, LengthUnit.TOKENS, ANSWER_TOKENS, examples, lengths, source)


def example_of(row: Row) -> Example:
    """The example of a row."""
    return Example(text_of(row, "question").strip(), texts_of(row, "answers"), text_of(row, "context"))
