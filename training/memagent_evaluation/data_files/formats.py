"""The formats of data files with a row for each question: what each row means, and how its answers are scored.

qa_files          your own questions: {"question": ..., "document": "the whole text", "answers": ["a", "wording"]}; also
                  "documents" (a list of texts) or "context", and "answer"
memagent_files    MemAgent's training questions, hotpotqa_train.parquet: prompt, context, reward_model and extra_info
longbench         LongBench: input, context, answers, length, dataset, language, all_classes and _id
mrcr              OpenAI-MRCR: prompt (a JSON list of messages), answer and random_string_to_prepend
ruler_files       NVIDIA's RULER generator: index, input, outputs and length
ruler_hqa_files   MemAgent's RULER-HQA, eval_50.json to eval_25600.json: _id, context, input and answers

An example's own length is that of its document and question, estimated with the policy's tokenizer, unless its format
says otherwise below. Other fields are ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from memagent_evaluation.data_files.file_task import (
    DamagedRowError,
    FileExample,
    FileTask,
    RowExamples,
    example_lengths,
    number_of,
    text_of,
    texts_of,
)
from memagent_evaluation.data_files.table_rows import TableRow, open_rows
from memagent_evaluation.samples import LengthUnit, Metric, Sample, TaskSettings
from memagent_evaluation.scorers import similarity_after_prefix
from memagent_graph.errors import EvaluationError
from memagent_graph.storage.bounded_files import json_value

ANSWER_TOKENS: Final = 128
"""The longest answer that RULER and RULER-HQA allow in any task; LongBench allows 512."""
_SPARE_TOKENS: Final = 64
_DOCUMENT_NAMES: Final = ("document", "documents", "context")
_PARAGRAPH_BREAK: Final = "\n\n"
_MAX_PATH_LENGTH: Final = 1000
_PASSAGE: Final = re.compile(r"^(?:Document|Passage) \d+:", re.MULTILINE)
_SEARCHED_CHARACTERS: Final = 4000
_NEEDLE: Final = re.compile(
    r"^[ \t]*(What (?:is|are all) the special magic [^\n]*? mentioned in the provided text\?)", re.MULTILINE
)
_LABELLED: Final = re.compile(r"^[ \t]*Question:[ \t]*", re.MULTILINE)
_ANSWER: Final = re.compile(r"\bAnswer:")
_CHAT_MARK: Final = re.compile(r"\[/?INST\]|<\|[^|\n]{1,40}\|>|<(?:start|end)_of_turn>")
_FROM_DOCUMENTS: Final = "based on the given documents"
"""RULER uses this only in its question-answering tasks, whose outputs are wordings of one answer."""
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
"""LongBench's instruction by data set, for those whose input does not have it. The wording is not LongBench's."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format of rows."""

    read: Callable[[TableRow], FileExample]
    """Makes the example of a row, or raises DamagedRowError."""
    hint: str
    """What its rows have, for messages."""
    unit: LengthUnit = LengthUnit.TOKENS
    answer_tokens: int | None = ANSWER_TOKENS
    """None: some more than the longest gold answer."""


@dataclass(frozen=True, eq=False)
class PrefixedTask(FileTask):
    """MRCR's questions, whose answers begin with a random string; also scored by its own rule."""

    prefixes: frozenset[str] = field(default=frozenset(), repr=False)
    """The strings that answers must begin with."""

    def own_score(self, sample: Sample, answer: str) -> float:
        """Return the published metric, 0 to 1: the similarity of answer and gold after the prefix.

        It uses the reader's answer: the box's content if answers are boxed.
        """
        (gold,) = sample.gold
        prefix = next((prefix for prefix in self.prefixes if gold.startswith(prefix)), "")
        return similarity_after_prefix(answer, gold, prefix)


