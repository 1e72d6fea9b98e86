"""Questions whose paragraphs are hidden among others: RULER's two QA tasks (in tokens), and RULER-HQA (in passages).

Questions and paragraphs come from a data file: SQuAD's for `qa_1`, HotpotQA's for `qa_2` and `ruler_hqa`. An `index` is
the same question at every length. A document has the gold paragraphs, the question's own distractors, then paragraphs
of other questions, all in random order, without second copies of gold paragraphs.

`qa_1` and `qa_2` repeat the paragraphs, in another order, if a length needs more than there are, as RULER does: SQuAD's
small files are otherwise too short for a million tokens. `ruler_hqa` refuses that: its lengths count different
passages. There are no small variants: `--small` changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from memagent_evaluation.data_files import find_data_paths
from memagent_evaluation.data_files.qa_records import Paragraph, QARecord, read_records
from memagent_evaluation.samples import LengthUnit, Metric, Sample, TaskSettings
from memagent_evaluation.tasks.generated import GeneratedTask, iter_shuffled, make_rng
from memagent_evaluation.tasks.placements import DocumentLayout, Haystack, Insertion
from memagent_graph.errors import EvaluationError

PASSAGE_TASKS = {"qa_1": "squad", "qa_2": "hotpotqa", "ruler_hqa": "hotpotqa"}
"""The tasks, with the data set of each."""

_QA_ANSWER_TOKENS, _HQA_ANSWER_TOKENS = 32, 128
_MAX_DISTRACTOR_FRACTION = 0.75
"""The maximum fraction of a document that the question's own distractors take."""


