"""Training tasks with planted facts: the training split, one right answer, and reproducible samples."""

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


def join_text(sample: Sample) -> str:
    return "".join(sample.text())


@pytest.mark.parametrize("task_class", [Alone, AmongForeign])
def test_sample_states_its_answer_once_and_nearly_reaches_its_length(task_class, settings) -> None:
    task = task_class(settings)
    samples_with_fact = [sample for index in range(16) if (sample := task.sample(1200, index)).gold != ("none",)]
    assert len(samples_with_fact) > 8
    for sample in samples_with_fact:
        text = join_text(sample)
        (needle,) = sample.needles
        assert sample.gold == (needle.gold,)
        assert len(re.findall(rf"\b{needle.gold}\b", text)) == 1
        assert needle.text in text
        available_tokens = 1200 - TOKENIZER.count(sample.question) - 48
        assert 0 <= available_tokens - TOKENIZER.count(text) < 20, "short by less than a sentence"


def test_only_among_foreign_has_other_facts(settings) -> None:
    def find_numbers(sample: Sample) -> list[str]:
        return re.findall(r"\b\d{4,7}\b", join_text(sample))

    alone_task, foreign_task = Alone(settings), AmongForeign(settings)
    assert [len(find_numbers(alone_task.sample(1024, index))) for index in range(8)] == [1] * 8
    samples = [foreign_task.sample(1024, index) for index in range(8)]
    assert [len(find_numbers(sample)) for sample in samples] == [4 + (sample.gold != ("none",)) for sample in samples]


def test_among_foreign_sometimes_omits_the_requested_fact(settings) -> None:
    task = AmongForeign(settings)
    samples = [task.sample(600, index) for index in range(60)]
    unanswerable_samples = [sample for sample in samples if sample.gold == ("none",)]
    assert 4 <= len(unanswerable_samples) <= 22
    for sample in unanswerable_samples:
        assert not sample.needles
        subject = sample.question.removeprefix("What is the ").partition("?")[0]
        assert subject not in join_text(sample)
        assert score(sample, "none", "\\boxed{none}").strict == 1
        assert score(sample, "48213", "\\boxed{48213}").strict == 0


def test_values_and_entities_are_of_the_training_split(settings) -> None:
    task = AmongForeign(settings)
    for sample in (task.sample(600, index) for index in range(40)):
        assert sample.gold == ("none",) or not is_held_out(sample.gold[0])
        entity = re.search(r"(?:of|for) (?:the )?([a-z]+)[ -]([a-z]+)(?:\?| mentioned)", sample.question)
        if entity:
            assert not is_held_out(entity[1]), sample.question
            assert not is_held_out(entity[2]), sample.question


def test_samples_depend_only_on_seed_length_and_index(settings) -> None:
    sample = AmongForeign(settings).sample(900, 7)
    repeated_sample = load_task("recipes.embedded.tasks:AmongForeign", settings).sample(900, 7)
    assert (sample.question, join_text(sample)) == (repeated_sample.question, join_text(repeated_sample))
    assert join_text(AmongForeign(settings).sample(900, 8)) != join_text(sample)


def test_text_keeps_its_layout_and_facts_may_split_lines(tmp_path: Path) -> None:
    """Texts of evaluations have headings, tables and indented code, so training texts keep them too."""
    haystack = tmp_path / "reference.txt"
    section = (
        "Heading {n}\n=========\n\n   indented    columns {n}\n   of  a  table; and more, {n}.\n\nIt ends. Or {n}?\n\n"
    )
    text = "".join(section.format(n=n) for n in range(300))
    haystack.write_text(text.replace("Heading 7\n", "\x00Heading 7\n"))
    settings = TaskSettings(TOKENIZER, seed=3, small=True, haystack=haystack)
    split_line_count = 0
    task = Alone(settings)
    for sample in (task.sample(700, index) for index in range(20)):
        text_before, text_after = join_text(sample).split(sample.needles[0].text)
        assert text_before.lstrip() in text * 2, "the text before the fact is unchanged"
        assert "   of  a  table" in text_before + text_after
        split_line_count += re.search(r"[^.?\n] +$", text_before) is not None
    assert 3 <= split_line_count <= 17, "half of the documents have their facts between words"


@pytest.mark.parametrize(("content", "message"), [(b" \n", "holds no text"), (b"\xff\xfe\x00", "cannot be read")])
def test_a_haystack_without_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    haystack = tmp_path / "haystack.txt"
    haystack.write_bytes(content)
    with pytest.raises(EvaluationError, match=message) as error:
        Alone(TaskSettings(TOKENIZER, small=True, haystack=haystack)).sample(600, 0)
    assert "UTF-8" in (error.value.hint or "")


def test_a_length_without_room_for_the_facts_is_refused(settings) -> None:
    with pytest.raises(EvaluationError, match="too small for among_foreign") as error:
        AmongForeign(settings).sample(70, 0)
    assert "Ask for at least" in (error.value.hint or "")
