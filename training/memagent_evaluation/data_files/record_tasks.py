"""HotpotQA and SQuAD as separate tasks: each question on its own paragraphs.

An example's own length is approximately the tokens of its paragraphs and question: each paragraph's tokens are counted
once and summed. HotpotQA documents have some 1,500 tokens, SQuAD's are whole articles. Paragraphs are shuffled, the
same way for equal seeds, because the files' order gives the answer away or has been lost.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memagent_evaluation.data_files.file_task import Example, FileTask
from memagent_evaluation.data_files.qa_records import Paragraph, QARecord, records_of
from memagent_evaluation.samples import LengthUnit, Metric, Needle, TaskSettings

ANSWER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class RecordExamples:
    """Examples made from records: the paragraphs of each, shuffled, blank lines between them."""

    records: Sequence[QARecord]
    seed: int

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int, /) -> Example:
        record = self.records[index]
        paragraphs = [*record.gold, *record.distractors]
        random.Random(f"{self.seed}/{record.id}").shuffle(paragraphs)
        texts = [each.written for each in paragraphs]
        document = "\n\n".join(texts)
        needles, at = [], 0
        for paragraph, text in zip(paragraphs, texts, strict=True):
            if paragraph in record.gold:
                needles.append(Needle(text, record.contribution(paragraph), at / len(document)))
            at += len(text) + 2
        return Example(record.question, record.answers, document, tuple(needles))


def load_records(name: str, paths: Sequence[Path], settings: TaskSettings) -> FileTask:
    """The questions of "hotpotqa", each among its ten paragraphs, or of "squad", each on its whole article."""
    tokenizer = settings.tokenizer
    records = records_of(paths, name)
    counts: dict[Paragraph, int] = {}
    own_lengths = array("Q")
    for record in records:
        total = tokenizer.count(record.question)
        for paragraph in (*record.gold, *record.distractors):
            if paragraph not in counts:
                counts[paragraph] = tokenizer.count(paragraph.written + "\n\n")
            total += counts[paragraph]
        own_lengths.append(total)
    examples = RecordExamples(records, settings.seed)
    source = ", ".join(map(str, paths))
    return FileTask(name, Metric.ANY, LengthUnit.TOKENS, ANSWER_TOKENS, examples, own_lengths, source)
