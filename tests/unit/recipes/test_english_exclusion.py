"""Nothing that the policy `english` is measured on gets into its training data."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from recipes.english.exclusion import Exclusion, ExclusionError, hash_ngrams, read_excluded_texts, split_words

REPOSITORY = Path(__file__).parents[3]
SENTENCE = "The quick brown fox jumped over the lazy dog while nine grey cats looked on from a wall nearby."


@pytest.fixture(scope="module")
def exclusion() -> Exclusion:
    return Exclusion.load()


def test_thirteen_words_in_a_row_are_found_whatever_their_case_punctuation_and_line_ends() -> None:
    exclusion = Exclusion(frozenset(hash_ngrams(SENTENCE)))
    words = split_words(SENTENCE)
    assert exclusion.overlap("Before. " + ",\n".join(words[3:16]).upper() + "! After it comes more.")
    assert not exclusion.overlap(" ".join(words[:12]) + " nothing like it")
    assert not exclusion.overlap(" ".join(words[3:10]) + " and then " + " ".join(words[10:]))


def test_words_hyphenated_at_a_line_end_are_whole() -> None:
    assert split_words("the ter-\n   rible monster, well-known") == ["the", "terrible", "monster", "well", "known"]


def test_questions_that_it_is_measured_on_are_excluded_word_for_word(exclusion) -> None:
    for name in ("natural_questions.toml", "unseen_questions.toml"):
        for text in tomllib.loads((REPOSITORY / "benchmarks" / name).read_text("utf-8"))["texts"]:
            assert all(exclusion.overlap(question["ask"].lower()) for question in text["questions"])
    assert not exclusion.overlap("Who wrote the second chapter of the report?")


def test_texts_that_it_is_measured_on_are_excluded(exclusion) -> None:
    import pydoc_data.topics

    licence = (REPOSITORY / "LICENSE").read_text("utf-8")
    assert exclusion.overlap("Somebody quotes: " + licence[2000:2400])
    assert exclusion.overlap(pydoc_data.topics.topics["raise"])
    assert not exclusion.overlap(pydoc_data.topics.topics["comparisons"][:2000])


def test_held_out_names_are_excluded(exclusion) -> None:
    from memagent_evaluation.english_facts import list_words

    name, town = list_words("first_names", held_out=True)[0], list_words("towns", held_out=True)[0]
    assert exclusion.overlap(f"Yesterday {name} came.")
    assert exclusion.overlap(f"The road to {town} is closed.")
    assert not exclusion.overlap(f"Yesterday {list_words('first_names', held_out=False)[0]} came.")


def test_rows_are_refused_with_the_text_that_overlaps_and_where_the_file_is_missing(exclusion, tmp_path) -> None:
    exclusion.require_clear(["What is the mayor's name?", SENTENCE])
    with pytest.raises(ExclusionError, match="who counts the votes"):
        exclusion.require_clear([SENTENCE, "who counts the votes?"])
    with pytest.raises(ExclusionError, match="Restore it from git"):
        Exclusion.load(tmp_path)


def test_each_text_of_a_package_is_excluded_whatever_text_is_last(tmp_path, monkeypatch) -> None:
    questions = tmp_path / "questions.toml"
    questions.write_text(
        """
[[texts]]
index = "pypi"
package = "poems"
version = "1"
file = "poems.txt"
licence = "CC0-1.0"
sha256 = ""
questions = [{ask = "Who sails?"}]

[[texts]]
questions = [{ask = "Who waits?"}]
"""
    )
    (tmp_path / "exclusion.toml").write_text(
        f"files = []\nmanuals = []\ntopics = []\ndocuments = []\nquestions = ['{questions}']"
    )
    monkeypatch.setattr("recipes.english.exclusion.read_text", lambda source: f"text of {source.package}")
    texts = [text for _, text in read_excluded_texts(tmp_path)]
    assert texts == ["Who sails?", "text of poems", "Who waits?"]
