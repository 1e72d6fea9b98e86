"""Lengths in tokens of the policy's tokenizer are never exceeded, reached up to a unit, and reported."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_tokenizers import TOKENIZER_KINDS

from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.lists import LIST_TASK_NAMES
from memagent_evaluation.tasks.needles import NEEDLE_CONFIGS
from memagent_graph.errors import EvaluationError
from memagent_graph.tokenizers.loading import load_tokenizer

GENERATED_TASKS = (*(*NEEDLE_CONFIGS, "vt", *LIST_TASK_NAMES, "english_hop_2", "state_3"),)
LONGEST_UNIT_TOKENS = 400
"""The tokens of the longest sentence, which has 600 characters."""


@pytest.fixture(scope="module", params=["embedded", "cl100k", "unigram"])
def tokenizer(request, tmp_path_factory):
    if request.param == "embedded":
        return load_tokenizer("embedded")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    TOKENIZER_KINDS[request.param]().save(str(path))
    return load_tokenizer(path)


def count_sample_tokens(sample, tokenizer):
    """Count the tokens of document, question and answer, as RULER does."""
    return tokenizer.count("".join(sample.text())) + tokenizer.count(sample.question) + sample.task.answer_tokens


@pytest.mark.parametrize("name", GENERATED_TASKS)
def test_length_is_reached_up_to_one_unit_and_never_exceeded(name, tokenizer):
    """A unit is a sentence of prose, a line, or the words of one entry of a list."""
    sample = load_task(name, TaskSettings(tokenizer)).sample(7000, 1)
    tokens = count_sample_tokens(sample, tokenizer)
    assert 7000 - LONGEST_UNIT_TOKENS < tokens <= 7000
    assert abs(tokens - sample.reached_length) <= 5


@settings(max_examples=20)
@given(
    name=st.sampled_from(GENERATED_TASKS),
    length=st.integers(40, 3000),
    index=st.integers(0, 1000),
    seed=st.integers(0, 3),
    small=st.booleans(),
)
def test_any_length_is_kept_or_refused_with_a_possible_length(name, length, index, seed, small):
    tokenizer = load_tokenizer("embedded")
    task = load_task(name, TaskSettings(tokenizer, seed=seed, small=small))
    sample = None
    for _ in range(3):  # at another length the words differ, and may be longer than the margin
        try:
            sample = task.sample(length, index)
            break
        except EvaluationError as error:
            assert f"a length of {length:,} tokens is too small for {name}" in error.message
            refused_length, length = length, int(error.hint.split("at least ")[1].split(", ")[0].replace(",", ""))
            assert length > refused_length
    assert sample is not None
    assert 0 <= length - count_sample_tokens(sample, tokenizer) < LONGEST_UNIT_TOKENS
    assert abs(sample.reached_length - count_sample_tokens(sample, tokenizer)) <= 2


def test_length_holds_when_text_suddenly_needs_more_tokens(tokenizer, tmp_path):
    plain_sentences = [f"The {word} is on the table." for word in ("cup", "book", "letter", "clock")] * 60
    dense_words = [f"🧠{number}語😀7é{number}!" for number in range(200)]
    book = tmp_path / "book.txt"
    book.write_text(" ".join([*plain_sentences, *dense_words]))
    for length in (3000, 12_000):
        sample = load_task("niah_single_2", TaskSettings(tokenizer, haystack=book)).sample(length, 0)
        assert length - LONGEST_UNIT_TOKENS < count_sample_tokens(sample, tokenizer) <= length


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", [*NEEDLE_CONFIGS, "english_fact", "english_hop_2_backward", "english_list", "state_3"])
def test_consecutive_samples_ask_different_questions_on_one_document(name, small):
    tokenizer = load_tokenizer("embedded")
    task = load_task(name, TaskSettings(tokenizer, questions_per_document=2, small=small))
    samples = [task.sample(2500, index) for index in range(4)]
    texts = ["".join(sample.text()) for sample in samples]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert len({sample.question for sample in samples[:2]}) == len({sample.question for sample in samples[2:]}) == 2
    assert [sample.index for sample in samples] == list(range(4))
    needle_sets = [{(needle.text, needle.depth) for needle in sample.needles} for sample in samples]
    assert len({frozenset(needles) for needles in needle_sets}) == 4
    for sample, text in zip(samples, texts, strict=True):
        assert sample.needles
        assert {needle.gold for needle in sample.needles} >= set(sample.gold)
        assert all(text[round(needle.depth * len(text)) :].startswith(needle.text) for needle in sample.needles)
        assert 2300 <= count_sample_tokens(sample, tokenizer) <= 2500
        assert abs(count_sample_tokens(sample, tokenizer) - sample.reached_length) <= 2


def test_more_questions_than_needle_depths_share_a_document():
    task = load_task("niah_multikey_1", TaskSettings(load_tokenizer("embedded"), questions_per_document=25))
    first_text, last_text = ("".join(task.sample(20_000, index).text()) for index in (0, 24))
    assert first_text == last_text
    assert first_text.count("special magic number") == 100
