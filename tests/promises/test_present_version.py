"""A log, checkpoints and exports that the recorded version wrote are read, shown, imported and gone on with."""

from __future__ import annotations

import json
import sqlite3

import pytest
from promises.comparison import differences, normalised
from promises.present_version import LOG, WRITTEN, commands, copy_of, read_log, refused
from promises.scenarios import home, log_lines, run


def recorded(name: str):
    return json.loads((WRITTEN / f"{name}.json").read_text())


@pytest.fixture
def folder(tmp_path):
    return copy_of(tmp_path)


def test_the_log_is_read_as_it_was(folder) -> None:
    assert differences(recorded("log"), read_log(folder / LOG)) == []


def test_the_commands_show_what_they_showed(folder) -> None:
    assert differences(recorded("commands"), commands(folder)) == []


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_its_exports_are_imported_with_all_that_was_in_the_log(kind, folder) -> None:
    other = folder / "other.sqlite"
    assert run("import", WRITTEN / f"runs.{kind}", "--log", other)[0] == 0
    expected, found = (normalised(each, times=True) for each in (recorded("log"), read_log(other)))
    assert differences(expected, found) == []


def test_its_lines_are_what_they_were(folder) -> None:
    before = [*map(json.loads, (WRITTEN / "runs.jsonl").read_text().splitlines())]
    assert differences(normalised(before, times=True), normalised(log_lines(folder / LOG), times=True)) == []


def test_its_checkpoints_are_refused_with_the_remedy_and_nothing_changes(folder) -> None:
    before = read_log(folder / LOG)
    found = refused(folder)
    for error in found["errors"]:
        assert error["type"] == "RunMismatchError"
        assert "earlier version" in error["message"] and "Read the document again" in error["hint"]
    code, told = found["command"]
    assert code == 6 and "earlier version" in told["error"]["message"]
    assert read_log(folder / LOG) == before


def test_a_run_of_the_old_log_can_be_deleted_and_rewarded(folder) -> None:
    with home(folder / "home"):
        assert run("reward", "stopped", 1, "--log", folder / LOG)[0] == 0
        assert run("runs", "edited", "--delete", "--yes", "--log", folder / LOG)[0] == 0
    found = read_log(folder / LOG)
    assert found["order"] == [each for each in recorded("log")["order"] if each != "edited"]
    assert found["runs"]["stopped"]["latest_rewards"] == {"reward": 1.0}


def test_the_files_are_small_and_whole() -> None:
    for path in WRITTEN.glob("*.sqlite"):
        assert path.stat().st_size < 300_000
        with sqlite3.connect(f"file:{path}?immutable=1", uri=True) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
