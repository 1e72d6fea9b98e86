import pytest

from memagent_training.language.real_questions import real_questions


@pytest.mark.parametrize(
    ("text", "question", "answer"),
    [
        (
            "If the input file is empty, the command prints nothing at all.",
            "What happens if the input file is empty?",
            "the command prints nothing at all",
        ),
        (
            "The configuration file specifies the default printer\nof each user.",
            "What does the configuration file specify?",
            "the default printer of each user",
        ),
        (
            "The commercial licensee must keep all copyright notices in every copy.",
            "What must the commercial licensee do?",
            "must keep all copyright notices in every copy",
        ),
        (
            "The lock directory was removed because two daemons had written to it.",
            "Why is it that the lock directory was removed?",
            "two daemons had written to it",
        ),
        (
            "fsckprint - print file system checks in columns",
            "What does fsckprint do?",
            "print file system checks in columns",
        ),
    ],
)
def test_a_sentence_of_a_known_form_gives_questions_and_their_answers(text: str, question: str, answer: str) -> None:
    found = {each.question: each for each in real_questions(f"Unrelated words come first here.\n\n{text}\n\nMore.")}
    assert found[question].answer == answer
    assert found[question].statement == " ".join(text.split())


def test_headings_tables_and_code_give_no_questions() -> None:
    assert real_questions("NAME\n\n  x = {1: 2} # what\n\n| a | b |\n\nshort one.\n\n>>> print(if_nothing)") == []


def test_a_text_with_most_of_a_questions_words_may_answer_it() -> None:
    (asked, *_) = real_questions("If the input buffer overflows, the daemon restarts its worker.")
    assert asked.could_be_answered_by("An input buffer overflows now and then, and the daemon waits.")
    assert not asked.could_be_answered_by("Nothing about any of this.")
