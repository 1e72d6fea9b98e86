"""Several questions on one document: the same text for all of them, with the facts of each; alone, nothing changes."""

import textwrap

import pytest

from memagent_evaluation.sample_documents import OpenDocuments
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_evaluation.tasks.needles import SHAPES
from memagent_graph.documents import DocumentStore
from memagent_graph.errors import EvaluationError
from memagent_graph.tokenizers import load_tokenizer

TOKENIZER = load_tokenizer("embedded")
OWN = ("english_fact", "english_hop_2_backward", "english_list", "state_3")
LENGTH = 2500


def text_of(sample):
    return "".join(sample.text())


def asking(name, questions, **settings):
    return load_task(name, TaskSettings(TOKENIZER, questions_per_document=questions, **settings))


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", [*SHAPES, *OWN])
def test_samples_in_a_row_ask_different_things_about_the_same_bytes(name, small):
    task = asking(name, 2, small=small)
    samples = [task.sample(LENGTH, index) for index in range(4)]
    texts = [text_of(sample) for sample in samples]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert len({sample.question for sample in samples[:2]}) == len({sample.question for sample in samples[2:]}) == 2
    assert [sample.index for sample in samples] == list(range(4))
    evidence = [{(needle.text, needle.depth) for needle in sample.needles} for sample in samples]
    assert len({frozenset(item) for item in evidence}) == 4
    for sample, text in zip(samples, texts, strict=True):
        assert sample.needles
        assert {needle.gold for needle in sample.needles} >= set(sample.gold)
        assert all(text[round(needle.depth * len(text)) :].startswith(needle.text) for needle in sample.needles)
        tokens = TOKENIZER.count(text) + TOKENIZER.count(sample.question) + task.answer_tokens
        assert LENGTH - 200 <= tokens <= LENGTH
        assert abs(tokens - sample.reached) <= 2


def test_more_questions_than_ruler_has_places_for_needles_share_a_document():
    task = asking("niah_multikey_1", 25)
    samples = [task.sample(20_000, index) for index in (0, 24)]
    assert text_of(samples[0]) == text_of(samples[1])
    assert text_of(samples[0]).count("special magic number") == 100


def test_a_task_of_ones_own_says_whether_it_can(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        textwrap.dedent("""
        class One:
            name, metric, unit, answer_tokens, sample = "one", None, None, 8, None
            def __init__(self, settings):
                self.settings = settings

        class Several(One):
            shares_documents = True
        """)
    )
    with pytest.raises(EvaluationError, match="one question on each document"):
        asking(f"{path}:One", 3)
    assert asking(f"{path}:Several", 3).settings.questions_per_document == 3


async def test_the_document_is_stored_once(tmp_path):
    task = asking("english_hop_2", 3)
    documents = OpenDocuments({task.name: task}, DocumentStore(tmp_path))
    prepared_samples = [await documents.prepare(task.name, 3000, index, 1) for index in range(6)]
    await documents.close()
    keys = [sample.document["key"] for sample in prepared_samples]
    assert keys == [key for key in dict.fromkeys(keys) for _ in "abc"]
