"""Lengths are counted with the policy's tokenizer, whichever it is: reached but for a unit, stated, never exceeded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_tokenizers import TOKENIZER_KINDS

from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.lists import LISTS
from memagent_evaluation.tasks.needles import SHAPES
from memagent_graph.errors import EvaluationError
from memagent_graph.tokenizers.loading import load_tokenizer

GENERATED = (*(*SHAPES, "vt", *LISTS, "english_hop_2", "state_3"),)
LONGEST_UNIT = 400
"""Tokens of a sentence of 600 characters, which is the longest."""


@pytest.fixture(scope="module", params=["embedded", "cl100k", "unigram"])
def tokenizer(request, tmp_path_factory):
    if request.param == "embedded":
        return load_tokenizer("embedded")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    TOKENIZER_KINDS[request.param]().save(str(path))
    return load_tokenizer(path)


def tokens_of(sample, tokenizer):
    """As RULER counts: of document, question and answer."""
    return tokenizer.count("".join(sample.text())) + tokenizer.count(sample.question) + sample.task.answer_tokens


@pytest.mark.parametrize("name", GENERATED)
def test_a_length_is_reached_but_for_a_unit_is_never_exceeded_and_is_stated(name, tokenizer):
    """A unit is a sentence of prose, a line, or the words of one entry of a list."""
    sample = load_task(name, TaskSettings(tokenizer)).sample(7000, 1)
    tokens = tokens_of(sample, tokenizer)
    assert 7000 - LONGEST_UNIT < tokens <= 7000
    assert abs(tokens - sample.reached) <= 5


@settings(max_examples=20)
@given(
    name=st.sampled_from(GENERATED),
    length=st.integers(40, 3000),
    index=st.integers(0, 1000),
    seed=st.integers(0, 3),
    small=st.booleans(),
)
def test_any_length_is_kept_or_refused_with_one_that_is_possible(name, length, index, seed, small):
    tokenizer = load_tokenizer("embedded")
    task = load_task(name, TaskSettings(tokenizer, seed=seed, small=small))
    sample = None
    for _ in range(3):  # at another length the words are others, and may be longer by more than the margin
        try:
            sample = task.sample(length, index)
            break
        except EvaluationError as error:
            assert f"a length of {length:,} tokens is too small for {name}" in error.message
            before, length = length, int(error.hint.split("at least ")[1].split(", ")[0].replace(",", ""))
            assert length > before
    assert sample is not None
    assert 0 <= length - tokens_of(sample, tokenizer) < LONGEST_UNIT
    assert abs(sample.reached - tokens_of(sample, tokenizer)) <= 2


def test_text_whose_tokens_suddenly_become_denser_is_measured_all_the_same(tokenizer, tmp_path):
    plain = [f"The {word} is on the table." for word in ("cup", "book", "letter", "clock")] * 60
    dense = [f"🧠{number}語😀7é{number}!" for number in range(200)]
    book = tmp_path / "book.txt"
    book.write_text(" ".join([*plain, *dense]))
    for length in (3000, 12_000):
        sample = load_task("niah_single_2", TaskSettings(tokenizer, haystack=book)).sample(length, 0)
        assert length - LONGEST_UNIT < tokens_of(sample, tokenizer) <= length


# Several questions on one document: the same text for all of them, with the facts of each


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", [*SHAPES, "english_fact", "english_hop_2_backward", "english_list", "state_3"])
def test_samples_in_a_row_ask_different_things_about_the_same_bytes(name, small):
    tokenizer = load_tokenizer("embedded")
    task = load_task(name, TaskSettings(tokenizer, questions_per_document=2, small=small))
    samples = [task.sample(2500, index) for index in range(4)]
    texts = ["".join(sample.text()) for sample in samples]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert len({sample.question for sample in samples[:2]}) == len({sample.question for sample in samples[2:]}) == 2
    assert [sample.index for sample in samples] == list(range(4))
    evidence = [{(needle.text, needle.depth) for needle in sample.needles} for sample in samples]
    assert len({frozenset(item) for item in evidence}) == 4
    for sample, text in zip(samples, texts, strict=True):
        assert sample.needles
        assert {needle.gold for needle in sample.needles} >= set(sample.gold)
        assert all(text[round(needle.depth * len(text)) :].startswith(needle.text) for needle in sample.needles)
        assert 2300 <= tokens_of(sample, tokenizer) <= 2500
        assert abs(tokens_of(sample, tokenizer) - sample.reached) <= 2


def test_more_questions_than_ruler_has_places_for_needles_share_a_document():
    task = load_task("niah_multikey_1", TaskSettings(load_tokenizer("embedded"), questions_per_document=25))
    first, last = ("".join(task.sample(20_000, index).text()) for index in (0, 24))
    assert first == last
    assert first.count("special magic number") == 100
