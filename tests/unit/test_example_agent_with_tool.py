"""The example runs as it is, with the embedded policy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.programs import run_program

from memagent_evaluation.planted_facts import Fact

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "agent_with_tool.py"
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


def test_an_agent_reads_a_document_with_the_tool(tmp_path: Path) -> None:
    text = "It rained all day, and the river rose a little. " * 20
    (tmp_path / "note.txt").write_text(text + FACT.statement + " " + text)
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "note.txt"), FACT.question]
    done = run_program(command, capture_output=True, check=True)
    assert "tool: Answer: 48213\n" in done.stdout
    assert ": 100% read" in done.stdout
    assert "ai: That is what the document says." in done.stdout
    assert EXAMPLE.read_text().count("\n") < 60
