"""Exclusion keeps benchmark texts and questions out of the training data of `english`."""

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


def test_overlap_of_13_words_ignores_case_punctuation_and_line_breaks() -> None:
    exclusion = Exclusion(frozenset(hash_ngrams(SENTENCE)))
    words = split_words(SENTENCE)
    assert exclusion.overlaps("Before. " + ",\n".join(words[3:16]).upper() + "! After it comes more.")
    assert not exclusion.overlaps(" ".join(words[:12]) + " nothing like it")
    assert not exclusion.overlaps(" ".join(words[3:10]) + " and then " + " ".join(words[10:]))


def test_words_hyphenated_at_a_line_end_are_joined() -> None:
    assert split_words("the ter-\n   rible monster, well-known") == ["the", "terrible", "monster", "well", "known"]


def test_benchmark_questions_are_excluded(exclusion) -> None:
    for name in ("natural_questions.toml", "unseen_questions.toml"):
        for text in tomllib.loads((REPOSITORY / "benchmarks" / name).read_text("utf-8"))["texts"]:
            assert all(exclusion.overlaps(question["ask"].lower()) for question in text["questions"])
    assert not exclusion.overlaps("Who wrote the second chapter of the report?")


def test_benchmark_texts_are_excluded(exclusion) -> None:
    import pydoc_data.topics

    licence = (REPOSITORY / "LICENSE").read_text("utf-8")
    assert exclusion.overlaps("Somebody quotes: " + licence[2000:2400])
    assert exclusion.overlaps(pydoc_data.topics.topics["raise"])
    assert not exclusion.overlaps(pydoc_data.topics.topics["comparisons"][:2000])


def test_held_out_names_are_excluded(exclusion) -> None:
    from memagent_evaluation.english_facts import list_words

    name, town = list_words("first_names", held_out=True)[0], list_words("towns", held_out=True)[0]
    assert exclusion.overlaps(f"Yesterday {name} came.")
    assert exclusion.overlaps(f"The road to {town} is closed.")
    assert not exclusion.overlaps(f"Yesterday {list_words('first_names', held_out=False)[0]} came.")


def test_overlapping_rows_and_a_missing_file_are_refused(exclusion, tmp_path) -> None:
    exclusion.require_clear(["What is the mayor's name?", SENTENCE])
    with pytest.raises(ExclusionError, match="who counts the votes"):
        exclusion.require_clear([SENTENCE, "who counts the votes?"])
    with pytest.raises(ExclusionError, match="Restore it from git"):
        Exclusion.load(tmp_path)


def test_texts_of_all_packages_are_excluded_in_any_order(tmp_path, monkeypatch) -> None:
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
