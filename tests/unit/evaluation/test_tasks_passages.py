"""Questions with gold paragraphs among distractors, by tokens (qa_1, qa_2) and by passages (ruler_hqa)."""

import random
import re

import pytest

from memagent_evaluation.data_files.qa_records import Paragraph, QARecord
from memagent_evaluation.samples import LengthUnit, Metric
from memagent_evaluation.tasks import TaskSettings
from memagent_evaluation.tasks.passages import make_passage_task
from memagent_graph.errors import EvaluationError
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")
SETTINGS = TaskSettings(TOKENIZER)
PASSAGE_HEADER = re.compile(r"^Document (\d+):\n", re.MULTILINE)


def make_records(count=60):
    chance = random.Random(0)

    def paragraph(title, fact):
        filler = ("".join(chance.choices("etaoinshrd", k=chance.randint(2, 8))) for _ in range(chance.randint(5, 60)))
        return Paragraph(title, f"{fact} {' '.join(filler)}.")

    return [
        QARecord(
            f"q{n}",
            f"Where was the teacher of pupil {n} born?",
            (f"Town{n}ville", f"the town of Town{n}ville"),
            (
                paragraph(f"Pupil {n}", f"Pupil {n} learned from Ada {n}."),
                paragraph(f"Ada {n}", f"Born in Town{n}ville."),
            ),
            tuple(paragraph(f"Other {n}.{k}", "Nothing.") for k in range(8)),
        )
        for n in range(count)
    ]


RECORDS = make_records()


def draw_sample(task, length, index=0, records=RECORDS):
    """Return a sample, its text, its passages, and the record that it asks about."""
    sample = task.sample(length, index)
    text = "".join(sample.text())
    numbers = [int(number) for number in PASSAGE_HEADER.findall(text)]
    assert numbers == list(range(1, len(numbers) + 1))
    (record,) = [record for record in records if record.question == sample.question]
    return sample, text, [passage.strip() for passage in PASSAGE_HEADER.split(text)[2::2]], record


def format_paragraph(paragraph):
    return f"{paragraph.title}\n{paragraph.text}"


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
@pytest.mark.parametrize("length", [1500, 9000])
def test_document_of_the_requested_length_has_gold_and_distractors(name, length):
    task = make_passage_task(RECORDS, name, SETTINGS)
    assert (task.metric, task.unit, task.answer_tokens) == (Metric.ANY, LengthUnit.TOKENS, 32)
    for index in range(5):
        sample, text, paragraphs, record = draw_sample(task, length, index)
        tokens = TOKENIZER.count(text) + TOKENIZER.count(sample.question) + 32
        assert 0 <= length - tokens < 300, "short by less than a passage"
        assert abs(tokens - sample.reached_length) <= 2
        assert len(paragraphs) == len(set(paragraphs))
        assert {format_paragraph(paragraph) for paragraph in record.gold} <= set(paragraphs)
        own_distractors = {format_paragraph(paragraph) for paragraph in record.distractors}
        assert own_distractors <= set(paragraphs) if length == 9000 else own_distractors & set(paragraphs)
        assert sample.gold == record.answers
        first, second = map(format_paragraph, record.gold)
        needle_golds = {needle.text: needle.gold for needle in sample.needles}
        assert needle_golds == {first: record.gold[0].title, second: record.answers[0]}
        assert all(text[round(needle.depth * len(text)) :].startswith(needle.text) for needle in sample.needles)


def test_index_determines_the_question_at_every_length():
    records = RECORDS[:12]
    for name, length, other_length in (("qa_2", 1000, 1500), ("ruler_hqa", 10, 20)):
        task = make_passage_task(records, name, SETTINGS)
        questions = [task.sample(length, index).question for index in range(12)]
        assert questions == [task.sample(other_length, index).question for index in range(12)]
        assert set(questions) == {record.question for record in records}
        assert questions != [record.question for record in records]
        with pytest.raises(EvaluationError, match=r"no sample 12: the data file has 12 questions"):
            task.sample(length, 12)


