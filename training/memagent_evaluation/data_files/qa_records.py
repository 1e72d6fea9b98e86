"""HotpotQA (distractor setting) and SQuAD (1.1 and 2) as question-answering records.

Both are read in their published form (one JSON file), HotpotQA also as the Hugging Face dataset `hotpot_qa` (JSON
lines, Parquet or a dataset folder).

Both are also tasks that ask each question about its own paragraphs: about 1,500 tokens in HotpotQA, an article in
SQuAD. The length of an example is the number of tokens of its question and paragraphs. Paragraphs are shuffled, the
same way for equal seeds, because the order in the file may give the answer away.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from memagent_evaluation.data_files.file_task import DamagedRowError, FileExample, FileTask, require_text
from memagent_evaluation.data_files.table_rows import TableRow, open_rows
from memagent_evaluation.samples import LengthUnit, Needle, TaskSettings
from memagent_evaluation.scorers import contains
from memagent_graph.errors import EvaluationError

_HINTS: Final = {
    "hotpotqa": "Use the distractor file with answers, such as hotpot_dev_distractor_v1.json.",
    "squad": "Use a file with answers, such as dev-v2.0.json or train-v1.1.json.",
}
_MAX_CHARACTERS: Final = 1 << 30
"""The maximum size of a data set, whose rows are all in memory. HotpotQA has about half as many characters."""
RECORD_NAMES: Final = tuple(_HINTS)


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A titled piece of an article."""

    title: str
    text: str

    @property
    def text_with_title(self) -> str:
        """The paragraph's text in a document."""
        return f"{self.title}\n{self.text}"


@dataclass(frozen=True, slots=True)
class QARecord:
    """A question, the paragraphs that answer it, and the distractors."""

    id: str
    """The question's id, unique in the data set."""
    question: str
    answers: tuple[str, ...]
    """Accepted wordings of the answer."""
    gold: tuple[Paragraph, ...]
    """The paragraphs that together answer the question."""
    distractors: tuple[Paragraph, ...] = ()
    """Paragraphs that belong to the question but do not answer it; empty if the data set has none."""

    def find_evidence(self, paragraph: Paragraph) -> str:
        """Return the wording of the answer in a gold paragraph, or its title if it only leads to the answer."""
        return next((answer for answer in self.answers if contains(paragraph.text, answer)), paragraph.title)


def read_records(paths: Sequence[Path], name: str) -> list[QARecord]:
    """Return all records of the files of "hotpotqa" or "squad", in their order.

    HotpotQA: the gold paragraphs are those in the supporting facts; the question's other paragraphs are distractors.
    SQuAD: the gold paragraph is the one that the question was asked about; the article's other paragraphs are
    distractors, as in RULER. Questions that SQuAD 2 marks as impossible have no answer and are left out.

    Raises:
        EvaluationError: a file is missing, damaged, of another data set, or too large; the message names the file and
            line.
        MissingExtraError: the format needs pyarrow (the extra "eval").
    """
    rows = open_rows(paths)
    records: list[QARecord] = []
    characters_left = _MAX_CHARACTERS
    for index in range(len(rows)):
        row = rows[index]
        characters_left -= _count_characters(row)
        try:
            if characters_left < 0:
                raise DamagedRowError(f"the rows up to here have more than {_MAX_CHARACTERS:,} characters")
            records += _CONVERTERS[name](row)
        except DamagedRowError as error:
            raise EvaluationError(f"{rows.get_location(index)}: {error}", hint=_HINTS[name]) from error
    if not records:
        raise EvaluationError(f"{rows.get_location(0)}: no question that has an answer", hint=_HINTS[name])
    return records


def _read_hotpotqa_record(row: TableRow) -> Iterator[QARecord]:
    paragraphs = []
    for title, sentences in _read_pairs(row, "context", "sentences"):
        if not (isinstance(sentences, list) and all(isinstance(sentence, str) for sentence in sentences)):
            raise DamagedRowError(f'"context" has no list of sentences for {title!r}')
        paragraphs.append(Paragraph(title, "".join(sentences).strip()))
    supporting_titles = {title for title, _ in _read_pairs(row, "supporting_facts", "sent_id")}
    if missing := supporting_titles - {paragraph.title for paragraph in paragraphs}:
        raise DamagedRowError(f"the supporting paragraph {min(missing)!r} is not in the context")
    if not supporting_titles:
        raise DamagedRowError('"supporting_facts" is empty')
    yield QARecord(
        id=require_text(row, "_id" if "_id" in row else "id"),
        question=require_text(row, "question").strip(),
        answers=(require_text(row, "answer").strip(),),
        gold=tuple(paragraph for paragraph in paragraphs if paragraph.title in supporting_titles),
        distractors=tuple(paragraph for paragraph in paragraphs if paragraph.title not in supporting_titles),
    )


