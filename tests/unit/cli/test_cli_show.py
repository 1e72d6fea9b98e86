"""`memagent show`, and runs that were logged by `memagent read`, as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import invoke
from support.fake_server import FakeServer
from support.programs import answers
from support.scripts import document_with
from test_cli import QUESTION, SMALL

from memagent_graph import RunLog

TEXT = document_with({0.3: "The key of harbor is 4711."}, words=600)


@pytest.fixture
def runs(tmp_path: Path, own_home: Path) -> list[str]:
    """Two logged runs: one that was answered, and one that was stopped."""
    book = tmp_path / "book.txt"
    book.write_text(TEXT)
    with FakeServer() as server:
        common = ["read", book, "-q", QUESTION, "--base-url", server.base_url, *SMALL, "--json"]
        first = json.loads(invoke(*common, "--run-id", "first").stdout)
        second = json.loads(invoke(*common, "--run-id", "second", "--max-chunks", 3).stdout)
    return [first["run_id"], second["run_id"]]


def test_a_run_is_shown_with_its_sources(runs) -> None:
    done = invoke("show", "first")
    assert done.exit_code == 0
    assert QUESTION in done.stdout
    assert "harbor 4711" in done.stdout
    assert "“" in done.stdout  # a quote of the document
    newest = invoke("show")
    assert "second" in newest.stdout
    assert "max_chunks" in newest.stdout


def test_one_chunk_is_shown_in_full(runs) -> None:
    done = invoke("show", "first", "--chunk", 1)
    assert "word0 and then" in done.stdout
    wrong = invoke("show", "first", "--chunk", 999)
    assert wrong.exit_code == 6
    assert "has not read chunk 999" in wrong.stderr


def test_a_run_as_json_has_the_memory_after_every_chunk_and_its_evidence(runs) -> None:
    shown = json.loads(invoke("show", "first", "--json").stdout)
    assert shown["answer"] == "4711"
    assert shown["updates"][-1]["memory"] == shown["memory"]
    quotes = [item["quote"] for item in shown["evidence"]]
    assert any("4711" in quote for quote in quotes)
    for item in shown["evidence"]:
        assert TEXT[item["start_char"] : item["end_char"]] == item["quote"]


def test_a_page_is_written(runs, tmp_path) -> None:
    done = invoke("show", "first", "--html", tmp_path / "run.html")
    assert done.exit_code == 0
    page = (tmp_path / "run.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http://" not in page.replace("http://www.w3.org", "")
    refused = invoke("show", "first", "--html", tmp_path / "nowhere" / "run.html")
    assert refused.exit_code == 6
    assert "cannot be written" in refused.stderr


def test_a_page_does_not_take_the_place_of_another_file(runs, tmp_path) -> None:
    notes = tmp_path / "notes.html"
    notes.write_text("my notes")
    refused = invoke("show", "first", "--html", notes)
    assert refused.exit_code == 6
    assert "not a page of this command's" in refused.stderr
    assert "--force" in refused.stderr
    assert notes.read_text() == "my notes"
    assert invoke("show", "first", "--html", notes, "--force").exit_code == 0
    assert notes.read_text().startswith("<!doctype html>")


def test_texts_of_chunks_are_found_beside_the_log(tmp_path, make_reader) -> None:
    """As an evaluation keeps them: FOLDER/runs.sqlite and FOLDER/documents."""
    folder = tmp_path / "folder"
    reader = make_reader(store=folder / "documents", run_log=folder / "runs.sqlite")
    run_id = reader.read(TEXT, QUESTION).run_id
    reader.close()
    assert "word0 and then" in invoke("show", run_id, "--log", folder / "runs.sqlite", "--chunk", 1).stdout
    (folder / "documents").rename(tmp_path / "elsewhere")
    shown = invoke("show", run_id, "--log", folder / "runs.sqlite", "--chunk", 1)
    assert shown.exit_code == 0
    assert "word0 and then" not in shown.stdout


def test_a_read_without_a_log_leaves_none(tmp_path, own_home) -> None:
    book = tmp_path / "book.txt"
    book.write_text(TEXT)
    with FakeServer() as server:
        done = invoke("read", book, "-q", QUESTION, "--base-url", server.base_url, *SMALL, "--no-log")
        assert not any(own_home.rglob("*")), "neither a log, nor the document, nor checkpoints"
        named = invoke(
            "read", book, "-q", QUESTION, "--base-url", server.base_url, *SMALL, "--log", tmp_path / "own.sqlite"
        )
    assert answers(done.stdout) == answers(named.stdout) == ["4711"]
    assert len(list(RunLog(tmp_path / "own.sqlite").runs())) == 1
