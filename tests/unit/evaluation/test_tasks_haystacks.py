"""Haystacks: endless streams of prose sentences from users' files and from Python's documentation."""

import itertools
import random
import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.haystacks import iter_reference_paragraphs, make_prose_haystack, split_sentences
from memagent_graph.errors import EvaluationError
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")


def test_paragraph_is_split_into_sentences_without_loss():
    text = 'One came. "Two came!" Three? see e.g. the fourth. 5 came.'
    assert list(split_sentences(text)) == ["One came. ", '"Two came!" ', "Three? see e.g. the fourth. ", "5 came.\n\n"]
    assert list(split_sentences("一。二！三")) == ["一。", "二！", "三\n\n"]
    for paragraph in itertools.islice(iter_reference_paragraphs(), 200):
        assert "".join(split_sentences(paragraph)) == paragraph + "\n\n"


@given(words=st.lists(st.text("ab", min_size=1, max_size=900), min_size=1, max_size=40))
def test_very_long_sentences_are_split(words):
    text = " ".join(words)
    sentences = list(split_sentences(text))
    assert "".join(sentences) == text + "\n\n"
    assert max(map(len, sentences)) <= 602


def test_haystack_consists_of_the_sentences_of_a_user_file(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Sentence {n} of the\nuser's own book.\n\n" for n in range(400)))
    sample = load_task("niah_single_2", TaskSettings(TOKENIZER, haystack=book)).sample(3000, 0)
    text = "".join(sample.text()).replace(sample.needles[0].text, "")
    sentences = re.findall(r"Sentence \d+ of the user's own book\.", text)
    assert len(sentences) > 100
    assert re.sub(r"\s+", " ", text).strip() == " ".join(sentences)


def test_short_file_is_repeated(tmp_path):
    book = tmp_path / "book.md"
    book.write_text("A first sentence. A second one.\n")
    units = list(itertools.islice(make_prose_haystack(book, random.Random(0)).iter_units(), 7))
    assert set(units) == {"A first sentence. ", "A second one.\n\n"}
    assert all(unit != next_unit for unit, next_unit in itertools.pairwise(units))
    assert load_task("niah_multikey_1", TaskSettings(TOKENIZER, haystack=book)).sample(2000, 0).needles


def test_folder_is_read_in_name_order_without_non_text_files(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "b.txt").write_text("Beta stands here.")
    (tmp_path / "a.md").write_text("Alpha stands here.")
    (tmp_path / "part" / "c.TXT").write_text("Gamma stands here.")
    (tmp_path / "d.bin").write_bytes(b"\xff\xfe")
    haystack = make_prose_haystack(tmp_path, random.Random(0))
    sentences = "".join(itertools.islice(haystack.iter_units(), 5)).split("\n\n")
    assert "Alpha stands here./Beta stands here./Gamma stands here." in "/".join(sentences)


def test_large_file_is_streamed(tmp_path):
    book = tmp_path / "one_line.txt"
    with book.open("w") as file:
        for _ in range(40_000):
            file.write("These are words of one line without any end to it, and more of them. ")
    tracemalloc.start()
    haystack = make_prose_haystack(book, random.Random(0))
    for _ in itertools.islice(haystack.iter_units(), 20_000):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000 < book.stat().st_size / 10


def test_samples_start_at_different_positions_in_the_prose():
    task = load_task("niah_single_2", TaskSettings(TOKENIZER))
    beginnings = {next(iter(task.sample(4000, index).text())) for index in range(8)}
    assert len(beginnings) > 5


@pytest.mark.parametrize(
    ("make_haystack", "message"),
    [
        (lambda path: None, "there is no haystack"),
        (lambda path: path.write_text(" \n\n "), "holds no text"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00broken"), "cannot be read"),
        (lambda path: path.mkdir(), "holds no text"),
    ],
)
def test_haystack_without_text_is_an_error_with_a_hint(make_haystack, message, tmp_path):
    path = tmp_path / "hay.txt"
    make_haystack(path)
    with pytest.raises(EvaluationError, match=message) as error:
        load_task("niah_single_2", TaskSettings(TOKENIZER, haystack=path)).sample(2000, 0)
    assert error.value.hint