def _read_pairs(row: TableRow, name: str, value_field: str) -> list[tuple[str, Any]]:
    """Return pairs of a title and a value: [[title, value], ...] as published, two lists in `hotpot_qa`."""
    value: Any = row.get(name)
    if isinstance(value, dict):
        titles, values = value.get("title"), value.get(value_field)
        value = None
        if isinstance(titles, list) and isinstance(values, list) and len(titles) == len(values):
            value = list(zip(titles, values, strict=True))
    if not isinstance(value, list) or not all(
        isinstance(paragraph, list | tuple) and len(paragraph) == 2 and isinstance(paragraph[0], str)
        for paragraph in value
    ):
        raise DamagedRowError(f'"{name}" is not a list of pairs with a title')
    return [(title, pair_value) for title, pair_value in value]


def _read_squad_article(row: TableRow) -> Iterator[QARecord]:
    """Yield the records of an article, a row of the published file."""
    title = require_text(row, "title").replace("_", " ")
    entries = [
        (Paragraph(title, require_text(content, "context").strip()), content)
        for content in _read_objects(row, "paragraphs")
    ]
    paragraphs = [paragraph for paragraph, _ in entries]
    for index, (paragraph, content) in enumerate(entries):
        other_paragraphs = tuple(paragraphs[:index] + paragraphs[index + 1 :])
        for question in _read_objects(content, "qas"):
            if not question.get("is_impossible", False):
                answers = [require_text(answer, "text").strip() for answer in _read_objects(question, "answers")]
                if not answers:
                    raise DamagedRowError(f"the question {question.get('id')!r} has no answer")
                yield QARecord(
                    id=require_text(question, "id"),
                    question=require_text(question, "question").strip(),
                    answers=tuple(dict.fromkeys(answers)),
                    gold=(paragraph,),
                    distractors=other_paragraphs,
                )


_CONVERTERS: Final[Mapping[str, Callable[[TableRow], Iterator[QARecord]]]] = {
    "hotpotqa": _read_hotpotqa_record,
    "squad": _read_squad_article,
}
"""For each data set, the function that converts a row."""


def _count_characters(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return len(value) if isinstance(value, str) else sum(map(_count_characters, children))


def _read_objects(row: TableRow, name: str) -> list[TableRow]:
    value: Any = row.get(name)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise DamagedRowError(f'"{name}" is not a list of objects')
    return value


def _make_example(records: Sequence[QARecord], seed: int, index: int) -> FileExample:
    """Return the example whose document is a record's shuffled paragraphs, with blank lines between them."""
    record = records[index]
    paragraphs = [*record.gold, *record.distractors]
    random.Random(f"{seed}/{record.id}").shuffle(paragraphs)
    texts = [paragraph.text_with_title for paragraph in paragraphs]
    document = "\n\n".join(texts)
    needles, start = [], 0
    for paragraph, text in zip(paragraphs, texts, strict=True):
        if paragraph in record.gold:
            needles.append(Needle(text, record.find_evidence(paragraph), start / len(document)))
        start += len(text) + 2
    return FileExample(record.question, record.answers, document, tuple(needles))


def load_record_task(name: str, paths: Sequence[Path], settings: TaskSettings) -> FileTask:
    """Return the task "hotpotqa" (documents of ten paragraphs) or "squad" (whole articles)."""
    tokenizer = settings.tokenizer
    records = read_records(paths, name)
    token_counts: dict[Paragraph, int] = {}
    example_lengths = array("Q")
    for record in records:
        token_count = tokenizer.count(record.question)
        for paragraph in (*record.gold, *record.distractors):
            if paragraph not in token_counts:
                token_counts[paragraph] = tokenizer.count(paragraph.text_with_title + "\n\n")
            token_count += token_counts[paragraph]
        example_lengths.append(token_count)
    read_example = partial(_make_example, records, settings.seed)
    return FileTask(name, LengthUnit.TOKENS, read_example, example_lengths, ", ".join(map(str, paths)))
