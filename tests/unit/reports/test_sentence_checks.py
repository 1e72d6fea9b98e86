"""A sentence is quoted if what it states stands in its quotes."""

from __future__ import annotations

import pytest

from memagent_report.sentence_checks import check_sentence
from memagent_report.sentence_problems import ProblemKind

QUOTES = (
    "On 3 March 2021 Alpha Corp paid Beta Ltd. 5.2 million dollars for at least 30 km of cable, and did not accept the "
    "12% discount.",
    "The buyer may return goods before 14:30. Clara Weiss signed version 2.1.0.",
)
OTHER = "Gamma plant used 7 tonnes of coal. Delta plant used 9 tonnes of coal."


def kinds(sentence: str, *quotes: str, **options: object) -> set[ProblemKind]:
    return {each.kind for each in check_sentence(sentence, quotes or QUOTES, **options)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sentence",
    [
        "Alpha Corp paid Beta Ltd. $5.2 million on March 3, 2021.",
        "Alpha Corp paid 5,200,000 dollars to Beta in March 2021.",
        "Beta Ltd. was paid by Alpha Corp.",
        "Thirty kilometres of cable were the least.",
        "Alpha Corp did not accept the discount of 12 percent.",
        "Clara Weiss signed version 2.1.0 of it.",
        "According to the contract, the buyer may return goods before 14:30.",
        'The buyer "may return goods" before 14:30.',
    ],
)
def test_a_faithful_sentence_is_quoted(sentence: str) -> None:
    assert kinds(sentence) == set()


@pytest.mark.parametrize(
    ("sentence", "kind"),
    [
        ("Alpha Corp paid Beta Ltd. 5.3 million dollars.", ProblemKind.NUMBER),
        ("Alpha Corp paid 5.2 billion dollars.", ProblemKind.NUMBER),
        ("Alpha Corp paid 5.2 million euros.", ProblemKind.UNIT),
        ("Alpha Corp bought 30 miles of cable.", ProblemKind.UNIT),
        ("Alpha Corp paid Beta Ltd. on 4 March 2021.", ProblemKind.DATE),
        ("Alpha Corp paid Beta Ltd. in 2020.", ProblemKind.NUMBER),
        ("Omega Corp paid Beta Ltd. 5.2 million dollars.", ProblemKind.NAME),
        ("The cable was signed for by Clara Schwarz.", ProblemKind.NAME),
        ("Clara Weiss signed version 2.2.0.", ProblemKind.CODE),
        ("Alpha Corp did not pay Beta Ltd.", ProblemKind.NEGATION),
        ("Alpha Corp did accept the 12% discount.", ProblemKind.NEGATION),
        ("The buyer must return goods before 14:30.", ProblemKind.OPPOSITE),
        ("The buyer may return goods after 14:30.", ProblemKind.OPPOSITE),
        ("Alpha Corp paid for at most 30 km of cable.", ProblemKind.OPPOSITE),
        ("Beta Ltd. paid Alpha Corp 5.2 million dollars.", ProblemKind.ORDER),
        ('Alpha Corp called it "a fine cable".', ProblemKind.QUOTATION),
        ("The purple elephants dance quietly tonight.", ProblemKind.WORDS),
    ],
)
def test_what_no_quote_has_is_named(sentence: str, kind: ProblemKind) -> None:
    assert kind in kinds(sentence)


def test_a_part_of_a_quote_is_no_quote_where_the_rest_denies_or_limits_it() -> None:
    quote = "It is not true that Anna paid 5 dollars. Clara pays rent unless she is away."
    assert kinds("Anna paid 5 dollars.", quote) == {ProblemKind.CHANGED}
    assert kinds("Clara pays rent.", quote) == {ProblemKind.CHANGED}
    assert kinds("Anna paid 5 dollars.", quote, "Later Anna paid 5 dollars.") == set()


def test_numbers_that_change_places_are_noticed() -> None:
    assert kinds("Gamma plant used 9 tonnes of coal, Delta plant used 7 tonnes of coal.", OTHER) == {ProblemKind.ORDER}


def test_a_number_of_another_name_is_noticed_where_quotes_are_apart() -> None:
    first, second = OTHER.split(". ")
    assert kinds("Gamma plant used 7 tonnes.", first, second) == set()
    assert kinds("Gamma plant used 9 tonnes.", first, second) == {ProblemKind.APART, ProblemKind.CHANGED}


def test_without_quotes_nothing_is_quoted() -> None:
    assert [each.kind for each in check_sentence("Anything.", ())] == [ProblemKind.NO_QUOTE]


def test_the_name_of_its_document_may_be_in_a_sentence_and_that_of_another_may_not() -> None:
    sentence = "Deed-7.txt says that Clara Weiss signed version 2.1.0."
    assert kinds(sentence, named=("Deed-7.txt",)) == set()
    assert ProblemKind.NAME in kinds(sentence, named=("Will-8.txt",))


def test_a_word_at_the_beginning_is_no_name_if_documents_have_it_in_lower_case() -> None:
    sentence = "Cable was bought by Alpha Corp, thirty km of it."
    assert kinds(sentence) == set()
    unknown = "Wire was bought by Alpha Corp, thirty km of it."
    assert kinds(unknown) == {ProblemKind.NAME}
    assert kinds(unknown, is_common=lambda word: word == "wire") == set()
