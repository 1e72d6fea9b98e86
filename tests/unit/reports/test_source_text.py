"""Quotes are complete sentences of their documents, and are located there character by character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memagent_report.checked_report import check_quote
from memagent_report.evidence_matrix import SourceQuote
from memagent_report.sentence_checks import ProblemKind
from memagent_report.source_text import MAX_QUOTE_LENGTH, SourceText

TEXT = """Title of it

Dr. Keller met Mr. A. B. Weiss on 3 May. They agreed, unless it
rains, to meet in No. 5 Mill St. again. Nobody "came."  All left. मीनार बनी। वह ऊँची है।

- first point
- second point, which is
  longer
Name: Weiss
| a | b |
"""


@pytest.mark.parametrize(
    ("passage", "sentence"),
    [
        ("met", "Dr. Keller met Mr. A. B. Weiss on 3 May."),
        ("rains", "They agreed, unless it\nrains, to meet in No. 5 Mill St. again."),
        ("came", 'Nobody "came."'),
        ("first", "- first point"),
        ("longer", "- second point, which is\n  longer"),
        ("Name", "Name: Weiss"),
        ("Title", "Title of it"),
        ("ऊँची", "वह ऊँची है।"),
    ],
)
def test_passage_is_expanded_to_its_sentence_or_list_item(passage: str, sentence: str) -> None:
    source, start = SourceText(TEXT), TEXT.index(passage)
    sentence_start, sentence_end, is_whole = source.find_sentence(start, start + len(passage))
    assert (TEXT[sentence_start:sentence_end], is_whole) == (sentence, True)
    assert source.is_whole(sentence_start, sentence_end)


def test_long_sentence_is_truncated_at_word_boundaries() -> None:
    text = "word " * 1000
    sentence_start, sentence_end, is_whole = SourceText(text).find_sentence(2000, 2004)
    assert sentence_start <= 2000 <= 2004 <= sentence_end
    assert not is_whole
    assert sentence_end - sentence_start <= MAX_QUOTE_LENGTH
    assert text[sentence_start:sentence_end].split() == ["word"] * len(text[sentence_start:sentence_end].split())


def test_cut_or_changed_quote_has_a_problem() -> None:
    source = SourceText(TEXT)
    sentence = "They agreed, unless it\nrains, to meet in No. 5 Mill St. again."
    sentence_start = TEXT.index(sentence)

    def find_problem(text: str) -> ProblemKind | None:
        start = max(TEXT.find(text), sentence_start)
        problem = check_quote(SourceQuote(text, start, start + len(text), None), source, "it")
        return problem.kind if problem else None

    assert find_problem(sentence) is None
    assert find_problem(" ".join(sentence.split())) is ProblemKind.QUOTE_NOT_IN_SOURCE
    assert find_problem("They agreed") is ProblemKind.QUOTE_CUT
    assert find_problem("to meet in No. 5 Mill St. again.") is ProblemKind.QUOTE_CUT
    assert find_problem(sentence.replace("5", "6")) is ProblemKind.QUOTE_NOT_IN_SOURCE
    assert "is not at its place" in str(check_quote(SourceQuote(sentence, 0, len(sentence), None), source, "it"))
    assert find_problem("They agreed ... to meet in No. 5 Mill St. again.") is ProblemKind.QUOTE_NOT_IN_SOURCE


@given(st.text(min_size=1, max_size=400), st.data())
def test_expanded_passage_of_any_text_is_a_part_of_it(text: str, data: st.DataObject) -> None:
    source = SourceText(text)
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    sentence_start, sentence_end, _ = source.find_sentence(start, end)
    assert 0 <= sentence_start <= sentence_end <= len(text)