def _format_passage(position: int, text: str) -> str:
    return f"Document {position + 1}:\n{text}\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassagesTask(GeneratedTask):
    """Questions about paragraphs of a data set.

    Attributes:
        records: the questions with their paragraphs, in the order of the samples.
        paragraphs: all distinct paragraphs, any of which can be a distractor.
    """

    records: Sequence[QARecord] = field(repr=False)
    paragraphs: Sequence[Paragraph] = field(repr=False)

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the gold paragraphs do not fit, or there are not enough questions or passages.
        """
        rng = self.make_sample_rng(length, index)
        record = self._get_record(index)
        gold_insertions = [
            Insertion(paragraph.text_with_title, rng.random(), record.find_evidence(paragraph))
            for paragraph in record.gold
        ]
        gold_texts = {paragraph.text for paragraph in record.gold}
        distractors = [paragraph for paragraph in dict.fromkeys(record.distractors) if paragraph.text not in gold_texts]
        rng.shuffle(distractors)
        if self.unit is LengthUnit.PASSAGES:
            return self._sample_by_passages(length, index, record, gold_insertions, distractors)
        budget = self.compute_document_budget(length, record.question) - self._count_tokens(
            [insertion.text for insertion in gold_insertions]
        )
        distractors = self._take_fitting(distractors, _MAX_DISTRACTOR_FRACTION * budget)
        distractor_insertions = [Insertion(paragraph.text_with_title, rng.random()) for paragraph in distractors]
        used_texts = frozenset(gold_texts | {paragraph.text for paragraph in distractors})
        haystack = Haystack(partial(self._iter_other_passages, length, index, used_texts), _format_passage)
        return self.lay_out_sample(
            length, index, record.question, record.answers, haystack, [*gold_insertions, *distractor_insertions]
        )

    def count(self, length: int) -> int:
        """Return how many samples there are of any length: one for each question."""
        del length
        return len(self.records)

    def get_question(self, length: int, index: int) -> str:
        """Return the question of a sample, without planning its document. Raises EvaluationError like `sample`."""
        return self._get_record(index).question

    def _sample_by_passages(
        self, length: int, index: int, record: QARecord, gold_insertions: list[Insertion], distractors: list[Paragraph]
    ) -> Sample:
        if length < len(gold_insertions):
            raise self.make_length_error(length, len(gold_insertions) - length)
        distractors = distractors[: length - len(gold_insertions)]
        other_count = length - len(gold_insertions) - len(distractors)
        used_texts = frozenset({paragraph.text for paragraph in (*record.gold, *distractors)})
        if other_count and other_count > (
            available := sum(paragraph.text not in used_texts for paragraph in self.paragraphs)
        ):
            raise EvaluationError(
                f"the data file has {available + length - other_count:,} passages for this question, not {length:,}",
                hint="Ask for fewer, or give a data file with more questions, such as the training split.",
            )
        rng = self.make_sample_rng(length, index, "places")
        insertions = [*gold_insertions, *(Insertion(paragraph.text_with_title, 0.0) for paragraph in distractors)]
        positions = sorted(rng.sample(range(length), len(insertions)))
        rng.shuffle(insertions)
        slots = tuple(position - insertions_before for insertions_before, position in enumerate(positions))
        haystack = Haystack(partial(self._iter_other_passages, length, index, used_texts), _format_passage)
        layout = DocumentLayout(haystack, tuple(insertions), slots, other_count)
        return Sample(
            self, length, index, record.question, record.answers, layout.iter_pieces, layout.find_needles(), length
        )

    def _get_record(self, index: int) -> QARecord:
        if index >= len(self.records):
            raise EvaluationError(
                f"{self.name} has no sample {index}: the data file has {len(self.records):,} questions",
                hint="Ask for fewer samples, or give a data file with more questions.",
            )
        return self.records[index]

    def _take_fitting(self, paragraphs: Sequence[Paragraph], budget: float) -> list[Paragraph]:
        fitting_paragraphs = []
        for paragraph in paragraphs:
            budget -= self._count_tokens([paragraph.text_with_title])
            if budget < 0:
                break
            fitting_paragraphs.append(paragraph)
        return fitting_paragraphs

    def _count_tokens(self, texts: Sequence[str]) -> int:
        """Return the approximate tokens of passages, whose numbers in the document are not known yet."""
        return sum(self.settings.tokenizer.count(_format_passage(99, text)) for text in texts)

    def _iter_other_passages(self, length: int, index: int, used_texts: frozenset[str]) -> Iterator[str]:
        """Yield the paragraphs whose texts are not in `used_texts`, without end, each time in another random order."""
        rng = self.make_sample_rng(length, index, "others")
        is_empty = True
        while True:
            for paragraph in iter_shuffled(self.paragraphs, rng):
                if paragraph.text not in used_texts:
                    is_empty = False
                    yield paragraph.text_with_title
            if is_empty:
                raise EvaluationError(
                    f"the data file of {self.name} has no paragraph that could be a distractor",
                    hint="Give a data file with more questions.",
                )


def load_passage_task(name: str, settings: TaskSettings) -> PassagesTask:
    """Return the task of one of `PASSAGE_TASKS`.

    Raises:
        EvaluationError: the data file is missing, damaged or another data set's.
    """
    data_set = PASSAGE_TASKS[name]
    records = read_records(find_data_paths(data_set, settings.data, name), data_set)
    return make_passage_task(records, name, settings)


def make_passage_task(records: Sequence[QARecord], name: str, settings: TaskSettings) -> PassagesTask:
    """Return the task of one of `PASSAGE_TASKS` for given records."""
    paragraphs = tuple(
        dict.fromkeys(paragraph for record in records for paragraph in (*record.gold, *record.distractors))
    )
    counts_passages = name == "ruler_hqa"
    return PassagesTask(
        name=name,
        settings=settings,
        answer_tokens=_HQA_ANSWER_TOKENS if counts_passages else _QA_ANSWER_TOKENS,
        metric=Metric.ANY,
        unit=LengthUnit.PASSAGES if counts_passages else LengthUnit.TOKENS,
        records=tuple(iter_shuffled(records, make_rng(settings, name, "questions"))),
        paragraphs=paragraphs,
    )
