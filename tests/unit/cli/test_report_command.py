"""`memagent report` as a user meets it: real processes, a real server, files, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import invoke
from support.fake_server import FakeServer
from support.report_documents import reads_keys_and_writes
from support.scripts import document_with

SMALL = ["--tokenizer", "embedded", "--context-window", "1500", "--question-tokens", "60", "--memory-tokens", "60",
         "--chunk-tokens", "100", "--answer-tokens", "200"]  # fmt: skip
QUESTION = "What is the key of harbor?"


def reply(body: dict[str, Any], number: int) -> str:
    prompt = body["messages"][0]["content"]
    return "CONTRADICT" if "COMPATIBLE" in prompt else reads_keys_and_writes(prompt)


@pytest.fixture
def books(tmp_path: Path) -> list[Path]:
    paths = []
    for name, key in (("a", "4711"), ("b", "12")):
        paths.append(tmp_path / f"{name}.txt")
        sentence = f"It rained. The key of harbor is {key}. Nobody came."
        paths[-1].write_text(document_with({0.4: sentence}, words=300).replace("word", f"{name}word"))
    return paths


def test_the_report_is_markdown_on_standard_output(books: list[Path]) -> None:
    with FakeServer(reply) as server:
        options = ["--base-url", server.base_url, *SMALL, "-q", QUESTION]
        done = invoke("report", "Keys?", *books, *options)
        asked = len(server.requests)
        again = invoke("report", "Keys?", *books, *options)
        assert len(server.requests) == asked
    assert done.exit_code == 0
    assert done.stdout == again.stdout
    assert done.stdout.startswith("# Keys?\n")
    assert "The key of harbor is 4711." in done.stdout
    assert "**[not quoted: " in done.stdout
    assert "2 of 2 quotes found in the documents" in done.stderr


def test_files_are_written_to_a_folder(books: list[Path], tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text(QUESTION + "\n")
    formats = ["md", "html", "csv"]
    with FakeServer(reply) as server:
        done = invoke(
            "report", "Keys?", *books, "--base-url", server.base_url, *SMALL, "-q", f"@{tmp_path / 'questions.txt'}",
            "--out", tmp_path / "out", "--extractive", "--judge", "--json",
            *(word for name in formats for word in ("--format", name)),
        )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["totals"]["quoted"] == 2
    assert values["mode"] == "extractive"
    assert values["contradictions"] == [{"question": 0, "groups": [[0], [1]]}]
    assert {Path(path).name for path in values["files"]} == {
        "report.json", "report.md", "report.html", "matrix.csv"
    }  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "out/matrix.csv").read_text("utf-8-sig").splitlines()))
    assert [(row["document"], row["answer"]) for row in rows] == [("a.txt", "4711"), ("b.txt", "12")]
    assert str(tmp_path) not in (tmp_path / "out/report.html").read_text()


def test_what_cannot_be_is_refused_with_a_remedy(books: list[Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/report.md").write_text("mine")
    with FakeServer(reply) as server:
        options = ["--base-url", server.base_url, *SMALL, "-q", QUESTION, "--extractive"]
        for arguments, code, words in (
            ([tmp_path / "missing.txt"], 3, "does not exist"),
            ([*books, "--out", tmp_path / "out"], 6, "does not belong to this report"),
            ([*books, "--max-chunks", "1"], 5, "0 of 2 cells"),
        ):
            done = invoke("report", "Keys?", *arguments, *options)
            assert (done.exit_code, words in " ".join(done.stderr.split())) == (code, True), done.stderr
    assert (tmp_path / "out/report.md").read_text() == "mine"


def test_a_policy_with_its_own_prompts_gives_an_extractive_report_and_says_so(tmp_path: Path) -> None:
    prose = "It rained all day, and the river rose a little. " * 20
    for name, code in (("a", 48210), ("b", 48211)):
        fact = f"The access code of the quiet falcon is {code}. "
        (tmp_path / f"{name}.txt").write_text(prose + fact + prose)
    question = "What is the access code of the quiet falcon?"
    done = invoke("report", question, tmp_path / "a.txt", tmp_path / "b.txt", "--model", "embedded")
    assert done.exit_code == 0
    assert "- a.txt: 48210 [1]" in done.stdout
    assert "- b.txt: 48211 [2]" in done.stdout
    assert "extractive: the policy has no prompt for report_outline, report_section" in " ".join(done.stderr.split())
