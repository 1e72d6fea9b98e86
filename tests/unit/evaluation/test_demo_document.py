"""The document of `memagent demo`: every question has one answer in it, and it does not look generated."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from memagent_evaluation.demo_document import DemoQuestion, _load_texts, demo_texts, make_demo_document


def split_sentences(text):
    return re.split(r"(?<=[.!?])\s+|\n+", text)


@pytest.mark.parametrize("seed", range(0, 100, 12))
def test_each_question_has_one_answer_in_one_sentence(seed) -> None:
    document = make_demo_document(20_000, seed)
    assert 20_000 <= len(document.text) / 4 < 22_000
    for question in document.questions:
        assert document.text.count(question.sentence) == 1
        with_subject = [text for text in split_sentences(document.text) if question.subject in text]
        right = [text for text in with_subject if question.is_right(text)]
        assert right == [question.sentence]
        assert question.is_right(question.answer)
        assert not question.is_right("not stated")
    depths = [question.depth for question in document.questions]
    assert depths == sorted(depths)
    assert all(index / 4 <= depth <= (index + 1) / 4 for index, depth in enumerate(depths))


def test_a_subject_is_in_no_text_of_another() -> None:
    for fact in _load_texts()["facts"]:
        others = [other for other in _load_texts()["facts"] if other is not fact]
        assert fact["subject"] not in json.dumps([_load_texts()["items"], others])
        assert all(fact["subject"] in text for text in [*fact["statements"], *fact.get("earlier", ())])


def test_a_seed_has_the_same_questions_at_every_length_and_another_seed_others() -> None:
    short, long, other = make_demo_document(5_000, 1), make_demo_document(40_000, 1), make_demo_document(5_000, 2)
    assert make_demo_document(5_000, 1) == short
    assert [question.question for question in short.questions] == [question.question for question in long.questions]
    assert other.text != short.text
    assert len(long.text) / 4 >= 40_000
    assert short.questions[0].question in next(demo_texts([1], 5_000))


def test_hardly_a_sentence_repeats() -> None:
    sentences = [text for text in split_sentences(make_demo_document(40_000).text) if len(text.split()) > 6]
    sentences = [text for text in sentences if not text.startswith("Present:")]
    _, most = Counter(sentences).most_common(1)[0]
    assert most <= 5


REGATTA = DemoQuestion(
    "Why did the boat races not take place?",
    "the starting cannon had been stolen",
    "The regatta was not sailed on its usual Saturday, because the starting cannon had been stolen.",
    "regatta",
    ("cannon", "stolen"),
    0.5,
)
GAUGE = replace(REGATTA, answer="£1,240", sentence="The tide gauge comes to £1,240.", keys=("1240",))


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        (REGATTA, "the starting cannon had been stolen", True),
        (REGATTA, "Because the cannon was stolen.", True),
        (REGATTA, REGATTA.sentence, True),
        (REGATTA, "the regatta was not sailed", False),
        (REGATTA, "the cannon had been stolen and whales were drifting across everywhere", False),
        (REGATTA, "not stated", False),
        (REGATTA, None, False),
        (GAUGE, "1240 pounds", True),
        (GAUGE, "£1,240", True),
        (GAUGE, "1,240", True),
        (GAUGE, "£1,240 or £1,300", False),
        (GAUGE, "£12,400", False),
    ],
)
def test_a_right_answer_has_what_is_asked_for_and_little_else(question, answer, right) -> None:
    assert question.is_right(answer) is right
