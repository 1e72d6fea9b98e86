"""User questions in a loop: epochs, held-out questions and documents, filters, and refusals before anything runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from support.rl_loops import make_job, make_record
from typer.testing import CliRunner

from memagent_evaluation.samples import Sample
from memagent_graph import MemAgentError
from memagent_graph.cli import app
from memagent_graph.policies.added import get_policies_folder
from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_training.job.base_model import find_base_model
from memagent_training.rl.loop_journal import MeanReward
from memagent_training.rl.rl_job import PreparedLoop, prepare
from memagent_training.training_errors import TrainingError


def make_rows(count: int, *, word_count: int = 60) -> list[dict[str, Any]]:
    """Make questions, two on each document."""
    return [
        {
            "question": f"What is the code of harbor {index}?",
            "document": f"The minutes of day {index // 2}. " + "It rained all day. " * (word_count // 4),
            "answers": [str(1000 + index)],
        }
        for index in range(count)
    ]


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def prepare_loop(tmp_path: Path, rows: Sequence[Any], **changes: Any) -> PreparedLoop:
    defaults: dict[str, Any] = {"tasks": (), "lengths": (), "measure_every": 1, "measure_count": 100}
    defaults["data"] = write_rows(tmp_path / "mine.jsonl", rows)
    return prepare(make_job(tmp_path / "rl", **(defaults | changes)))


def get_questions(samples: Sequence[Sample]) -> list[str]:
    return [sample.question for sample in samples]


def test_each_epoch_asks_every_training_question_once(tmp_path: Path) -> None:
    curriculum = prepare_loop(tmp_path, make_rows(40)).curriculum
    (length,) = curriculum.lengths
    held_out_questions = get_questions(curriculum.list_held_out_samples(length, 100))
    assert len(held_out_questions) == 4
    drawn_questions: list[str] = []
    records: list[Any] = []
    for collection in range(18):
        batch = get_questions(list(islice(curriculum.draw_questions(collection, 0, records), 10)))
        records.append(make_record(collection, questions=len(batch)))
        drawn_questions += batch
    assert curriculum.compute_epochs(records, 0) == 5
    epochs = [drawn_questions[start : start + 36] for start in range(0, 180, 36)]
    assert all(set(epoch) == set(epochs[0]) and len(set(epoch)) == 36 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert set(held_out_questions).isdisjoint(drawn_questions)
    assert set(held_out_questions) | set(drawn_questions) == {row["question"] for row in make_rows(40)}


def test_collection_repeats_its_questions_on_resume(tmp_path: Path) -> None:
    curriculum = prepare_loop(tmp_path, make_rows(12)).curriculum
    records = [make_record(0, questions=3), make_record(1, questions=4)]
    draws = [get_questions(list(curriculum.draw_questions(1, 0, known))) for known in (records[:1], records)]
    assert draws[0] == draws[1]
    assert len(draws[0]) == 11
    assert max(Counter(get_questions(list(curriculum.draw_questions(0, 0)))).values()) == 1


def test_documents_are_either_for_training_or_held_out(tmp_path: Path) -> None:
    curriculum = prepare_loop(tmp_path, make_rows(40), held_out=0.25).curriculum
    held_out_texts = {"".join(sample.text()) for sample in curriculum.list_held_out_samples(curriculum.lengths[0], 100)}
    training_texts = {"".join(sample.text()) for sample in curriculum.draw_questions(0, 0)}
    assert len(held_out_texts) == 5
    assert held_out_texts.isdisjoint(training_texts)


def test_stage_with_longer_documents_follows_right_answers(tmp_path: Path) -> None:
    curriculum = prepare_loop(tmp_path, [*make_rows(8), *make_rows(8, word_count=700)], held_out=0.2).curriculum
    short_length, long_length = curriculum.lengths
    assert {sample.length for sample in curriculum.draw_questions(0, 0)} == {short_length}
    records = [make_record(0, by_length={short_length: MeanReward(0.9, 8)}, questions=2)]
    assert curriculum.find_stage(records) == 1
    lengths = Counter(sample.length for sample in curriculum.draw_questions(1, 1, records))
    assert lengths == {short_length: 6, long_length: 6}


def test_length_with_one_question_is_trained_on(tmp_path) -> None:
    curriculum = prepare_loop(tmp_path, [make_rows(1, word_count=8)[0], *make_rows(9, word_count=200)[1:]]).curriculum
    short_length, long_length = curriculum.lengths
    assert [len(curriculum.list_held_out_samples(length, 100)) for length in (short_length, long_length)] == [0, 1]
    assert curriculum.min_first_questions > 1
    assert curriculum.find_stage([]) == 1
    assert Counter(sample.length for sample in curriculum.draw_questions(0, 1)) == {short_length: 1, long_length: 7}


def test_ruler_hqa_takes_hotpotqa_questions_with_distractors(tmp_path: Path) -> None:
    rows = [
        {
            "_id": f"h{number}",
            "question": f"When was mayor {number} born?",
            "answer": str(1900 + number),
            "supporting_facts": [[f"Mayor {number}", 0]],
            "context": [[f"Mayor {number}", [f"Born {1900 + number}."]], [f"Town {number}", ["A town."]]],
        }
        for number in range(10)
    ]
    loop = prepare_loop(tmp_path, rows, tasks=("ruler_hqa",), lengths=(4, 8), small=False, held_out=0.2)
    held_out_questions = [set(get_questions(loop.curriculum.list_held_out_samples(length, 100))) for length in (4, 8)]
    assert held_out_questions[0] == held_out_questions[1]
    assert len(held_out_questions[0]) == 2
    training_samples = list(loop.curriculum.draw_questions(0, 1))
    assert len(training_samples) == 16
    assert held_out_questions[0].isdisjoint(get_questions(training_samples))
    text = "".join(next(sample for sample in training_samples if sample.length == 8).text())
    assert text.count("Document ") == 8


def test_record_of_a_loop_identifies_its_questions(tmp_path: Path) -> None:
    loops = [prepare_loop(tmp_path, make_rows(count)).decisive_inputs["loop"] for count in (10, 10, 11)]
    assert loops[0]["questions"] == loops[1]["questions"] != loops[2]["questions"]
    other_split = prepare_loop(tmp_path, make_rows(10), held_out=0.3).decisive_inputs["loop"]
    assert loops[0]["questions"] != other_split["questions"]


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([{"question": "Who?", "document": "Ada."}], {}, r"line 1.*\"answers\" is missing"),
        ([*make_rows(4), make_rows(4)[1]], {}, r"questions 1 and 4 .* the same.*harbor 1.*Take one of them out"),
        (make_rows(10), {"lengths": (4096,)}, r"qa_files has 0 questions of length 4,096.*of questions.*\(10\)"),
        (make_rows(1), {}, r"no question of length \d+ is held out.*Add questions"),
        ([{**make_rows(1)[0], "document": __file__}], {}, r"line 1: \"document\" is the path of a file.*test_rl_own"),
        (make_rows(10), {"held_out": 0.0}, r"no question of length \d+ is held out.*held_out 0.1.*measure_every 0"),
        (make_rows(10), {"held_out": 1.0}, r"held_out must be at least 0 and below 1, got 1"),
        (make_rows(10), {"held_out": 0.97}, r"10 questions.*97% of them are held out.*none is left.*held_out"),
        (make_rows(10), {"tasks": ("niah_single_1",), "lengths": (500,)}, r"its own questions, and takes none from"),
        (make_rows(10), {"tasks": ("qa_files", "niah_single_1"), "lengths": (500,)}, r"is not mixed with other tasks"),
        (make_rows(10), {"tasks": ("niah_single_1",)}, r"niah_single_1 have no lengths of their own.*Pass lengths"),
    ],
    ids=str,
)
def test_invalid_questions_are_refused_with_a_hint(
    rows: list[Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(MemAgentError, match=message):
        prepare_loop(tmp_path, rows, **changes)
    assert not (tmp_path / "rl").exists()


def test_nothing_is_held_out_if_nothing_is_measured(tmp_path: Path) -> None:
    curriculum = prepare_loop(tmp_path, make_rows(10), held_out=0.0, measure_every=0).curriculum
    assert len(list(curriculum.draw_questions(0, 0))) == 10


def test_policy_that_was_not_added_completely_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMAGENT_HOME", str(tmp_path))
    with pytest.raises(MemAgentError, match=r"english is not on this machine.*memagent policy add english"):
        find_base_model("english")
    folder = get_policies_folder() / "english"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(EMBEDDED_FOLDER)
    with pytest.raises(MemAgentError, match="not on this machine"):  # without its record, adding was not completed
        find_base_model("english")


def test_custom_code_of_a_model_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(code), "utf-8")
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", "utf-8")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("builtins.input", lambda _: "y")  # transformers may ask
    with pytest.raises(TrainingError, match=r"config.json cannot be parsed.*custom code"):
        find_base_model(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_questions_answered_without_the_document_are_left_out(tmp_path: Path) -> None:
    asked_rows = [*make_rows(5), make_rows(6)[5] | {"question": "What is two and two?"}]
    rows = [*asked_rows, make_rows(7)[6] | {"question": "What is two and two?", "answers": ["none"]}]
    data, results = write_rows(tmp_path / "mine.jsonl", rows), tmp_path / "without"
    with pytest.raises(MemAgentError, match=r"no results in .*without"):
        prepare_loop(tmp_path, rows, drop_answered_without=results)
    command = ["eval", "qa_files", "--data", str(data), "--model", "embedded", "--out", str(results), "--systems"]
    for system in ("full_context", "no_document"):
        assert CliRunner().invoke(app, [*command, system, "--resume"]).exit_code == 0
        if system == "full_context":
            with pytest.raises(MemAgentError, match=r"no answers without the document.*systems no_document"):
                prepare_loop(tmp_path, rows, drop_answered_without=results)
    other_format = CliRunner().invoke(app, [*command, "no_document", "--resume", "--dtype", "bfloat16"])
    assert "identities.weights is" in other_format.stderr
    loop = prepare_loop(tmp_path, rows, drop_answered_without=results)
    samples = [*loop.curriculum.draw_questions(0, 0), *loop.curriculum.list_held_out_samples(loop.job.lengths[0], 100)]
    questions = {(sample.question, *sample.gold) for sample in samples}
    assert questions == {(row["question"], *row["answers"]) for row in asked_rows}
    assert loop.decisive_inputs["loop"]["questions"] != prepare_loop(tmp_path, rows).curriculum.split.fingerprint
