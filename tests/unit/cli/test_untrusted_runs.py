"""Runs from somebody else's log: they get no key, run no code, and are never the latest."""

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
from memagent_graph.storage.private_files import get_default_run_log

KEY = "sk-real"


@pytest.fixture
def stop_run(read, server) -> Callable[..., None]:
    """Read two chunks, as the run r."""

    def stop_run(*more: object) -> None:
        read("--max-chunks", "2", "--run-id", "r", *more, code=ExitCode.STOPPED)
        server.headers.clear()

    return stop_run


@pytest.fixture
def has_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def keys_sent(server: FakeServer) -> set[str]:
    return {headers.get("Authorization", "") for headers in server.headers}


def import_run(run_id: str, **changes: Any) -> None:
    """Add a run to the log as an import does."""
    with closing(RunLog(get_default_run_log())) as log:
        log.add(LoggedRun(replace(log.get("r"), run_id=run_id, **changes)))


def test_a_server_that_only_the_log_names_gets_no_key(stop_run, server, monkeypatch) -> None:
    stop_run()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for own_url in ("", "http://127.0.0.1:9/v1"):
        monkeypatch.setenv("OPENAI_BASE_URL", own_url)
        memagent("resume", "r", "--max-chunks", "1", code=ExitCode.STOPPED)
    assert server.headers and keys_sent(server) == {"Bearer none"}
    refusal = memagent("resume", "r", "--api-key", KEY, code=ExitCode.RUN).stderr
    assert f"If it is your server, pass --base-url {server.base_url}" in refusal


@pytest.mark.usefixtures("has_key")
@pytest.mark.parametrize("named_by", ["option", "environment"])
def test_a_server_that_the_caller_names_gets_the_key(stop_run, server, monkeypatch, named_by) -> None:
    stop_run()
    if named_by == "environment":
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    memagent("resume", "r", *(["--base-url", server.base_url] if named_by == "option" else []))
    assert keys_sent(server) == {f"Bearer {KEY}"}


def test_the_command_that_continues_names_the_server_where_there_is_a_key(read, server, monkeypatch) -> None:
    assert "--base-url" not in read("--max-chunks", "1", code=ExitCode.STOPPED).stderr
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert f"--base-url {server.base_url}" in read("--max-chunks", "1", code=ExitCode.STOPPED).stderr


@pytest.mark.usefixtures("has_key")
def test_a_key_that_is_missing_for_that_reason_is_explained(stop_run, server) -> None:
    server.authorization = f"Bearer {KEY}"
    stop_run()
    assert f"pass --base-url {server.base_url}" in memagent("resume", "r", code=ExitCode.POLICY).stderr
    memagent("resume", "r", "--base-url", server.base_url)


@pytest.mark.usefixtures("has_key")
def test_an_imported_run_asks_for_the_server_before_anything_is_sent(stop_run, server) -> None:
    stop_run()
    import_run("imported")
    refusal = memagent("resume", "imported", code=ExitCode.RUN).stderr
    assert "was imported" in refusal and "--base-url" in refusal and not server.headers
    memagent("resume", "imported", "--base-url", server.base_url, code=ExitCode.RUN)  # it has no checkpoints here


def test_the_latest_run_is_one_of_this_machine(stop_run, read) -> None:
    stop_run()
    import_run("from 2096", began=4e9)
    assert "run r" in memagent("resume", "latest").stderr
    with closing(RunLog(get_default_run_log())) as log:
        assert [run.run_id for run in log.runs(RunFilter(is_own=False))] == ["from 2096"]
        read("--run-id", "from 2096")
        assert not list(log.runs(RunFilter(is_own=False))), "it was read here, in place of the imported one"


@pytest.mark.parametrize("strategy", ["evil:Nice", "evil:Nice:x=1", "./evil.py:Nice"])
def test_a_strategy_that_only_the_log_names_runs_no_code(stop_run, server, tmp_path, monkeypatch, strategy) -> None:
    monkeypatch.chdir(tmp_path)
    stop_run()
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\nclass Nice: pass\n")
    with closing(sqlite3.connect(get_default_run_log())) as connection:
        connection.execute("UPDATE runs SET settings = json_set(settings, '$.strategy', ?)", [strategy])
        connection.commit()
    refusal = memagent("resume", "r", code=ExitCode.USAGE).stderr
    assert "runs only if you name it yourself" in refusal and f"--strategy {strategy}" in refusal
    assert not (tmp_path / "ran").exists() and not server.headers
