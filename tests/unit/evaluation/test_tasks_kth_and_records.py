"""The k-th of n notes and counting over records, answered by plain code from the text and from the evidence alone."""

import re
from collections import Counter

import pytest

from memagent_evaluation.scorers import OwnMetric, score
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.kth_of_n import KTH, ORDINALS
from memagent_evaluation.tasks.record_counting import CATEGORIES, RECORDS, WEEKDAYS
from memagent_graph.errors import EvaluationError
from memagent_graph.prompts import AnswerFormat
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")
RECORD = re.compile(r"(\w+), \d+:\d\d: (\w+ \w+) bought (.+) \((\w+)\)\.")


def notes_of(text, town):
    return re.findall(rf"Harbour note for {town}: [^.]*\.", text)


def repeated(text, question):
    """The note that a question asks for, from a text that holds it and those before it."""
    town, ordinal = re.search(r"notes for (\w+) .* Repeat the (\w+) of them", question).groups()
    return notes_of(text, town)[ORDINALS.index(ordinal)]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", KTH)
def test_the_order_of_the_notes_tells_which_is_asked_for(name, small):
    task = load_task(name, TaskSettings(TOKENIZER, small=small))
    asked = Counter()
    for index in range(30):
        sample = task.sample(2500, index)
        text = "".join(sample.text())
        (gold,) = sample.gold
        assert repeated(text, sample.question) == gold
        assert repeated(" ".join(each.text for each in sample.needles), sample.question) == gold
        assert sample.needles[-1].gold == sample.needles[-1].text == gold
        town = re.search(r"notes for (\w+) ", sample.question)[1]
        assert len(set(notes_of(text, town))) == len(notes_of(text, town)) == KTH[name]
        assert len(notes_of(text, r"\w+")) == KTH[name] + task.others
        assert gold not in sample.question
        assert not any(crates in sample.question for crates in re.findall(r"\d+", gold))
        assert TOKENIZER.count(gold) <= task.answer_tokens
        assert TOKENIZER.count(sample.question) <= 96
        asked[len(sample.needles)] += 1
    assert set(asked) <= set(range(1, KTH[name] + 1))
    assert len(asked) >= KTH[name] // 2 + 1


def test_a_note_is_scored_by_its_likeness_behind_the_words_that_all_begin_with():
    task = load_task("kth_of_4", TaskSettings(TOKENIZER))
    assert isinstance(task, OwnMetric)
    sample = task.sample(2000, 0)
    (gold,) = sample.gold
    beginning, rest = gold.split(": ")

    def scores(answer):
        return score(sample, answer, None, answer_format=AnswerFormat.PLAIN)

    assert scores(gold).strict == scores(gold).string_match == 1
    town = sample.question.split("notes for ")[1].split()[0]
    (other, *_) = [note for note in notes_of("".join(sample.text()), town) if note != gold]
    assert scores(other).strict == scores(other).lenient == 0
    assert 0.3 < scores(other).string_match < 1
    assert scores(rest).string_match == 0
    assert scores(f"{beginning}: ").string_match == 0


def counted(text, question):
    """The answer to a question on records, from those that a text holds."""
    records = RECORD.findall(text)
    if asked := re.fullmatch(r"How many purchases in the category (\w+) were made on a (\w+)\?", question):
        return str(sum((category, weekday) == asked.groups() for weekday, _, _, category in records))
    asked = re.fullmatch(r"In which category did (\w+ \w+) make the most purchases\?", question)
    (first, most), *others = Counter(category for _, person, _, category in records if person == asked[1]).most_common()
    assert all(number < most for _, number in others)
    return first


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", RECORDS)
def test_records_have_one_answer_and_the_evidence_is_all_of_them_that_count(name, small):
    task = load_task(name, TaskSettings(TOKENIZER, small=small))
    golds = Counter()
    for index in range(60):
        sample = task.sample(2500, index)
        text = "".join(sample.text())
        (gold,) = sample.gold
        assert counted(text, sample.question) == gold
        assert counted("\n".join(each.text for each in sample.needles), sample.question) == gold
        assert all(RECORD.fullmatch(line) for line in text.split("\n"))
        assert len(sample.needles) <= task.matching == (5 if small else 12)
        if name == "records_count":
            assert len(sample.needles) == int(gold) >= 2
        else:
            person = re.search(r"did (\w+ \w+) make", sample.question)[1]
            assert [each.text for each in sample.needles] == [line for line in text.split("\n") if person in line]
            assert len({each.gold for each in sample.needles}) > 1
        assert gold not in sample.question
        golds[gold] += 1
    assert max(golds.values()) < 30, "no answer is a good guess"


def test_other_records_are_near_misses_of_every_kind():
    sample = load_task("records_count", TaskSettings(TOKENIZER)).sample(4000, 0)
    category, weekday = re.search(r"category (\w+) were made on a (\w+)", sample.question).groups()
    records = RECORD.findall("".join(sample.text()))
    assert {each[3] for each in records} == set(CATEGORIES)
    assert {each[0] for each in records} == set(WEEKDAYS)
    assert sum(each[0] == weekday and each[3] != category for each in records) > 5
    assert sum(each[0] != weekday and each[3] == category for each in records) > 5


def test_a_named_haystack_stands_between_the_records(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(f"Line {number} of the book is short." for number in range(3000)))
    for name in RECORDS:
        sample = load_task(name, TaskSettings(TOKENIZER, haystack=book)).sample(4000, 0)
        lines = "".join(sample.text()).split("\n")
        prose = [line for line in lines if re.fullmatch(r"Line \d+ of the book is short\.", line)]
        assert len(prose) + sum(RECORD.fullmatch(line) is not None for line in lines) == len(lines)
        assert len(prose) > 30
        assert counted("\n".join(lines), sample.question) == sample.gold[0]
    none = load_task("records_count:prose_share=0", TaskSettings(TOKENIZER, haystack=book)).sample(4000, 0)
    assert "book" not in "".join(none.text())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kth_of_4:others=-1", "cannot have -1 other notes"),
        ("records_count:matching=1", "cannot do with 1 matching records"),
        ("records_count:prose_share=1", "a share of 1.0 of prose"),
        ("kth_of_5", "Did you mean kth_of_"),
    ],
)
def test_options_that_cannot_be_are_refused(name, message):
    with pytest.raises(EvaluationError) as caught:
        load_task(name, TaskSettings(TOKENIZER))
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_the_number_of_matching_records_is_a_dial():
    task = load_task("records_count:matching=40", TaskSettings(TOKENIZER))
    assert max(int(task.sample(6000, index).gold[0]) for index in range(12)) > 12
