"""The examples run as they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.programs import run_program

from memagent_evaluation.planted_facts import Fact

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FACT = Fact(
    attribute="access code",
    entity="the quiet falcon",
    value="48213",
    statement="The access code of the quiet falcon is 48213.",
    question="What is the access code of the quiet falcon?",
)


@pytest.fixture(autouse=True)
def named_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMAGENT_MODEL", "embedded")


def test_ask_a_document(tmp_path: Path) -> None:
    text = "It rained all day, and the river rose a little. " * 20
    (tmp_path / "note.txt").write_text(text + FACT.statement + " " + text)
    command = [sys.executable, str(EXAMPLES / "ask_a_document.py"), str(tmp_path / "note.txt"), FACT.question]
    done = run_program(command, capture_output=True, check=True)
    assert "answer: 48213" in done.stdout


def test_reward_a_run(tmp_path: Path) -> None:
    text = "It rained all day, and the river rose a little. " * 20
    (tmp_path / "note.txt").write_text(text + FACT.statement + " " + text)
    command = [sys.executable, str(EXAMPLES / "reward_a_run.py"), "note.txt", FACT.question, FACT.value, "runs.parquet"]
    done = run_program(command, capture_output=True, check=True, cwd=tmp_path)
    assert f"'{FACT.value}' comes from chunk" in done.stdout
    assert "{'exact': 1.0}" in done.stdout
    assert (tmp_path / "runs.parquet").stat().st_size > 1000