def test_gold_paragraphs_occur_at_all_depths():
    task = make_passage_task(RECORDS, "qa_2", SETTINGS)
    depths = sorted(task.sample(2500, index).needles[0].depth for index in range(40))
    assert depths[0] < 0.15
    assert depths[-1] > 0.8
    assert sum(0.3 < depth < 0.7 for depth in depths) > 6


def test_long_documents_repeat_distractors_but_never_gold():
    _, _, paragraphs, record = draw_sample(make_passage_task(RECORDS[:3], "qa_1", SETTINGS), 20_000)
    assert len(paragraphs) > 2 * len(set(paragraphs))
    assert all(paragraphs.count(format_paragraph(paragraph)) == 1 for paragraph in (*record.gold, *record.distractors))


@pytest.mark.parametrize("length", [2, 7, 10, 300, 600])
def test_ruler_hqa_has_the_requested_number_of_distinct_passages(length):
    task = make_passage_task(RECORDS, "ruler_hqa", SETTINGS)
    assert (task.metric, task.unit) == (Metric.ANY, LengthUnit.PASSAGES)
    for index in range(3):
        sample, text, paragraphs, record = draw_sample(task, length, index)
        assert len(paragraphs) == len(set(paragraphs)) == length
        assert {format_paragraph(paragraph) for paragraph in record.gold} <= set(paragraphs)
        assert set(paragraphs) <= {
            format_paragraph(paragraph) for other in RECORDS for paragraph in (*other.gold, *other.distractors)
        }
        own_distractors = {format_paragraph(paragraph) for paragraph in record.distractors}
        assert len(own_distractors & set(paragraphs)) == min(8, length - 2)
        assert len(sample.needles) == 2
        assert all(text[round(needle.depth * len(text)) :].startswith(needle.text) for needle in sample.needles)


def test_paragraph_with_the_gold_text_is_never_a_distractor():
    gold = (Paragraph("Copy", RECORDS[0].gold[1].text),)
    copied_record = QARecord("copy", "Who?", ("Nobody",), gold, RECORDS[0].gold)
    task = make_passage_task([*RECORDS, copied_record], "ruler_hqa", SETTINGS)
    for index in range(len(RECORDS) + 1):
        _, text, _, record = draw_sample(task, 400, index, [*RECORDS, copied_record])
        assert all(text.count(paragraph.text) == 1 for paragraph in record.gold)


def test_error_for_too_many_passages_names_the_available_number():
    task = make_passage_task(RECORDS, "ruler_hqa", SETTINGS)
    with pytest.raises(EvaluationError, match=r"has 600 passages for this question, not 601.*training split"):
        task.sample(601, 0)
    with pytest.raises(EvaluationError, match=r"1 passages is too small for ruler_hqa. Ask for at least 2"):
        task.sample(1, 0)


def test_length_too_small_for_gold_is_refused_with_a_sufficient_one():
    task = make_passage_task(RECORDS, "qa_2", SETTINGS)
    with pytest.raises(EvaluationError, match=r"at least") as error:
        task.sample(60, 0)
    sufficient_length = int(re.search(r"at least ([\d,]+),", error.value.hint)[1].replace(",", ""))
    assert task.sample(sufficient_length, 0).needles


def test_records_without_distractors_are_an_error_not_an_endless_loop():
    records = [QARecord("1", "Who?", ("Ada",), (Paragraph("A", "Ada it was."),))]
    with pytest.raises(EvaluationError, match="no paragraph that could be a distractor"):
        make_passage_task(records, "qa_1", SETTINGS).sample(1000, 0)
    sample = make_passage_task(records, "ruler_hqa", SETTINGS).sample(1, 0)
    assert "".join(sample.text()) == "Document 1:\nA\nAda it was."
