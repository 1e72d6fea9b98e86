"""The examples of reports run as they are, against a real server."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from support.fake_server import FakeServer
from support.programs import run_program
from support.report_documents import sentences_of
from support.scripts import part

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
WORDS = {"participants": "participants", "effect": "percent", "limits": "limited", "key": "key", "arrive": "arrived"}
"""The word of a question, and that of the sentence which answers it."""


def reply(body: dict[str, Any], number: int) -> str:
    """Note the first sentence that answers; answer with it; copy quotes into sections, and add an invented sentence."""
    prompt = body["messages"][0]["content"]
    if prompt.rstrip().endswith("Headings:"):
        return "Size and effect [1, 2]\nLimits [3]"
    if prompt.rstrip().endswith("Sentences:"):
        quotes = re.findall(r'\[q(\d+)\] .*?: "(.*)"', part(prompt, "quotes"))
        return "\n".join([f"{text} [q{number}]" for number, text in quotes] + ["All of it was proved in 1905. [q1]"])
    if prompt.rstrip().endswith("COMPATIBLE:"):
        return "CONTRADICT"
    memory = part(prompt, "memory").replace("(empty)", "").replace("nothing yet", "").strip()
    if "<section>" not in prompt:
        return f"\\boxed{{{memory or 'not stated'}}}"
    question = part(prompt, "problem").lower()
    answer = next((answer for word, answer in WORDS.items() if word in question), "?")
    sentences = (sentence for sentence in sentences_of(part(prompt, "section")) if answer in sentence)
    return memory or next(sentences, "nothing yet")


def run(server: FakeServer, folder: Path, name: str, *arguments: str) -> str:
    environment = {**os.environ, "OPENAI_BASE_URL": server.base_url, "MEMAGENT_HOME": str(folder / "home")}
    others = {"OPENAI_API_KEY": "none", "MEMAGENT_TOKENIZER": "embedded", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = run_program(command, capture_output=True, cwd=folder, env={**environment, **others})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_are_short() -> None:
    for name in ("literature_analysis", "case_files"):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def test_literature_analysis(tmp_path: Path) -> None:
    prose = "Sleep has been studied for a long time. Much is known and much is not. "
    for name, participants, effect in (("weiss", 41, 12), ("moen", 230, 4)):
        body = (
            f"{prose * 3}The study had {participants} participants from Bergen. {prose}"
            f"Recall rose by {effect} percent. {prose}The result is limited to young adults. {prose}"
        )
        (tmp_path / f"{name}.md").write_text(body)
    with FakeServer(reply) as server:
        out = run(server, tmp_path, "literature_analysis", "Does sleep help memory?", "review", "weiss.md", "moen.md")
    assert "wrote matrix.csv" in out
    assert out.count("not quoted: All of it was proved in 1905.") == 2
    markdown = (tmp_path / "review/report.md").read_text()
    assert "Recall rose by 12 percent." in markdown


def test_case_files(tmp_path: Path) -> None:
    folder = tmp_path / "harbor"
    folder.mkdir()
    prose = "It was a wet night and nobody slept well. "
    (folder / "guard.txt").write_text(prose * 3 + "The van arrived at 22:40 on 3 May 2021. " + prose * 3)
    (folder / "driver.txt").write_text(prose * 3 + "We arrived at the gate on 4 May 2021. " + prose * 3)
    (folder / "cook.txt").write_text(prose * 5)
    with FakeServer(reply) as server:
        out = run(server, tmp_path, "case_files", "harbor", "When did the van arrive?")
    assert "CONTRADICTION: When did the van arrive?" in out
    assert '"The van arrived at 22:40 on 3 May 2021." (characters 126-165)' in out
    assert "cook.txt has no answer to: When did the van arrive?" in out
    assert "2 of 2 quotes are in the files" in out
    assert (folder / "case.html").exists()
