"""Runs from somebody else's log: they get no key, run no code, and are never the latest."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command_line import memagent
from support.fake_server import FakeServer
from support.scripts import document_with

from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.run_log import LoggedRun, RunFilter, RunLog
from memagent_graph.storage.paths import default_run_log

TEXT = document_with({0.5: "The key of harbor is 4711."}, words=600)
QUESTION = "What is the key of harbor?"
SMALL = ("--tokenizer", "embedded", "--context-window", "900", "--question-tokens", "50", "--memory-tokens", "60",
         "--chunk-tokens", "100", "--answer-tokens", "60")  # fmt: skip
KEY = "sk-real"


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def stranger() -> Iterator[FakeServer]:
    with FakeServer(window=900) as server:
        yield server


def stopped_run(book: Path, server: FakeServer, *options: object) -> None:
    """Read two chunks, as the run r."""
    url = ("--base-url", server.base_url)
    memagent("read", book, "-q", QUESTION, *SMALL, *url, "--max-chunks", "2", "--run-id", "r", *options, code=5)
    server.headers.clear()


def keys_sent(server: FakeServer) -> set[str]:
    return {headers.get("Authorization", "") for headers in server.headers}


def change_log(statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(default_run_log())) as connection:
        connection.execute(statement, values)
        connection.commit()


def import_run(run_id: str, **changes: Any) -> None:
    """Add a run to the log as an import does."""
    with closing(RunLog(default_run_log())) as log:
        log.add(LoggedRun(replace(log.get("r"), run_id=run_id, **changes)))


def test_a_server_that_only_the_log_names_gets_no_key(book, stranger, monkeypatch) -> None:
    stopped_run(book, stranger)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for own_url in ("", "http://127.0.0.1:9/v1"):
        monkeypatch.setenv("OPENAI_BASE_URL", own_url)
        memagent("resume", "r", "--max-chunks", "1", code=ExitCode.STOPPED)
    assert stranger.headers and keys_sent(stranger) == {"Bearer none"}
    told = memagent("resume", "r", "--api-key", KEY, code=ExitCode.RUN).stderr
    assert f"If it is your server, pass --base-url {stranger.base_url}" in told


@pytest.mark.parametrize("named_by", ["option", "environment"])
def test_a_server_that_the_caller_names_gets_the_key(book, stranger, monkeypatch, named_by) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    stopped_run(book, stranger)
    if named_by == "environment":
        monkeypatch.setenv("OPENAI_BASE_URL", stranger.base_url)
    memagent("resume", "r", *(["--base-url", stranger.base_url] if named_by == "option" else []))
    assert keys_sent(stranger) == {f"Bearer {KEY}"}


def test_the_command_that_continues_names_the_server_where_there_is_a_key(book, stranger, monkeypatch) -> None:
    command = ("read", book, "-q", QUESTION, *SMALL, "--base-url", stranger.base_url, "--max-chunks", "1")
    assert "--base-url" not in memagent(*command, code=ExitCode.STOPPED).stderr
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert f"--base-url {stranger.base_url}" in memagent(*command, code=ExitCode.STOPPED).stderr


def test_a_key_that_is_missing_for_that_reason_is_explained(book, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeServer(window=900, key=KEY) as server:
        stopped_run(book, server)
        told = memagent("resume", "r", code=ExitCode.POLICY).stderr
        assert f"pass --base-url {server.base_url}" in told
        memagent("resume", "r", "--base-url", server.base_url)


def test_an_imported_run_asks_for_the_server_before_anything_is_sent(book, stranger, monkeypatch) -> None:
    stopped_run(book, stranger)
    import_run("imported")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    told = memagent("resume", "imported", code=ExitCode.RUN).stderr
    assert "was imported" in told and "--base-url" in told and not stranger.headers
    memagent("resume", "imported", "--base-url", stranger.base_url, code=ExitCode.RUN)  # it has no checkpoints here


def test_the_latest_run_is_one_of_this_machine(book, stranger) -> None:
    stopped_run(book, stranger)
    import_run("from 2096", began=4e9)
    assert "run r" in memagent("resume", "latest").stderr
    with closing(RunLog(default_run_log())) as log:
        assert [run.run_id for run in log.runs(RunFilter(is_own=False))] == ["from 2096"]
    stranger_again = ("--base-url", stranger.base_url, "--run-id", "from 2096")
    memagent("read", book, "-q", QUESTION, *SMALL, *stranger_again)
    with closing(RunLog(default_run_log())) as log:
        assert not list(log.runs(RunFilter(is_own=False))), "it was read here, in place of the imported one"


@pytest.mark.parametrize("strategy", ["evil:Nice", "evil:Nice:x=1", "./evil.py:Nice"])
def test_a_strategy_that_only_the_log_names_runs_no_code(book, stranger, strategy) -> None:
    stopped_run(book, stranger)
    (book.parent / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\nclass Nice: pass\n")
    change_log("UPDATE runs SET settings = json_set(settings, '$.strategy', ?)", strategy)
    told = memagent("resume", "r", code=ExitCode.USAGE).stderr
    assert "runs only where you name it yourself" in told and f"--strategy {strategy}" in told
    assert not (book.parent / "ran").exists() and not stranger.headers
