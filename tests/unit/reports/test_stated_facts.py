"""Extraction of the numbers, dates and names that a text states."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memagent_report.stated_facts import extract_facts, normalise_typography


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5 km", "5"),
        ("five kilometres", "5"),
        ("1'234.5 tonnes", "1234.5"),
        ("$5.2 million", "5200000"),
        ("$5m", "5000000"),
        ("5 m", "5"),
        ("5.2 million dollars", "5200000"),
        ("up .5%", "0.5"),
        ("twenty-one days", "21"),
        ("a 30-day notice", "30"),
        ("two hundred thousand feet", "200000"),
        ("at -4 °C", "-4"),
        ("a dozen", "12"),
        ("in the 1990s", "1990"),
        ("the third time", "3"),
    ],
)
def test_numbers_in_any_notation_have_the_same_value(text: str, value: str) -> None:
    (number,) = extract_facts(text).numbers
    assert number.value == Decimal(value)


def test_number_may_share_the_magnitude_of_the_next_one() -> None:
    three, five = extract_facts("from 3 to 5 million euros").numbers
    assert (three.possible_values, five.possible_values) == ({Decimal(3), Decimal(3_000_000)}, {Decimal(5_000_000)})


@pytest.mark.parametrize(
    "text", ["2021-03-03", "3 March 2021", "March 3, 2021", "3rd of March 2021", "Mar 3, 2021", "on 3 march 2021"]
)
def test_dates_in_any_format_are_equal(text: str) -> None:
    (date,) = extract_facts(text).dates
    assert (date.year, date.month, date.day) == (2021, 3, 3)
    assert extract_facts(text).numbers == ()


def test_month_is_within_a_date_of_that_month_only() -> None:
    (full_date,) = extract_facts("3 March 2021").dates
    (month,) = extract_facts("in March 2021").dates
    (other_month,) = extract_facts("in April 2021").dates
    assert month.is_stated_by(full_date)
    assert not full_date.is_stated_by(month)
    assert not other_month.is_stated_by(full_date)


def test_may_is_a_month_only_in_a_date() -> None:
    assert extract_facts("Members may 3 times a year ask, and 12 may vote").dates == ()
    assert [date.month for date in extract_facts("It was on 3 May 2020").dates] == [5]


def test_names_have_a_capital_letter_within_a_sentence_or_digits() -> None:
    facts = extract_facts("Yesterday Anna Keller met the NASA team. Rain fell in Zurich.")
    assert [word.text for word in facts.words if word.is_name] == ["anna", "keller", "nasa", "zurich"]
    assert [word.text for word in facts.words if word.opens_sentence] == ["yesterday", "rain"]
    facts = extract_facts("It came at 14:30 in Q3 with the AB12.10.")
    assert [word.text for word in facts.words if word.is_name] == ["q3", "ab12"]
    assert [number.key for number in facts.numbers] == ["14.3"]
    assert not any(word.is_name for word in extract_facts("THIS SOFTWARE IS PROVIDED AS IS WITHOUT WARRANTY").words)


def test_quotation_marks_dashes_and_spaces_are_normalised() -> None:
    assert normalise_typography("\u201cA\u00a0 b\u201d \u2013\n it\u2019s") == '"A b" - it\'s'
    assert normalise_typography("\ufb01ne\u200b") == "fine"


@given(st.text())
def test_facts_of_any_text_have_valid_positions(text: str) -> None:
    facts = extract_facts(text)
    assert normalise_typography(facts.text) == facts.text
    for fact in (*facts.numbers, *facts.dates, *facts.words):
        assert 0 <= fact.start < fact.end <= len(facts.text)
