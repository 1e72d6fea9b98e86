"""What the demonstration counts as right."""

from __future__ import annotations

import pytest

from memagent_evaluation.demo_command import is_right
from memagent_evaluation.planted_document import PlantedQuestion

ASKED = PlantedQuestion(
    "Why was the signal tower closed?",
    "two walls had cracked",
    "The signal tower was shut, as two walls had cracked.",
    0.5,
)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("two walls had cracked", True),
        ("Two walls had cracked.", True),
        ("as two walls had cracked", True),
        ("The signal tower was shut, as two walls had cracked.", True),
        ("the signal tower was shut", False),
        ("two walls had cracked and the well had dried up", False),  # it names more than one reason
        ("The ferry was shut, as two walls had cracked.", False),
        ("walls", False),
        ("not stated", False),
        ("", False),
        (None, False),
    ],
)
def test_an_answer_is_right_alone_or_in_the_words_of_the_planted_statement(answer, right) -> None:
    assert is_right(answer, ASKED) is right
