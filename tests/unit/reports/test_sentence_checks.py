"""A sentence counts as quoted if its quotes support everything that it states."""

from __future__ import annotations

import pytest

from memagent_report.sentence_checks import ProblemKind, check_sentence

QUOTES = (
    "On 3 March 2021 Alpha Corp paid Beta Ltd. 5.2 million dollars for at least 30 km of cable, and did not accept the "
    "12% discount.",
    "The buyer may return goods before 14:30. Clara Weiß signed version 2.1.0 in Rome1.",
)
COAL_QUOTE = "Gamma plant used 7 tonnes of coal. Delta plant used 9 tonnes of coal."


def find_problem_kinds(sentence: str, *quotes: str, **options: object) -> set[ProblemKind]:
    return {problem.kind for problem in check_sentence(sentence, quotes or QUOTES, **options)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sentence",
    [
        "Alpha Corp paid Beta Ltd. $5.2 million on March 3, 2021.",
        "Alpha Corp paid 5,200,000 dollars to Beta in March 2021.",
        "Beta Ltd. was paid by Alpha Corp.",
        "Thirty kilometres of cable were the least.",
        "Alpha Corp did not accept the discount of 12 percent.",
        "Clara Weiß signed version 2.1.0 in Rome.",
        "According to the contract, the buyer may return goods before 14:30.",
        'The buyer "may return goods" before 14:30.',
    ],
)
def test_faithful_sentence_has_no_problems(sentence: str) -> None:
    assert find_problem_kinds(sentence) == set()


@pytest.mark.parametrize(
    ("sentence", "kind"),
    [
        ("Alpha Corp paid Beta Ltd. 5.", ProblemKind.NUMBER),
        ("Alpha Corp paid 5.2 billion dollars.", ProblemKind.NUMBER),
        ("Alpha Corp paid Beta Ltd. on 4 March 2021.", ProblemKind.DATE),
        ("Alpha Corp paid Beta Ltd. in 2020.", ProblemKind.NUMBER),
        ("Eta Ltd. 5.2 million dollars for at least 30 km.", ProblemKind.NAME),
        ("The buyer may return goods before 14:30. Clara Wei.", ProblemKind.NAME),
        ("Clara Weiss signed version 2.1.1.", ProblemKind.NUMBER),
        ("Clara Weiss signed the KX7.", ProblemKind.NAME),
        ('Alpha Corp called it "a fine cable".', ProblemKind.QUOTATION),
        ("The purple elephants dance quietly tonight.", ProblemKind.WORDS),
    ],
)
def test_unsupported_statement_has_a_problem_of_its_kind(sentence: str, kind: ProblemKind) -> None:
    assert kind in find_problem_kinds(sentence)


@pytest.mark.parametrize(
    ("sentence", "changed_word"),
    [
        ("The buyer must return goods before 14:30.", "must"),
        ("The buyer may not return goods before 14:30.", "not"),
        ("The buyer may sell goods before 14:30.", "sell"),
        ("Gamma plant used 9 tonnes of coal. Delta plant used 9 tonnes of coal.", "9"),
    ],
)
def test_changed_word_in_a_copied_quote_is_a_problem(sentence: str, changed_word: str) -> None:
    (problem,) = check_sentence(sentence, (*QUOTES, COAL_QUOTE))
    assert (problem.kind, f"{changed_word!r} instead" in problem.detail) == (ProblemKind.WORDS, True)


def test_inflections_function_words_and_word_order_are_not_changes() -> None:
    quote = "In the first year Gamma plant needed much coal and the mayor said nothing of it to anybody in the town."
    for sentence in (
        "In the first year the Gamma plant needs much coal and the mayor said nothing of it to anybody in the town.",
        "Gamma plant needed much coal and the mayor said nothing of it to anybody in the town in the first year.",
    ):
        assert find_problem_kinds(sentence, quote) == set()


def test_sentence_without_quotes_has_no_quote_problem() -> None:
    assert [problem.kind for problem in check_sentence("Anything.", ())] == [ProblemKind.NO_QUOTE]


def test_sentence_may_only_name_its_own_document() -> None:
    sentence = "Deed-7.txt says that Clara Weiss signed version 2.1.0."
    assert find_problem_kinds(sentence, names=("Deed-7.txt",)) == set()
    assert ProblemKind.NAME in find_problem_kinds(sentence, names=("Will-8.txt",))


def test_first_word_is_not_a_name_if_documents_have_it_in_lower_case() -> None:
    assert find_problem_kinds("Cable was bought by Alpha Corp, thirty km of it.") == set()
    unknown_word_sentence = "Wire was bought by Alpha Corp, thirty km of it."
    assert find_problem_kinds(unknown_word_sentence) == {ProblemKind.NAME}
    assert find_problem_kinds(unknown_word_sentence, common_words={"wire"}) == set()