def load_rows(name: str, paths: Sequence[Path], settings: TaskSettings) -> FileTask:
    """Return the task of the rows in files of one of `ROW_FORMATS`.

    Raises:
        EvaluationError: a row is damaged (the file and line are named), or examples are scored in different ways.
    """
    row_format = ROW_FORMATS[name]
    examples = RowExamples(open_rows(paths), row_format.read, row_format.hint)
    source = ", ".join(map(str, paths))
    metrics: set[Metric] = set()
    prefixes: set[str] = set()
    answer_tokens = row_format.answer_tokens or 0

    def note(example: FileExample) -> None:
        nonlocal answer_tokens
        metrics.add(example.metric)
        if row_format.answer_tokens is None:
            prefixes.add(example.prefix)
            answer_tokens = max(answer_tokens, settings.tokenizer.count(example.gold[0]) + _SPARE_TOKENS)

    lengths = example_lengths(examples, settings.tokenizer, note)
    if len(metrics) > 1:
        raise EvaluationError(
            f"{source} has both RULER's questions on documents and its other tasks, which are scored differently",
            hint="Name one file after --data.",
        )
    parts = (name, metrics.pop(), row_format.unit, answer_tokens, examples, lengths, source)
    return PrefixedTask(*parts, frozenset(prefixes)) if prefixes else FileTask(*parts)


def _own_question(row: TableRow) -> FileExample:
    answers = texts_of(row, "answer" if "answer" in row and "answers" not in row else "answers")
    name = next((name for name in _DOCUMENT_NAMES if name in row), _DOCUMENT_NAMES[0])
    document = _PARAGRAPH_BREAK.join(texts_of(row, name))
    if len(document) < _MAX_PATH_LENGTH and os.path.isfile(document):  # noqa: PTH113  no error for texts that are no path
        raise DamagedRowError(f'"{name}" is the path of a file, {document}, not its text')
    return FileExample(text_of(row, "question").strip(), answers, document)


def _released_example(row: TableRow) -> FileExample:
    """Return a question whose wordings are `reward_model.ground_truth`."""
    extra, reward_model = row.get("extra_info"), row.get("reward_model")
    if not isinstance(reward_model, dict):
        raise DamagedRowError('"reward_model" is not an object with "ground_truth"')
    if isinstance(extra, dict) and isinstance(extra.get("question"), str):
        question = text_of(extra, "question")
    else:
        question = _messages(row)[-1][1]
    return FileExample(question.strip(), texts_of(reward_model, "ground_truth"), text_of(row, "context"))


def _longbench(row: TableRow) -> FileExample:
    """Return a question with its instruction.

    LongBench scores each data set by its own rule: F1 for questions, which is `token_f1` here for those in English;
    ROUGE-L for summaries, which is a score here for answers that are sentences; edit similarity for code, which is not
    available: scores of code are not meaningful. The file's `length` counts words, or characters in Chinese, and is not
    used.
    """
    text = text_of(row, "input", empty=True).strip()
    dataset = text_of(row, "dataset") if "dataset" in row or not text else ""
    # LongBench-E's files are named hotpotqa_e and so on.
    instruction = INSTRUCTIONS.get(dataset.removesuffix("_e"), "")
    if not (text or instruction):
        raise DamagedRowError(f'"input" is empty, and what to ask in the data set {dataset!r} is not known')
    question = "\n\n".join(filter(None, (instruction, text)))
    return FileExample(question, texts_of(row, "answers"), text_of(row, "context"))


def _mrcr(row: TableRow) -> FileExample:
    """Return the last message as the question, and those before it as the document, each under its role's name."""
    messages = _messages(row)
    gold, prefix = text_of(row, "answer"), text_of(row, "random_string_to_prepend")
    if not gold.startswith(prefix):
        raise DamagedRowError(f'"answer" does not begin with {prefix!r}')
    role, question = messages[-1]
    if role != "user" or len(messages) < 2:
        raise DamagedRowError('"prompt" does not end with a question of the user')
    document = "\n\n".join(f"{role.capitalize()}: {content}" for role, content in messages[:-1])
    return FileExample(question.strip(), (gold,), document, metric=Metric.ALL, prefix=prefix)


