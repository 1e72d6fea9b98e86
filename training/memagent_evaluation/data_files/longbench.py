"""LongBench: JSON lines with input, context, answers, length, dataset, language, all_classes and _id.

An example's own length is its document's and question's tokens, estimated with the policy's tokenizer; the file's
`length` counts words, or characters in Chinese. LongBench scores each data set by its own rule: F1 for questions, which
is `token_f1` here for those in English; ROUGE-L for summaries, which is a score here for answers that are sentences;
edit similarity for code, which is not available here. All data sets can be read; scores of code are not meaningful.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from memagent_evaluation.data_files.file_task import (
    DamagedRowError,
    Example,
    FileTask,
    RowExamples,
    estimated_lengths,
    text_of,
    texts_of,
)
from memagent_evaluation.data_files.row_files import Row, open_rows
from memagent_evaluation.samples import LengthUnit, Metric, TaskSettings

ANSWER_TOKENS: Final = 512
"""The longest answer that LongBench allows in any data set."""

INSTRUCTIONS: Final = {
    "gov_report": "Summarise the report on one page.",
    "multi_news": "Summarise what these news articles report together on one page.",
    "qmsum": "Answer this request on the meeting in one or more sentences.",
    "vcsum": "请写出这份会议记录的摘要。",
    "dureader": "请根据文章回答问题。",
    "multifieldqa_zh": "请根据文章简短回答问题。",
    "trec": "Of which type is this question? Name one of the types that the examples show.",
    "samsum": "Summarise this dialogue as the examples do.",
    "lsht": "请按照例子判断这条新闻属于哪个类别，只写类别名。",
    "passage_count": "Some paragraphs occur more than once. How many different paragraphs are there? Give the number.",
    "passage_retrieval_en": 'Which paragraph is this the summary of? Answer like "Paragraph 1".',
    "passage_retrieval_zh": "这个摘要是哪一段的？请按“段落1”的格式回答。",
    "lcc": "Write the next line of the code.",
    "repobench-p": "Write the next line of this code; the files before it belong to the same repository.",
}
"""The instruction by data set, for those whose input does not have it. The wording is not LongBench's."""


def load_longbench(paths: Sequence[Path], settings: TaskSettings) -> FileTask:
    """The examples of LongBench files."""
    examples = RowExamples(open_rows(paths), example_of, "LongBench's rows have input, context, answers and dataset.")
    own_lengths = estimated_lengths(examples, settings.tokenizer)
    source = ", ".join(map(str, paths))
    return FileTask("longbench", Metric.ANY, LengthUnit.TOKENS, ANSWER_TOKENS, examples, own_lengths, source)


def example_of(row: Row) -> Example:
    """The example of a LongBench row."""
    given = text_of(row, "input", empty=True).strip()
    dataset = text_of(row, "dataset") if "dataset" in row or not given else ""
    # LongBench-E's files are named hotpotqa_e and so on.
    instruction = INSTRUCTIONS.get(dataset.removesuffix("_e"), "")
    if not (given or instruction):
        raise DamagedRowError(f'"input" is empty, and what to ask in the data set {dataset!r} is not known')
    question = "\n\n".join(filter(None, (instruction, given)))
    return Example(question, texts_of(row, "answers"), text_of(row, "context"))
