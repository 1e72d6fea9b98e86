"""The examples that put the reader into LangGraph graphs and LangChain chains run as they are, and are short."""

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
PROSE = "It rained all day, and the river rose a little. " * 20


@pytest.fixture(autouse=True)
def named_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMAGENT_MODEL", "embedded")


def run(folder: Path, name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return run_program(command, capture_output=True, check=True, cwd=folder).stdout


@pytest.mark.parametrize("name", ["graph_with_node", "retrieval_with_compressor", "report_over_documents"])
def test_each_is_under_60_lines(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def test_graph_with_node(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text(PROSE + FACT.statement + " " + PROSE)
    out = run(tmp_path, "graph_with_node", "note.txt", FACT.question)
    assert f"{FACT.question} 48213\n" in out
    position = (tmp_path / "note.txt").read_text().index("48213")
    assert out.endswith(f'"48213" at {position}\n')


def test_retrieval_with_compressor(tmp_path: Path) -> None:
    (tmp_path / "rain.txt").write_text("\n\n".join([PROSE] * 5))
    (tmp_path / "birds.txt").write_text("\n\n".join([PROSE, f"{PROSE}{FACT.statement}", PROSE]))
    out = run(tmp_path, "retrieval_with_compressor", str(tmp_path), FACT.question)
    assert out.startswith("answer: 48213\n")
    assert "{'source': 'birds.txt', 'paragraph': 1}" in out


def test_report_over_documents(tmp_path: Path) -> None:
    for number in range(3):
        statement = FACT.statement.replace("48213", f"4821{number}")
        (tmp_path / f"{number}.txt").write_text(PROSE + statement + " " + PROSE)
    out = run(tmp_path, "report_over_documents", FACT.question, "0.txt", "1.txt", "2.txt")
    assert out.startswith(f"# {FACT.question}\n")
    for number in range(3):
        assert f"- **{number}.txt**: 4821{number}" in out
