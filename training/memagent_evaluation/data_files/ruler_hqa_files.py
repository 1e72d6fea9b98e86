"""The published RULER-HQA evaluation files: eval_50.json to eval_25600.json of BytedTsinghua-SIA/hotpotqa.

Each is a JSON list of objects with _id, context, input and answers. An example's own length is its number of passages:
`num_docs` if the row has it, otherwise the lines of its context that begin with "Document 1:" and so on.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from memagent_evaluation.data_files.file_task import (
    DamagedRowError,
    Example,
    FileTask,
    RowExamples,
    number_of,
    text_of,
    texts_of,
)
from memagent_evaluation.data_files.record_tasks import ANSWER_TOKENS
from memagent_evaluation.data_files.row_files import Row, open_rows
from memagent_evaluation.samples import LengthUnit, Metric, TaskSettings

_PASSAGE: Final = re.compile(r"^(?:Document|Passage) \d+:", re.MULTILINE)


def load_ruler_hqa_files(paths: Sequence[Path], settings: TaskSettings) -> FileTask:
    """The examples of RULER-HQA files."""
    del settings  # lengths are the file's own
    examples = RowExamples(open_rows(paths), example_of, "RULER-HQA's rows have _id, context, input and answers.")
    own_lengths = array("Q", examples.measured(_passages))
    source = ", ".join(map(str, paths))
    return FileTask("ruler_hqa_files", Metric.ANY, LengthUnit.PASSAGES, ANSWER_TOKENS, examples, own_lengths, source)


def example_of(row: Row) -> Example:
    """The example of a RULER-HQA row."""
    return Example(text_of(row, "input").strip(), texts_of(row, "answers"), text_of(row, "context"))


def _passages(row: Row, example: Example) -> int:
    if "num_docs" in row:
        return number_of(row, "num_docs")
    found = sum(1 for _ in _PASSAGE.finditer(example.document))
    if not found:
        raise DamagedRowError('"context" has no line that begins with "Document 1:", and there is no "num_docs"')
    return found
