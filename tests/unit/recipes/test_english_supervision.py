"""The training of `english` can be killed at any step, and a packed adapter is what the next session goes on from."""

from __future__ import annotations

import json

import pytest

from memagent_graph.policies.profile import EMBEDDED_FOLDER
from recipes.english import supervision
from recipes.english.lessons import LessonMaker
from recipes.english.prose_questions import ProseQuestion
from recipes.english.sections import ProseSection

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
PROSE = "The harbour was built in 1887 because the old one had silted up. " * 3
ROW = ProseQuestion("a", 0, len(PROSE), "when", "When did the harbour come into being?", "1887", PROSE[:64].strip())


@pytest.fixture
def train(tmp_path, monkeypatch):
    section = ProseSection("a", "story", 0, len(PROSE), PROSE)
    monkeypatch.setattr(
        supervision, "make_lessons", lambda *, held_out: LessonMaker([section], [ROW], held_out=held_out)
    )
    monkeypatch.setattr(supervision, "SAVE_SECONDS", 0.0)

    def run(out: str, until: int, *more: str):
        words = ["--base", str(EMBEDDED_FOLDER), "--out", str(tmp_path / out), "--until-step", str(until), *more]
        supervision.train(supervision.arguments_of([*words, "--tokens", "100"]))
        return torch.load(tmp_path / out / "last.pt", weights_only=True)

    return run


def test_a_run_that_was_cut_off_learns_the_same(train) -> None:
    whole = train("whole", 3)
    train("parts", 1)
    parts = train("parts", 3)
    assert parts["progress"]["step"] == whole["progress"]["step"] == 3
    assert parts["progress"]["tokens"] == whole["progress"]["tokens"]
    assert all(torch.equal(weight, parts["adapter"][name]) for name, weight in whole["adapter"].items())


def test_a_packed_adapter_has_cursor_and_seed_and_goes_on_from_there(train, tmp_path, capsys) -> None:
    train("first", 2, "--seed", "5", "--pack", str(tmp_path / "packed"))
    table = json.loads((tmp_path / "packed" / "progress.json").read_text("utf-8"))
    assert (table["step"], table["seed"], len(table["questions_sha256"])) == (2, 5, 64)
    later = train("second", 3, "--seed", "5", "--adapter", str(tmp_path / "packed"))
    assert later["progress"]["step"] == 3
    assert later["progress"]["examples"] > table["examples"]
    assert "step 3 loss" in capsys.readouterr().out


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)
    maker = LessonMaker([ProseSection("a", "story", 0, len(PROSE), PROSE)], [ROW])
    one, same, other = (supervision.make_batch(maker, tokenizer, 1, step, 300) for step in (4, 4, 5))
    assert one == same != other
