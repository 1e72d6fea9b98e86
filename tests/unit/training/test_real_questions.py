import pytest

from recipes.language.real_questions import real_questions


@pytest.mark.parametrize(
    ("text", "question"),
    [
        (
            "If the input file is empty, the command prints nothing at all.",
            "What happens if the input file is empty?",
        ),
        (
            "The configuration file specifies the default printer\nof each user.",
            "What does the configuration file specify?",
        ),
        (
            "The commercial licensee must keep all copyright notices in every copy.",
            "What must the commercial licensee do?",
        ),
        (
            "The lock directory was removed because two daemons had written to it.",
            "Why is it that the lock directory was removed?",
        ),
        (
            "The outer doors are locked by the night guard at ten.",
            "By whom are the outer doors locked?",
        ),
        (
            "A certificate that has expired stays valid for ten days in the archive.",
            "How many days certificate expired stays valid archive?",
        ),
        (
            "fsckprint - print file system checks in columns",
            "What does fsckprint do?",
        ),
    ],
)
def test_a_sentence_of_a_known_form_gives_questions_that_it_answers(text: str, question: str) -> None:
    found = {each.question: each for each in real_questions(f"Unrelated words come first here.\n\n{text}\n\nMore.")}
    assert found[question].statement == " ".join(text.split())


def test_any_sentence_gives_the_same_two_questions_of_some_of_its_own_words_each_time() -> None:
    text = "Gardeners of the northern valley water their orchards every second evening."
    found = real_questions(text)
    assert found == real_questions(text)
    by_words = [each.question for each in found if not each.question.startswith("What about")]
    assert len(by_words) == 2
    for question in by_words:
        own = [word for word in question.rstrip("?").split() if word in text.replace(".", "").split()]
        assert 3 <= len(own) <= 5


def test_headings_tables_and_code_give_no_questions() -> None:
    assert real_questions("NAME\n\n  x = {1: 2} # what\n\n| a | b |\n\nshort one.\n\n>>> print(if_nothing)") == []


def test_a_text_with_most_of_a_questions_words_may_answer_it() -> None:
    (asked, *_) = real_questions("If the input buffer overflows, the daemon restarts its worker.")
    assert asked.could_be_answered_by("An input buffer overflows now and then, and the daemon waits.")
    assert not asked.could_be_answered_by("Nothing about any of this.")
