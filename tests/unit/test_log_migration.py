"""A log of the former version: read without being changed, brought to this version when it is first written to."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from support.programs import Program

from memagent_graph import RunLog
from memagent_graph.errors import RunLogError
from memagent_graph.run_log import migration

WRITTEN = Path(__file__).parents[1] / "promises" / "present_version" / "runs.sqlite"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(WRITTEN, tmp_path / "runs.sqlite"))


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return found


def content(path: Path) -> list[object]:
    log = RunLog(path)
    found = [
        (record, list(log.conversations(record.run_id, superseded=True)), log.events(record.run_id),
         log.rewards(record.run_id), log.templates(record.run_id), log.trace(record.run_id))
        for record in log.runs()
    ]  # fmt: skip
    log.close()
    return found


def test_reading_changes_nothing(path) -> None:
    before = path.read_bytes()
    assert content(path)
    assert version(path) == 2
    assert path.read_bytes()[100:] == before[100:]  # behind the header, which names the journal's kind
    assert not list(path.parent.glob("*.v2"))


def test_the_first_entry_migrates_it_with_a_copy_beside_it_and_nothing_is_lost(path) -> None:
    before = content(path)
    log = RunLog(path)
    newest = next(iter(log.runs())).run_id
    log.reward(newest, 1.0, name="new")
    log.close()
    assert version(path) == 3
    copy = path.with_name("runs.sqlite.v2")
    assert version(copy) == 2 and content(copy) == before
    after = content(path)
    for (record, conversations, events, rewards, templates, trace), now in zip(before, after, strict=True):
        assert now[0] == record and now[1] == conversations and now[2] == events and now[4] == templates
        assert now[5] == trace
        assert [each for each in now[3] if each.name != "new"] == rewards
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert not connection.execute("PRAGMA foreign_key_check").fetchall()


def test_a_process_of_the_former_version_that_still_writes_fails_loudly(path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as old:
        old.execute("SELECT count(*) FROM conversations").fetchone()
        RunLog(path).thumbs(next(iter(RunLog(path).runs())).run_id, True)
        with pytest.raises(sqlite3.OperationalError, match="kind"):
            old.execute("INSERT INTO conversations (run_id, position, kind, step) VALUES ('x', 0, 'update', 's')")
        with pytest.raises(sqlite3.OperationalError, match="question"):
            old.execute("INSERT INTO runs (run_id, began, question, document, settings) VALUES ('x', 1, '', '', '')")


WRITE = """
import sys
from memagent_graph import RunLog
log = RunLog(sys.argv[1])
print("ready", flush=True)
log.reward(sys.argv[2], 1.0, name=sys.argv[3])
print("done", flush=True)
"""


def writer(path: Path, run_id: str, name: str) -> Program:
    command = [sys.executable, "-c", WRITE, str(path), run_id, name]
    return Program(command, stdout=subprocess.PIPE)


def test_several_processes_at_the_door_migrate_it_once(path) -> None:
    run_id = next(iter(RunLog(path).runs())).run_id
    processes = [writer(path, run_id, f"w{number}") for number in range(4)]
    assert [process.communicate()[0].split() for process in processes] == [["ready", "done"]] * 4
    assert {f"w{number}" for number in range(4)} <= set(RunLog(path).latest_rewards(run_id))
    assert len(list(path.parent.glob("*.v2"))) == 1


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.005, 0.01, 0.02])
def test_killed_on_the_way_it_is_the_old_log_or_the_new_one(path, delay) -> None:
    before = content(path)
    run_id = next(iter(RunLog(path).runs())).run_id
    with writer(path, run_id, "mine") as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
    assert version(path) in {2, 3}
    assert [each[1] for each in content(path)] == [each[1] for each in before]
    RunLog(path).reward(run_id, 2.0, name="after")
    assert version(path) == 3 and RunLog(path).latest_rewards(run_id)["after"] == 2.0


def test_a_log_that_cannot_be_copied_is_left_as_it_was(path, monkeypatch) -> None:
    def full(path: Path, version: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(migration, "back_up", full)
    with pytest.raises(RunLogError, match="No space left"):
        RunLog(path).reward(next(iter(RunLog(path).runs())).run_id, 1.0)
    assert version(path) == 2


def test_a_log_that_another_process_keeps_locked_says_so(path, monkeypatch) -> None:
    monkeypatch.setattr("memagent_graph.run_log.writer.connect", lambda path: sqlite3.connect(path, timeout=0.1))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RunLogError, match=r"Another program uses it"):
            RunLog(path).reward(next(iter(RunLog(path).runs())).run_id, 1.0)
    assert version(path) == 2
