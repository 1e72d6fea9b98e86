"""The document of `memagent demo` has one answer to every question, and does not look generated."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from memagent_evaluation.demo_document import DemoQuestion, _load_texts, iter_demo_texts, make_demo_document


def split_sentences(text):
    return re.split(r"(?<=[.!?])\s+|\n+", text)


@pytest.mark.parametrize("seed", range(0, 100, 12))
def test_each_question_has_one_answer_sentence_at_an_even_depth(seed) -> None:
    document = make_demo_document(20_000, seed)
    assert 20_000 <= len(document.text) / 4 < 22_000
    for question in document.questions:
        assert document.text.count(question.sentence) == 1
        sentences = [sentence for sentence in split_sentences(document.text) if question.subject in sentence]
        right_sentences = [sentence for sentence in sentences if question.is_right(sentence)]
        assert right_sentences == [question.sentence]
        assert question.is_right(question.answer)
        assert not question.is_right("not stated")
    depths = [question.depth for question in document.questions]
    assert depths == sorted(depths)
    assert all(index / 4 <= depth <= (index + 1) / 4 for index, depth in enumerate(depths))


def test_subject_of_a_fact_occurs_in_no_other_text() -> None:
    for fact in _load_texts()["facts"]:
        other_facts = [other for other in _load_texts()["facts"] if other is not fact]
        assert fact["subject"] not in json.dumps([_load_texts()["items"], other_facts])
        assert all(fact["subject"] in text for text in [*fact["statements"], *fact.get("earlier", ())])


def test_questions_depend_on_the_seed_and_not_on_the_length() -> None:
    short, long, other_seed = (make_demo_document(*arguments) for arguments in ((5_000, 1), (40_000, 1), (5_000, 2)))
    assert make_demo_document(5_000, 1) == short
    assert [question.question for question in short.questions] == [question.question for question in long.questions]
    assert other_seed.text != short.text
    assert len(long.text) / 4 >= 40_000
    assert short.questions[0].question in next(iter_demo_texts([1], 5_000))


def test_no_sentence_occurs_more_than_five_times() -> None:
    sentences = [sentence for sentence in split_sentences(make_demo_document(40_000).text) if len(sentence.split()) > 6]
    sentences = [sentence for sentence in sentences if not sentence.startswith("Present:")]
    _, highest_count = Counter(sentences).most_common(1)[0]
    assert highest_count <= 5


REGATTA_QUESTION = DemoQuestion(
    "Why did the boat races not take place?",
    "the starting cannon had been stolen",
    "The regatta was not sailed on its usual Saturday, because the starting cannon had been stolen.",
    "regatta",
    ("cannon", "stolen"),
    0.5,
)
GAUGE_QUESTION = replace(REGATTA_QUESTION, answer="£1,240", sentence="It comes to £1,240.", required_phrases=("1240",))


@pytest.mark.parametrize(
    ("question", "answer", "is_right"),
    [
        (REGATTA_QUESTION, "the starting cannon had been stolen", True),
        (REGATTA_QUESTION, "Because the cannon was stolen.", True),
        (REGATTA_QUESTION, REGATTA_QUESTION.sentence, True),
        (REGATTA_QUESTION, "the regatta was not sailed", False),
        (REGATTA_QUESTION, "the cannon had been stolen and whales were drifting across everywhere", False),
        (REGATTA_QUESTION, "not stated", False),
        (REGATTA_QUESTION, None, False),
        (GAUGE_QUESTION, "1240 pounds", True),
        (GAUGE_QUESTION, "£1,240", True),
        (GAUGE_QUESTION, "1,240", True),
        (GAUGE_QUESTION, "£1,240 or £1,300", False),
        (GAUGE_QUESTION, "£12,400", False),
    ],
)
def test_right_answer_has_all_phrases_and_few_other_words(question, answer, is_right) -> None:
    assert question.is_right(answer) is is_right
