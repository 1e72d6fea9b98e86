"""Questions whose paragraphs are among others: RULER's two QA tasks, by tokens, and RULER-HQA, by passages.

Questions and paragraphs come from a data file: SQuAD's for `qa_1`, HotpotQA's for `qa_2` and `ruler_hqa`. The `index`
is the same question at every length. Besides the gold paragraphs, there are the question's own distractors, then
paragraphs of other questions, all in random order, without a second copy of a gold one.

`qa_1` and `qa_2` repeat the paragraphs, in another order, if a length needs more than there are, as RULER does: SQuAD's
small files are otherwise too short for a million tokens. `ruler_hqa` refuses that: its lengths count different
passages. Small variants leave out questions and answers that do not fit the embedded policy's budgets, 96 and 48
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from memagent_evaluation.data_files.published import data_paths
from memagent_evaluation.data_files.qa_records import Paragraph, QARecord, records_of
from memagent_evaluation.samples import LengthUnit, Metric, Sample, TaskSettings
from memagent_evaluation.tasks.generated import SMALL_ANSWER_TOKENS, GeneratedTask, Order, source
from memagent_evaluation.tasks.placements import DocumentLayout, Insertion
from memagent_graph.errors import EvaluationError

PASSAGE_TASKS = {"qa_1": "squad", "qa_2": "hotpotqa", "ruler_hqa": "hotpotqa"}
"""The tasks, with the data set of each."""

_QA_ANSWER_TOKENS, _HQA_ANSWER_TOKENS = 32, 128
_SMALL_QUESTION_TOKENS = 96
_OWN_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Passages:
    """Numbered paragraphs."""

    texts: Callable[[], Iterator[str]]

    def units(self) -> Iterator[str]:
        """Return the paragraphs, each with its title."""
        return self.texts()

    def piece(self, position: int, text: str) -> str:
        """Return a paragraph with its number."""
        return f"Document {position + 1}:\n{text}\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassagesTask(GeneratedTask):
    """Questions on paragraphs.

    Attributes:
        records: the questions.
        paragraphs: everything that can be a distractor, each once.
    """

    records: Sequence[QARecord] = field(repr=False)
    paragraphs: Sequence[Paragraph] = field(repr=False)

    def sample(self, length: int, index: int) -> Sample:
        """Return the `index`-th sample of a length.

        Raises:
            EvaluationError: the gold paragraphs do not fit, or there are not enough questions or passages.
        """
        chance = self.chance(length, index)
        record = self._record(index)
        gold = [
            Insertion(paragraph.written, chance.random(), record.contribution(paragraph)) for paragraph in record.gold
        ]
        gold_texts = {paragraph.text for paragraph in record.gold}
        own = [paragraph for paragraph in dict.fromkeys(record.distractors) if paragraph.text not in gold_texts]
        chance.shuffle(own)
        if self.unit is LengthUnit.PASSAGES:
            return self._by_passages(length, index, record, gold, own)
        room = self.room(length, record.question) - self._tokens([paragraph.text for paragraph in gold])
        own = self._that_fit(own, _OWN_SHARE * room)
        decoys = [Insertion(paragraph.written, chance.random()) for paragraph in own]
        haystack = Passages(
            partial(self._others, length, index, frozenset(gold_texts | {paragraph.text for paragraph in own}))
        )
        return self.planned(length, index, record.question, record.answers, haystack, [*gold, *decoys])

    def count(self, length: int) -> int:
        """Return how many samples there are of any length: one for each question."""
        del length
        return len(self.records)

    def question(self, length: int, index: int) -> str:
        """Return the question of a sample, without planning its document. Raises EvaluationError like `sample`."""
        return self._record(index).question

    def _by_passages(
        self, length: int, index: int, record: QARecord, gold: list[Insertion], own: list[Paragraph]
    ) -> Sample:
        if length < len(gold):
            raise self.too_short(length, len(gold) - length)
        own = own[: length - len(gold)]
        left = length - len(gold) - len(own)
        used = frozenset({paragraph.text for paragraph in (*record.gold, *own)})
        if left and left > (number := sum(paragraph.text not in used for paragraph in self.paragraphs)):
            raise EvaluationError(
                f"{length:,} passages are more than the data file has: {number + length - left:,} for this question",
                hint="Ask for fewer, or name a data file with more questions, such as the training split.",
            )
        chance = self.chance(length, index, "places")
        inserted = [*gold, *(Insertion(paragraph.written, 0.0) for paragraph in own)]
        places = sorted(chance.sample(range(length), len(inserted)))
        chance.shuffle(inserted)
        slots = tuple(place - number for number, place in enumerate(places))
        layout = DocumentLayout(tuple(inserted), slots, left)
        haystack = Passages(partial(self._others, length, index, used))
        text = partial(layout.pieces, haystack)
        return Sample(self, length, index, record.question, record.answers, text, layout.needles(haystack), length)

    def _record(self, index: int) -> QARecord:
        if index >= len(self.records):
            raise EvaluationError(
                f"{self.name} has no sample {index}: the data file has {len(self.records):,} questions",
                hint="Ask for fewer samples, or name a data file with more questions.",
            )
        return self.records[Order(len(self.records), source(self.settings, self.name, "questions"))[index]]

    def _that_fit(self, paragraphs: Sequence[Paragraph], room: float) -> list[Paragraph]:
        fitting = []
        for paragraph in paragraphs:
            room -= self._tokens([paragraph.written])
            if room < 0:
                break
            fitting.append(paragraph)
        return fitting

    def _tokens(self, texts: Sequence[str]) -> int:
        """Return the approximate tokens of passages: their numbers are not known yet."""
        return sum(self.settings.tokenizer.count(f"Document 100:\n{text}\n\n") for text in texts)

    def _others(self, length: int, index: int, used: frozenset[str]) -> Iterator[str]:
        """Yield all paragraphs except those with a used text, repeated without end, each time in another order."""
        chance = self.chance(length, index, "others")
        none_yet = True
        while True:
            for place in Order(len(self.paragraphs), chance):
                paragraph = self.paragraphs[place]
                if paragraph.text not in used:
                    none_yet = False
                    yield paragraph.written
            if none_yet:
                raise EvaluationError(
                    f"the data file of {self.name} has no paragraph that could be a distractor",
                    hint="Name a data file with more questions.",
                )


def passage_task(name: str, settings: TaskSettings) -> PassagesTask:
    """One of `PASSAGE_TASKS`.

    Raises:
        EvaluationError: its data file is missing, damaged or another data set's, or no question fits a small policy.
    """
    data_set = PASSAGE_TASKS[name]
    records = records_of(data_paths(data_set, settings.data, name), data_set)
    return passages_from(records, name, settings)


def passages_from(records: Sequence[QARecord], name: str, settings: TaskSettings) -> PassagesTask:
    """One of `PASSAGE_TASKS` on records of your own.

    Raises:
        EvaluationError: None of them can be asked.
    """
    pool = tuple(dict.fromkeys(paragraph for record in records for paragraph in (*record.gold, *record.distractors)))
    if settings.small:
        count = settings.tokenizer.count
        records = [
            record
            for record in records
            if count(record.question) <= _SMALL_QUESTION_TOKENS
            and max(map(count, record.answers), default=0) <= SMALL_ANSWER_TOKENS
        ]
    if not records:
        raise EvaluationError(
            f"there is no question for {name}" + (" that is short enough" if settings.small else ""),
            hint="Name another data file" + (", or do without the small variant." if settings.small else "."),
        )
    by_passages = name == "ruler_hqa"
    return PassagesTask(
        name=name,
        settings=settings,
        answer_tokens=_HQA_ANSWER_TOKENS if by_passages else _QA_ANSWER_TOKENS,
        metric=Metric.ANY,
        unit=LengthUnit.PASSAGES if by_passages else LengthUnit.TOKENS,
        records=records,
        paragraphs=pool,
    )
