"""Facts in plain English: what is asked for stands in the document once, and nothing else there answers."""

import pytest

from memagent_graph.evaluation.tasks import TaskSettings, load_task
from memagent_graph.evaluation.tasks.english import ABSENT, ENGLISH
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")


def samples_of(name, count=24, length=4000, **settings):
    task = load_task(name, TaskSettings(TOKENIZER, **settings))
    return [task.sample(length, index) for index in range(count)]


@pytest.mark.parametrize("name", [name for name in ENGLISH if name != "english_absent"])
def test_the_evidence_stands_in_the_document_and_holds_the_answer(name):
    for sample in samples_of(name):
        text = "".join(sample.text())
        assert {needle.gold for needle in sample.needles} >= set(sample.gold)
        assert all(text.count(needle.text) == 1 for needle in sample.needles)
        said = " ".join(needle.text for needle in sample.needles).casefold()
        assert all(gold.casefold() in said for gold in sample.gold)
        assert not any(gold.casefold() in sample.question.casefold() for gold in sample.gold)


def test_of_a_fact_that_changes_the_later_statement_is_the_answer():
    for sample in samples_of("english_change"):
        first, last = sorted(sample.needles, key=lambda needle: needle.depth)
        assert last.gold == sample.gold[0]
        assert first.gold != sample.gold[0]


def test_the_facts_of_a_chain_stand_in_the_order_in_which_they_are_followed():
    for sample in samples_of("english_hop_3"):
        assert [needle.gold for needle in sorted(sample.needles, key=lambda needle: needle.depth)][-1] == sample.gold[0]
        assert not any(needle.gold in sample.question for needle in sample.needles)


def test_where_nothing_answers_there_is_no_evidence_and_any_way_to_say_so_is_right():
    for sample in samples_of("english_absent"):
        assert sample.needles == ()
        assert sample.gold == ABSENT


@pytest.mark.parametrize("name", ENGLISH)
def test_questions_in_a_row_share_a_document(name):
    samples = samples_of(name, count=10, questions_per_document=5)
    texts = ["".join(sample.text()) for sample in samples]
    assert len(set(texts[:5])) == len(set(texts[5:])) == 1
    assert texts[0] != texts[5]
    assert len({sample.question for sample in samples[:5]}) >= 4
