"""Planted facts as tasks for training: the right split, one right answer, the same sample every time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memagent_evaluation.planted_facts import is_held_out
from memagent_evaluation.samples import Sample
from memagent_evaluation.scorers import score
from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_graph.errors import EvaluationError
from memagent_graph.tokenizers import load_tokenizer
from recipes.embedded.tasks import Alone, AmongForeign

TOKENIZER = load_tokenizer("embedded")


@pytest.fixture
def settings(tmp_path: Path) -> TaskSettings:
    haystack = tmp_path / "prose.txt"
    haystack.write_text("\n\n".join(f"Paragraph {n} says nothing. It goes on for a while." for n in range(400)))
    return TaskSettings(TOKENIZER, seed=3, small=True, haystack=haystack)


def text_of(sample: Sample) -> str:
    return "".join(sample.text())


@pytest.mark.parametrize("kind", [Alone, AmongForeign])
def test_a_sample_states_its_answer_once_and_is_nearly_as_long_as_asked(kind, settings) -> None:
    task = kind(settings)
    stated = [sample for index in range(16) if (sample := task.sample(1200, index)).gold != ("none",)]
    assert len(stated) > 8
    for sample in stated:
        text = text_of(sample)
        (needle,) = sample.needles
        assert sample.gold == (needle.gold,)
        assert len(re.findall(rf"\b{needle.gold}\b", text)) == 1
        assert needle.text in text
        room = 1200 - TOKENIZER.count(sample.question) - 48
        assert 0 <= room - TOKENIZER.count(text) < 20, "short by less than a sentence"


def test_only_among_foreign_facts_are_there_others(settings) -> None:
    def numbers(sample: Sample) -> list[str]:
        return re.findall(r"\b\d{4,7}\b", text_of(sample))

    alone, among_foreign = Alone(settings), AmongForeign(settings)
    assert [len(numbers(alone.sample(1024, index))) for index in range(8)] == [1] * 8
    among = [among_foreign.sample(1024, index) for index in range(8)]
    assert [len(numbers(sample)) for sample in among] == [4 + (sample.gold != ("none",)) for sample in among]


def test_among_foreign_facts_the_asked_one_is_now_and_then_absent(settings) -> None:
    task = AmongForeign(settings)
    samples = [task.sample(600, index) for index in range(60)]
    absent = [sample for sample in samples if sample.gold == ("none",)]
    assert 4 <= len(absent) <= 22
    for sample in absent:
        assert not sample.needles
        subject = sample.question.removeprefix("What is the ").partition("?")[0]
        assert subject not in text_of(sample)
        assert score(sample, "none", "\\boxed{none}").strict == 1
        assert score(sample, "48213", "\\boxed{48213}").strict == 0


def test_values_and_entities_are_of_the_split_for_training(settings) -> None:
    task = AmongForeign(settings)
    for sample in (task.sample(600, index) for index in range(40)):
        assert sample.gold == ("none",) or not is_held_out(sample.gold[0])
        entity = re.search(r"(?:of|for) (?:the )?([a-z]+)[ -]([a-z]+)(?:\?| mentioned)", sample.question)
        if entity:
            assert not is_held_out(entity[1]), sample.question
            assert not is_held_out(entity[2]), sample.question


def test_samples_depend_on_seed_length_and_index_alone(settings) -> None:
    first = AmongForeign(settings).sample(900, 7)
    again = load_task("recipes.embedded.tasks:AmongForeign", settings).sample(900, 7)
    assert (first.question, text_of(first)) == (again.question, text_of(again))
    assert text_of(AmongForeign(settings).sample(900, 8)) != text_of(first)


def test_a_text_keeps_its_layout_and_facts_stand_between_any_words(tmp_path: Path) -> None:
    """What is measured on has headings, tables and indented code; single spaces would be another kind of text."""
    haystack = tmp_path / "reference.txt"
    section = (
        "Heading {n}\n=========\n\n   indented    columns {n}\n   of  a  table; and more, {n}.\n\nIt ends. Or {n}?\n\n"
    )
    text = "".join(section.format(n=n) for n in range(300))
    haystack.write_text(text.replace("Heading 7\n", "\x00Heading 7\n"))
    settings = TaskSettings(TOKENIZER, seed=3, small=True, haystack=haystack)
    within_lines = 0
    task = Alone(settings)
    for sample in (task.sample(700, index) for index in range(20)):
        before, after = text_of(sample).split(sample.needles[0].text)
        assert before.lstrip() in text * 2, "up to the fact it is the text itself"
        assert "   of  a  table" in before + after
        within_lines += re.search(r"[^.?\n] +$", before) is not None
    assert 3 <= within_lines <= 17, "half of the documents have their facts between words"


@pytest.mark.parametrize(("content", "message"), [(b" \n", "holds no text"), (b"\xff\xfe\x00", "cannot be read")])
def test_a_haystack_without_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    haystack = tmp_path / "haystack.txt"
    haystack.write_bytes(content)
    with pytest.raises(EvaluationError, match=message) as refusal:
        Alone(TaskSettings(TOKENIZER, small=True, haystack=haystack)).sample(600, 0)
    assert "UTF-8" in (refusal.value.hint or "")


def test_a_length_without_room_for_the_facts_is_refused(settings) -> None:
    with pytest.raises(EvaluationError, match="too small for among_foreign") as refusal:
        AmongForeign(settings).sample(70, 0)
    assert "Ask for at least" in (refusal.value.hint or "")
