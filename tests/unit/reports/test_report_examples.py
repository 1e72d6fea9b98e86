"""The example programs for reports run unchanged against a fake policy server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from support.fake_server import FakeServer
from support.programs import run_program
from support.report_documents import write_report

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def reply_to_request(body: dict[str, Any], number: int) -> str:
    return write_report(body["messages"][0]["content"])


def run_example(server: FakeServer, folder: Path, name: str, *arguments: str) -> str:
    environment = {**os.environ, "OPENAI_BASE_URL": server.base_url, "MEMAGENT_HOME": str(folder / "home")}
    environment |= {"OPENAI_API_KEY": "none", "MEMAGENT_TOKENIZER": "embedded", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    process = run_program(command, capture_output=True, cwd=folder, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_literature_analysis_writes_a_matrix_and_marks_unsupported_sentences(tmp_path: Path) -> None:
    prose = "Sleep has been studied for a long time. Much is known and much is not. "
    for name, participants, effect in (("weiss", 41, 12), ("moen", 230, 4)):
        body = (
            f"{prose * 3}Together they have {participants} participants from Bergen. {prose}"
            f"The numbers rose by {effect} percent. {prose}The authors limit the result to young adults. {prose}"
        )
        (tmp_path / f"{name}.md").write_text(body)
    with FakeServer(reply_to_request) as server:
        arguments = ("Does sleep help memory?", "review", "weiss.md", "moen.md")
        stdout = run_example(server, tmp_path, "literature_analysis", *arguments)
    assert "wrote matrix.csv" in stdout
    assert stdout.count("not quoted: In 1812 all of this was decided by Goethe") == 3
    assert "The numbers rose by 12 percent." in (tmp_path / "review/report.md").read_text()


def test_case_files_prints_contradictions_with_quotes(tmp_path: Path) -> None:
    folder = tmp_path / "harbor"
    folder.mkdir()
    prose = "It was a wet night and nobody slept well. "
    (folder / "guard.txt").write_text(prose * 3 + "We saw it arrive at 22:40 on 3 May 2021. " + prose * 3)
    (folder / "driver.txt").write_text(prose * 3 + "He let it arrive at the gate on 4 May 2021. " + prose * 3)
    (folder / "cook.txt").write_text(prose * 5)
    with FakeServer(reply_to_request) as server:
        stdout = run_example(server, tmp_path, "case_files", "harbor", "When did the van arrive?")
    assert "CONTRADICTION: When did the van arrive?" in stdout
    assert '"We saw it arrive at 22:40 on 3 May 2021." (characters 126-166)' in stdout
    assert "cook.txt has no answer to: When did the van arrive?" in stdout
    assert "2 of 2 quotes are in the files" in stdout
    assert (folder / "case.html").exists()
