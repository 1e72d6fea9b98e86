"""Replies which say that the document has no answer, in several languages."""

from __future__ import annotations

import pytest

from memagent_graph.no_answers import gives_no_answer


@pytest.mark.parametrize(
    "answer",
    [
        None, "", "  ", "not stated", "Not stated.", "NOT  FOUND!", "n/a", "N/A", "unknown", "No answer.",
        "unanswerable", "It is not mentioned.", "not in memory", "no relevant information found", "I don't know.",
        "cannot be determined",
        "The document does not say.", "the memory does not hold the answer", "The text does not mention a lighthouse.",
        "none", "Nothing.",
        "Nicht angegeben.", "No se menciona", "non precisé", "não informado", "Неизвестно.", "belirtilmemiş",
        "غير مذكور",
        "उल्लेख नहीं है।", "未提及。", "記載なし", "언급되지 않음", "ไม่ได้ระบุ", "KHÔNG RÕ", "tidak disebutkan",
    ],
)  # fmt: skip
def test_replies_without_an_answer_are_recognised(answer: str | None) -> None:
    assert gives_no_answer(answer)


@pytest.mark.parametrize(
    "answer",
    ["4711", "no", "Not before noon.", "The unknown soldier", "None of the members came.",
     "The text does not say. It was 12.",
     "...", "未知数 x", "Das ist nicht angegeben, aber es war 1743.",
     "nothing but the truth", "The text does not mention the architect but says that it was 1743.",
     "The document does not state a year; the mayor was Ilse Thornbury.",
     "It is not known whether he lived, but his sister did."],
)  # fmt: skip
def test_answers_are_not_mistaken_for_replies_without_one(answer: str) -> None:
    assert not gives_no_answer(answer)


def test_none_is_an_answer_if_the_document_has_a_quote_for_it() -> None:
    assert not gives_no_answer("None.", quoted=True)
    assert gives_no_answer("not stated", quoted=True)
