"""Scores of an answer: strict, lenient, string match and F1, which are all zero for a failed read."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memagent_evaluation.result_table import QuestionOutcome
from memagent_evaluation.samples import Metric, Sample
from memagent_evaluation.scorers import WRONG, Scores, compute_token_f1, contains, is_exact_match, normalise, score
from memagent_graph.events import StopReason
from memagent_graph.prompts import AnswerFormat


def make_sample(*gold: str, metric: Metric = Metric.ANY, **task: object) -> Sample:
    return Sample(SimpleNamespace(metric=metric, **task), 100, 0, "Which?", gold, ("text",).__iter__)


words = st.text(alphabet="abcdeé 12.,;/The", min_size=1, max_size=12).filter(normalise)


def score_boxed(answer: str) -> Scores:
    return score(make_sample("Eiffel Tower"), answer, f"It is \\boxed{{{answer}}}.")


# Strict


def test_strict_requires_a_box_or_in_plain_format_the_exact_answer() -> None:
    sample = make_sample("Eiffel Tower")
    for answer, plain_score in (("the Eiffel Tower.", 1), ("It is the Eiffel Tower.", 0)):
        assert score(sample, answer, answer).strict == 0
        assert score(sample, answer, answer, answer_format=AnswerFormat.PLAIN).strict == plain_score
        assert score(sample, answer, answer).lenient == 1


def test_box_inside_the_reasoning_is_not_an_answer() -> None:
    sample = make_sample("7")
    assert score(sample, "", "<think>\\boxed{7}</think>").strict == 0
    assert score(sample, "7", "<think>\\boxed{8}</think> \\boxed{7}").strict == 1
    assert score(sample, "", "<think>it is 7</think> I cannot tell.").string_match == 0


def test_long_box_is_found_although_it_starts_far_from_the_end() -> None:
    poem = "Roses are red and violets are blue. " * 30
    assert score(make_sample(poem, metric=Metric.ALL), poem, f"\\boxed{{{poem}}}").strict == 1


@pytest.mark.parametrize(
    "answer",
    [
        "12, 7 and 30",
        "30、7，12",
        "12\n7\n30",
        "1. 12\n2. 7\n3. 30",
        "- 7\n- 12\n- 30",
        "7 12 30",
        "7, 12, and 30.",
        "12,7,30,7",
    ],
)
def test_strict_accepts_all_gold_strings_in_any_order_and_list_format(answer) -> None:
    assert is_exact_match(answer, ("7", "12", "30"), Metric.ALL)


@pytest.mark.parametrize("answer", ["7, 12", "7, 12, 30, 31", "71230", "They are 7, 12, 30", "", "7, 12, 3 0"])
def test_strict_refuses_extra_and_missing_strings(answer) -> None:
    assert not is_exact_match(answer, ("7", "12", "30"), Metric.ALL)


def test_gold_strings_may_have_several_words_or_contain_separators() -> None:
    assert is_exact_match("Red Fox and blue whale", ("blue whale", "red fox"), Metric.ALL)
    assert not is_exact_match("red, fox, blue whale", ("blue whale", "red fox"), Metric.ALL)
    assert is_exact_match("Ash, Sand and Sons; Rome", ("Rome", "Ash, Sand and Sons"), Metric.ALL)
    assert is_exact_match("1. sand 2. band", ("band", "sand"), Metric.ALL)


# Lenient


@pytest.mark.parametrize(
    "text", ["code:48213", "x=48213", "| key|48213|", "12/48213", "[48213]", "is 48213.Then", "48,213"]
)
def test_punctuation_separates_words_without_spaces(text) -> None:
    assert contains(text, "48213")


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("1,977", "977"),
        ("3.5", "5"),
        ("12.7", "7"),
        ("1,234,567", "567"),
        ("don't", "t"),
        ("it's", "s"),
        ("café society", "caf"),
    ],
)
def test_parts_of_a_number_or_word_do_not_match(text, gold) -> None:
    assert not contains(text, gold)
    assert contains(text, text)


def test_lenient_accepts_longer_answers_and_compares_whole_words() -> None:
    assert score_boxed("It is the Eiffel tower in Paris").lenient == 1
    assert contains("答えは東京です", "東京")
    for wrong_answer in ("The", "Eiffel", "tower", "Eiffel Towers", "", "e"):
        assert score_boxed(wrong_answer).lenient == 0, wrong_answer


def test_lenient_requires_one_gold_string_or_all_depending_on_the_metric() -> None:
    assert score(make_sample("NYC", "New York"), "in New York", None).lenient == 1
    assert score(make_sample("7", "12", metric=Metric.ALL), "7 and 12", None).lenient == 1
    assert score(make_sample("7", "12", metric=Metric.ALL), "7 and 13", None).lenient == 0


@given(words, st.lists(words, min_size=1, max_size=3), st.sampled_from(Metric))
def test_every_strict_match_is_a_lenient_match(answer, gold, metric) -> None:
    for text in (answer, ",".join(gold), ";".join(gold), "/".join(gold)):
        scores = score(make_sample(*gold, metric=metric), text, text, answer_format=AnswerFormat.PLAIN)
        assert scores.strict <= scores.lenient


# RULER's string match, F1 and a task's own metric


def test_string_match_follows_ruler_in_lower_case_and_inside_words() -> None:
    reply = "the numbers 117 and BLUEISH"
    assert score(make_sample("17", "blue", "red", metric=Metric.ALL), "x", reply).string_match == pytest.approx(2 / 3)
    assert score(make_sample("17", "red"), "x", reply).string_match == 1
    assert score(make_sample("red", "green"), "x", reply).string_match == 0
    assert score(make_sample("straße"), "x", "STRASSE").string_match == 0, "RULER lowers, it does not fold"


def test_f1_takes_the_best_gold_string_or_all_together() -> None:
    assert score(make_sample("brown fox", "cat"), "quick brown fox", None).token_f1 == pytest.approx(0.8)
    assert score(make_sample("7", "12", metric=Metric.ALL), "7 12", None).token_f1 == 1
    assert score(make_sample("7", "12", metric=Metric.ALL), "7", None).token_f1 == pytest.approx(2 / 3)


@given(words, words)
def test_f1_is_symmetric_and_at_most_1(a, b) -> None:
    assert compute_token_f1(a, b) == compute_token_f1(b, a) <= 1
    assert compute_token_f1(a, a) == 1


def test_task_may_replace_string_match_with_its_own_score() -> None:
    sample = make_sample("gold", own_score=lambda sample, answer: 0.25 if answer == "mine" else True)
    assert score(sample, "mine", "gold").string_match == 0.25
    assert repr(score(sample, "other", "gold").string_match) == "1.0"
    assert score(sample, "mine", "gold", outcome=QuestionOutcome.FAILED).string_match == 0


# Failed reads


def test_reads_without_an_answer_are_wrong_in_every_score() -> None:
    for outcome in set(QuestionOutcome) - {QuestionOutcome.ANSWERED}:
        assert score(make_sample("7"), "7", "\\boxed{7}", outcome=outcome) == WRONG
    assert score(make_sample("7"), None, None) == score(make_sample("7"), None, "\\boxed{7}") == WRONG
    assert set(astuple(WRONG)) == {0.0}


def test_outcome_follows_from_the_stop_reason() -> None:
    outcomes = Counter(QuestionOutcome.from_stop_reason(reason) for reason in StopReason)
    assert outcomes == {QuestionOutcome.ANSWERED: 3, QuestionOutcome.NO_ANSWER: 1, QuestionOutcome.UNFINISHED: 3}
    assert QuestionOutcome.from_stop_reason(StopReason.INVALID_ANSWER) is QuestionOutcome.ANSWERED, "it has a text"


@given(st.text(max_size=60), st.lists(st.text(max_size=12), min_size=1, max_size=4), st.sampled_from(Metric))
def test_scores_of_any_text_lie_between_0_and_1(text, gold, metric) -> None:
    for answer_format in AnswerFormat:
        scores = score(make_sample(*gold, metric=metric), text, text, answer_format=answer_format)
        assert all(0 <= value <= 1 for value in astuple(scores))
        assert scores.strict in {0, 1}
        assert scores.lenient in {0, 1}


@pytest.mark.parametrize(
    ("answer", "other_answer"),
    [
        ("-5", "5"), ("3.5", "35"), ("1/2", "12"), ("10:30", "1030"), ("2024-01-05", "20240105"), ("C++", "C"),
        ("C#", "C"), (".5", "5"), ("A+", "A"),
    ],
)  # fmt: skip
def test_answers_that_differ_in_a_sign_or_mark_are_not_equal(answer, other_answer) -> None:
    for reply, gold in ((answer, other_answer), (other_answer, answer)):
        scores = score(make_sample(gold), reply, f"\\boxed{{{reply}}}")
        assert (scores.strict, scores.lenient) == (0, 0), (reply, gold)
        assert score(make_sample(gold), f"It is {reply}.", None).lenient == 0, (reply, gold)
    assert (
        score(make_sample(answer), answer, f"\\boxed{{{answer}.}}").strict
        == score(make_sample(answer), f"It is {answer}.", None).lenient
        == 1
    )


@pytest.mark.parametrize(
    ("reply", "gold"),
    [
        ("\N{MINUS SIGN}5", "-5"), ("48,213", "48213"), ("$5", "5"), ("U.S.A.", "usa"), ("x: 7.", "x 7"),
        ("  The  Eiffel Tower! ", "eiffel tower"), ("STRASSE", "Straße"), ("The", "the"), ("?!", "?!"),
    ],
)  # fmt: skip
def test_spellings_of_the_same_number_or_name_are_equal(reply, gold) -> None:
    assert score(make_sample(gold), reply, f"\\boxed{{{reply}}}").strict == 1
