"""The examples run unchanged with the embedded policy, and those for LangChain and LangGraph are short."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.programs import run_program

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STATEMENT = "The access code of the quiet falcon is 48213."
QUESTION = "What is the access code of the quiet falcon?"
PROSE = "It rained all day, and the river rose a little. " * 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the examples."""
    monkeypatch.setenv("MEMAGENT_MODEL", "embedded")
    (tmp_path / "note.txt").write_text(f"{PROSE}{STATEMENT} {PROSE}")
    return tmp_path


def run_example(folder: Path, name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return run_program(command, capture_output=True, check=True, cwd=folder).stdout


@pytest.mark.parametrize("name", ["agent_with_tool", "graph_with_node", "report_over_documents"])
def test_each_example_has_fewer_than_60_lines(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def test_ask_a_document_prints_the_answer(folder: Path) -> None:
    assert "answer: 48213" in run_example(folder, "ask_a_document", "note.txt", QUESTION)


def test_reward_a_run_exports_only_that_run(folder: Path) -> None:
    right_output, wrong_output = (
        run_example(folder, "reward_a_run", "note.txt", QUESTION, gold, "runs.parquet") for gold in ("48213", "1")
    )
    assert "'48213' comes from chunk" in right_output and "{'exact': 1.0}; " in right_output
    assert wrong_output == right_output.replace("1.0}", "0.0}"), "only the reward differs"


def test_agent_with_tool_streams_progress_and_answers(folder: Path) -> None:
    output = run_example(folder, "agent_with_tool", "note.txt", QUESTION)
    assert "tool: Answer: 48213\n" in output
    assert ": 100% read" in output
    assert "ai: That is what the document says." in output


def test_agent_with_middleware_finds_the_fact(folder: Path) -> None:
    output = run_example(folder, "agent_with_middleware", "2500")
    (answer,) = re.findall(r"(?m)^Answer: (\d+)$", output)
    (fact,) = re.findall(r"(?m)^The fact was (\d+)", output)
    assert answer == fact
    assert "ask_tool_result" in output


def test_graph_with_node_prints_answer_and_quote(folder: Path) -> None:
    output = run_example(folder, "graph_with_node", "note.txt", QUESTION)
    assert f"{QUESTION} 48213\n" in output
    assert output.endswith(f'"48213" at {(folder / "note.txt").read_text().index("48213")}\n')


def test_report_over_documents_prints_a_report(folder: Path) -> None:
    for number in range(3):
        statement = STATEMENT.replace("48213", f"4821{number}")
        (folder / f"{number}.txt").write_text(f"{PROSE}{statement} {PROSE}")
    output = run_example(folder, "report_over_documents", QUESTION, "0.txt", "1.txt", "2.txt")
    assert output.startswith(f"# {QUESTION}\n")
    for number in range(3):
        assert f"- **{number}.txt**: 4821{number}" in output
