"""`memagent report` with a fake server: its output, its files, and invalid arguments."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from support.command_line import memagent
from support.report_documents import read_keys_and_write_report
from support.scripts import make_document

WIDE_BUDGET = ("--context-window", "1500", "--question-tokens", "60", "--answer-tokens", "200")


@pytest.fixture
def books(tmp_path: Path) -> list[Path]:
    paths = []
    for name, key in (("a", "4711"), ("b", "12")):
        paths.append(tmp_path / f"{name}.txt")
        sentence = f"It rained. The key of harbor is {key}. Nobody came."
        paths[-1].write_text(make_document({0.4: sentence}, words=300).replace("word", f"{name}word"))
    return paths


@pytest.fixture
def report(server, options) -> Callable[..., Result]:
    """A function that runs `memagent report` with documents and extra options."""
    server.respond = lambda body, number: read_keys_and_write_report(body["messages"][0]["content"])
    return lambda *extra_arguments, code=0: memagent(
        "report", "Keys?", "-q", "What is the key of harbor?", *options, *WIDE_BUDGET, *extra_arguments, code=code
    )


def test_the_report_is_markdown_on_standard_output(books, report, server) -> None:
    result = report(*books)
    request_count = len(server.requests)
    assert report(*books).stdout == result.stdout
    assert len(server.requests) == request_count
    assert result.stdout.startswith("# Keys?\n")
    assert "The key of harbor is 4711." in result.stdout
    assert "**[not quoted: " in result.stdout
    assert "2 of 2 quotes found in the documents" in result.stderr


def test_files_are_written_to_a_folder(books, report, tmp_path) -> None:
    (tmp_path / "questions.txt").write_text("Where is the key of tower?\n")
    formats = ("--format", "md", "--format", "html", "--format", "csv")
    report_options = ("-q", f"@{tmp_path / 'questions.txt'}", "--extractive", "--judge", "--json", *formats)
    values = json.loads(report(*books, "--out", tmp_path / "out", *report_options).stdout)
    assert values["totals"]["quoted"] == 2
    assert values["mode"] == "extractive"
    assert values["contradictions"] == [{"question": 0, "groups": [[0], [1]]}]
    assert {Path(path).name for path in values["files"]} == {"report.json", "report.md", "report.html", "matrix.csv"}
    rows = list(csv.DictReader((tmp_path / "out/matrix.csv").read_text("utf-8-sig").splitlines()))
    assert [(row["document"], row["answer"]) for row in rows if "harbor" in row["question"]] == [
        ("a.txt", "4711"),
        ("b.txt", "12"),
    ]
    assert str(tmp_path) not in (tmp_path / "out/report.html").read_text()


def test_invalid_arguments_and_a_limit_without_answers_end_with_their_codes(books, report, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/report.md").write_text("mine")
    for arguments, code, message in (
        ([tmp_path / "missing.txt"], 3, "does not exist"),
        ([*books, "--out", tmp_path / "out"], 6, "does not belong to this report"),
        ([*books, "--max-chunks", "1"], 5, "0 of 2 cells"),
        ([*books, "--format", "html"], 2, "add --out FOLDER"),
    ):
        assert message in " ".join(report("--extractive", *arguments, code=code).stderr.split())
    assert (tmp_path / "out/report.md").read_text() == "mine"


def test_a_policy_without_report_prompts_gives_an_extractive_report(books, report) -> None:
    result = report(*books, "--profile", "embedded")
    assert "- a.txt: 4711 [1]" in result.stdout
    assert "- b.txt: 12 [2]" in result.stdout
    assert "extractive: the policy has no prompt for report_outline, report_section" in " ".join(result.stderr.split())
