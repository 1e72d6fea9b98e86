"""Runs from untrusted logs: their servers are sent no key, they run no code, and are never the latest run."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from support.command_line import memagent
from support.fake_server import FakeServer

from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.run_log import LoggedRun, RunFilter, RunLog
from memagent_graph.storage.private_files import get_default_run_log_path

KEY = "sk-real"


@pytest.fixture
def stop_run(read_book, server) -> Callable[..., None]:
    """A function that reads two chunks, as the run r, and clears the recorded headers."""

    def read_two_chunks(*options: object) -> None:
        read_book("--max-chunks", "2", "--run-id", "r", *options, code=ExitCode.STOPPED)
        server.headers.clear()

    return read_two_chunks


@pytest.fixture
def configured_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def get_sent_keys(server: FakeServer) -> set[str]:
    return {headers.get("Authorization", "") for headers in server.headers}


def import_run(run_id: str, **changes: Any) -> None:
    """Add a run to the log as an import does."""
    with closing(RunLog(get_default_run_log_path())) as log:
        log.add(LoggedRun(replace(log.get("r"), run_id=run_id, **changes)))


def test_a_server_that_only_the_log_names_is_sent_no_key(stop_run, server, monkeypatch) -> None:
    stop_run()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for configured_url in ("", "http://127.0.0.1:9/v1"):
        monkeypatch.setenv("OPENAI_BASE_URL", configured_url)
        memagent("resume", "r", "--max-chunks", "1", code=ExitCode.STOPPED)
    assert server.headers and get_sent_keys(server) == {"Bearer none"}
    error_text = memagent("resume", "r", "--api-key", KEY, code=ExitCode.RUN).stderr
    assert f"If it is your server, pass --base-url {server.base_url}" in error_text


@pytest.mark.usefixtures("configured_key")
@pytest.mark.parametrize("named_by", ["option", "environment"])
def test_a_server_that_the_user_names_is_sent_the_key(stop_run, server, monkeypatch, named_by) -> None:
    stop_run()
    if named_by == "environment":
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    memagent("resume", "r", *(["--base-url", server.base_url] if named_by == "option" else []))
    assert get_sent_keys(server) == {f"Bearer {KEY}"}


def test_the_resume_command_names_the_server_if_there_is_a_key(read_book, server, monkeypatch) -> None:
    assert "--base-url" not in read_book("--max-chunks", "1", code=ExitCode.STOPPED).stderr
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert f"--base-url {server.base_url}" in read_book("--max-chunks", "1", code=ExitCode.STOPPED).stderr


@pytest.mark.usefixtures("configured_key")
def test_the_authentication_error_says_why_no_key_was_sent(stop_run, server) -> None:
    server.authorization = f"Bearer {KEY}"
    stop_run()
    assert f"pass --base-url {server.base_url}" in memagent("resume", "r", code=ExitCode.POLICY).stderr
    memagent("resume", "r", "--base-url", server.base_url)


@pytest.mark.usefixtures("configured_key")
def test_resuming_an_imported_run_needs_the_name_of_its_server(stop_run, server) -> None:
    stop_run()
    import_run("imported")
    error_text = memagent("resume", "imported", code=ExitCode.RUN).stderr
    assert "was imported" in error_text and "--base-url" in error_text and not server.headers
    memagent("resume", "imported", "--base-url", server.base_url, code=ExitCode.RUN)  # the run has no checkpoints here


def test_an_imported_run_is_never_the_latest(stop_run, read_book) -> None:
    stop_run()
    import_run("from 2096", began=4e9)
    assert "run r" in memagent("resume", "latest").stderr
    with closing(RunLog(get_default_run_log_path())) as log:
        assert [run.run_id for run in log.runs(RunFilter(is_own=False))] == ["from 2096"]
        read_book("--run-id", "from 2096")
        assert not list(log.runs(RunFilter(is_own=False))), "the run read here replaces the imported one"


@pytest.mark.parametrize("strategy", ["evil:Nice", "evil:Nice:x=1", "./evil.py:Nice"])
def test_a_strategy_that_only_the_log_names_runs_no_code(stop_run, server, tmp_path, monkeypatch, strategy) -> None:
    monkeypatch.chdir(tmp_path)
    stop_run()
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\nclass Nice: pass\n")
    with closing(sqlite3.connect(get_default_run_log_path())) as connection:
        connection.execute("UPDATE runs SET settings = json_set(settings, '$.strategy', ?)", [strategy])
        connection.commit()
    error_text = memagent("resume", "r", code=ExitCode.USAGE).stderr
    assert "runs only if you name it yourself" in error_text and f"--strategy {strategy}" in error_text
    assert not (tmp_path / "ran").exists() and not server.headers