def _messages(row: TableRow) -> list[tuple[str, str]]:
    value: Any = row.get("prompt")
    if isinstance(value, str):
        try:
            value = json_value(value)
        except ValueError as error:
            raise DamagedRowError(f'"prompt" is not valid JSON: {error}') from error
    if not isinstance(value, list) or not value:
        raise DamagedRowError('"prompt" is not a list of messages')
    if not all(isinstance(message, dict) for message in value):
        raise DamagedRowError('"prompt" has an entry that is not a message')
    return [(text_of(message, "role"), text_of(message, "content", empty=True)) for message in value]


def _ruler(row: TableRow) -> FileExample:
    """Return an example whose length is the row's `length`: tokens of the generator's tokenizer, with the output."""
    text = text_of(row, "input")
    prefix = row.get("answer_prefix")
    if isinstance(prefix, str) and prefix.strip():
        text = text.rstrip().removesuffix(prefix.strip())
    begin, question = split_question(text)
    document = text[:begin]
    metric = Metric.ANY if _FROM_DOCUMENTS in document[-_SEARCHED_CHARACTERS:] else Metric.ALL
    gold = texts_of(row, "outputs")
    return FileExample(question, gold, document, metric=metric, length=number_of(row, "length"))


def split_question(text: str) -> tuple[int, str]:
    """Return where the question at the end of RULER's `input` begins, including its label, and its text.

    1. It is the last "What is / What are all the special magic ... mentioned in the provided text?" that begins a line,
       if there is one; otherwise the last line that begins with "Question:", from after the colon to the end. Only the
       last 4,000 characters are searched, so that a document's own questions are not confused with it.
    2. From "Answer:" on it is the beginning of an answer that the generator may have added, and is left out; so is
       everything after a needle question's question mark, and the text of the field `answer_prefix` if a row has it.
    3. Everything before the question is the document: the instructions that RULER begins with, and the worked example
       of its word counts, stay in place.

    Raises:
        DamagedRowError: there is none.
    """
    first = max(0, len(text) - _SEARCHED_CHARACTERS)
    if first:
        first = text.find("\n", first) + 1 or len(text)
    end = text[first:]
    matches = [*_NEEDLE.finditer(end)] or [*_LABELLED.finditer(end)]
    if matches:
        match = matches[-1]
        if mark := _CHAT_MARK.search(end, match.start()):
            raise DamagedRowError(f'"input" has the chat template\'s {mark[0]!r}; generate it with the template "base"')
        question = match[1] if match.re is _NEEDLE else _ANSWER.split(end[match.end() :], maxsplit=1)[0].strip()
        if question:
            return first + match.start(), question
    raise DamagedRowError('"input" does not end with a question')


def _ruler_hqa(row: TableRow) -> FileExample:
    """Return an example whose length is its passages: `num_docs`, or the lines that begin with "Document 1:"."""
    document = text_of(row, "context")
    passages = number_of(row, "num_docs") if "num_docs" in row else sum(1 for _ in _PASSAGE.finditer(document))
    if not passages:
        raise DamagedRowError('"context" has no line that begins with "Document 1:", and there is no "num_docs"')
    return FileExample(text_of(row, "input").strip(), texts_of(row, "answers"), document, length=passages)


ROW_FORMATS: Final = {
    "qa_files": RowFormat(_own_question, "Give each row a question, its document and its answers."),
    "memagent_files": RowFormat(
        _released_example, "MemAgent's rows have prompt, context, reward_model and extra_info."
    ),
    "longbench": RowFormat(_longbench, "LongBench's rows have input, context, answers and dataset.", answer_tokens=512),
    "mrcr": RowFormat(_mrcr, "MRCR's rows have prompt, answer and random_string_to_prepend.", answer_tokens=None),
    "ruler_files": RowFormat(_ruler, "RULER's generator writes rows with index, input, outputs and length."),
    "ruler_hqa_files": RowFormat(
        _ruler_hqa, "RULER-HQA's rows have _id, context, input and answers.", LengthUnit.PASSAGES
    ),
}
