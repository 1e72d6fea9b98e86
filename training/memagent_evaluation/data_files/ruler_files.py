"""Files from NVIDIA's RULER generator: JSON lines with index, input, outputs and length.

The question is at the end of `input`, and is found by this rule:

1. The last "What is / What are all the special magic ... mentioned in the provided text?" that begins a line, if there
   is one; otherwise the last line that begins with "Question:", from after the colon to the end. Only the last 4,000
   characters are searched, so that a document's own questions are not confused with it.
2. From "Answer:" on it is the beginning of an answer that the generator may have added, and is left out; so is
everything after a needle question's question mark, and the text of the field `answer_prefix` if a row has it.
3. Everything before the question is the document: the instructions that RULER begins with, and the worked example of
its word counts, stay in place.

An example's own length is the row's `length`: tokens of the generator's tokenizer, input and output together.
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
from memagent_evaluation.data_files.row_files import Row, open_rows
from memagent_evaluation.samples import LengthUnit, Metric, TaskSettings
from memagent_graph.errors import EvaluationError

ANSWER_TOKENS: Final = 128
"""The longest answer that RULER allows in any task."""
_SEARCHED_CHARACTERS: Final = 4000
_NEEDLE: Final = re.compile(
    r"^[ \t]*(What (?:is|are all) the special magic [^\n]*? mentioned in the provided text\?)", re.MULTILINE
)
_LABELLED: Final = re.compile(r"^[ \t]*Question:[ \t]*", re.MULTILINE)
_ANSWER: Final = re.compile(r"\bAnswer:")
_CHAT_MARK: Final = re.compile(r"\[/?INST\]|<\|[^|\n]{1,40}\|>|<(?:start|end)_of_turn>")
_FROM_DOCUMENTS: Final = "based on the given documents"
"""RULER uses this only in its question-answering tasks, whose outputs are wordings of one answer."""


def load_ruler_files(paths: Sequence[Path], settings: TaskSettings) -> FileTask:
    """The examples of the generator's files; all must have the same kind of score: question answering, or the other
    tasks.
    """
    del settings  # lengths are the file's own
    hint = "RULER's generator writes rows with index, input, outputs and length."
    examples = RowExamples(open_rows(paths), example_of, hint)
    metrics: set[Metric] = set()

    def length(row: Row, example: Example) -> int:
        metrics.add(Metric.ANY if _FROM_DOCUMENTS in example.document[-_SEARCHED_CHARACTERS:] else Metric.ALL)
        return number_of(row, "length")

    own_lengths = array("Q", examples.measured(length))
    source = ", ".join(map(str, paths))
    if len(metrics) > 1:
        raise EvaluationError(
            f"{source} has both RULER's questions on documents and its other tasks, which are scored differently",
            hint="Name one file after --data.",
        )
    return FileTask("ruler_files", metrics.pop(), LengthUnit.TOKENS, ANSWER_TOKENS, examples, own_lengths, source)


def example_of(row: Row) -> Example:
    """The example of a row of the generator's."""
    text = text_of(row, "input")
    prefix = row.get("answer_prefix")
    if isinstance(prefix, str) and prefix.strip():
        text = text.rstrip().removesuffix(prefix.strip())
    begin, question = split_question(text)
    return Example(question, texts_of(row, "outputs"), text[:begin])


def split_question(text: str) -> tuple[int, str]:
    """Where the question begins, including its label, and its text; see the module's rule.

    Raises:
        DamagedRowError: there is none.
    """
    first = max(0, len(text) - _SEARCHED_CHARACTERS)
    if first:
        first = text.find("\n", first) + 1 or len(text)
    end = text[first:]
    found = _last(_NEEDLE, end) or _last(_LABELLED, end)
    if found is not None:
        asked = end[found.start() :]
        if mark := _CHAT_MARK.search(asked):
            raise DamagedRowError(f'"input" has the chat template\'s {mark[0]!r}; generate it with the template "base"')
        question = found[1] if found.re is _NEEDLE else _ANSWER.split(end[found.end() :], maxsplit=1)[0].strip()
        if question:
            return first + found.start(), question
    raise DamagedRowError('"input" does not end with a question')


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007  the last one is wanted
        pass
    return found
