"""The commands `memagent runs`, `reward`, `export` and `import`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_line import memagent
from support.conversations import DOCUMENT, write_run
from support.programs import Program

from memagent_graph.cli.run_choice import parse_time
from memagent_graph.cli.runs import _make_table
from memagent_graph.run_log import RunLog, RunTotals
from memagent_graph.storage.file_locks import lease
from memagent_graph.storage.private_files import get_default_checkpoints_path, get_default_run_log_path


@pytest.fixture
def log():
    log = RunLog(get_default_run_log_path())
    yield log
    log.close()


# memagent runs


def test_runs_are_listed_newest_first_with_their_totals(log) -> None:
    tokens = {"prompt_tokens": 1000, "completion_tokens": 20}
    write_run(log, "old", logprobs=None, **tokens)
    write_run(log, "new", 3, stop_reason=None, **tokens)
    log.reward("old", 1.0, name="exact")
    result = memagent("runs")
    new_line, old_line = result.stdout.splitlines()[1:3]
    assert new_line.split()[0] == "new"
    assert old_line.split()[0] == "old"
    for text in ("Who is new?", "book.txt", "3,000", "60", "yes", "not yet"):
        assert text in new_line
    for text in ("Who is old?", "2,000", "40", " no ", "answered", "exact 1"):
        assert text in old_line
    assert "2 of 2 runs with 5 conversations" in result.stdout
    assert str(log.path) in result.stdout


def test_strategies_are_listed_if_one_is_not_the_default(log) -> None:
    write_run(log, "a")
    assert "strategy" not in memagent("runs").stdout
    log.wait(log.begin("b", "Who?", DOCUMENT, {}, "map_reduce", "f1"))
    header, newest_line, oldest_line = memagent("runs").stdout.splitlines()[:3]
    assert "strategy" in header and "map_reduce" in newest_line and "overwrite" in oldest_line
    runs = json.loads(memagent("runs", "--json").stdout)["runs"]
    assert [run["strategy"] for run in runs] == ["map_reduce", "overwrite"]
    assert [run["strategy_fingerprint"] for run in runs] == ["f1", ""]


def test_twenty_runs_are_listed_by_default(log) -> None:
    for number in range(22):
        write_run(log, f"run{number}", count=0)
    assert memagent("runs").stdout.count("Who is") == 20
    assert memagent("runs", "--newest", 3).stdout.count("Who is") == 3
    assert len(json.loads(memagent("runs", "--json").stdout)["runs"]) == 22


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--question", "WHO WAS é"], ["b"]),
        (["--unfinished"], ["c"]),
        (["--since", "1h"], ["c", "b", "a"]),
        (["--until", "2199-01-01T00:00:00+00:00", "--newest", "1"], ["c"]),
        (["a", "c"], ["c", "a"]),
    ],
)
def test_runs_can_be_filtered(log, options, expected) -> None:
    write_run(log, "a")
    write_run(log, "b", stop_reason="max_chunks", policy="Qwen3-4B", question="Who was É?")
    write_run(log, "c", stop_reason=None, name="Tale.pdf")
    log.reward("a", 1.0, name="exact")
    values = json.loads(memagent("runs", *options, "--json").stdout)
    assert [run["run_id"] for run in values["runs"]] == expected


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("12h", 43200), ("7d", 604800), (" 2W ", 1209600), ("1.5h", 5400)]
)
def test_an_age_is_a_time_before_now(text, seconds) -> None:
    assert parse_time(text) == pytest.approx(time.time() - seconds, abs=5)


def test_dates_are_local_unless_they_name_a_zone() -> None:
    assert parse_time("2026-11-21T12:00:00+00:00") == 1795262400
    assert parse_time("2026-11-21") == time.mktime((2026, 11, 21, 0, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    "options",
    [
        ["--since", "yesterday"],
        ["--newest", "0"],
        ["--unfinished", "--stop-reason", "answered"],
        ["--until", "9" * 400 + "-01-01"],
    ],
)
def test_invalid_filters_are_usage_errors(log, options) -> None:
    assert memagent("runs", *options, code=2).stdout == ""


def test_control_characters_of_texts_are_not_printed(log) -> None:
    write_run(log, "a", question="[red]one[/]\ntwo\x1b]0;title\x07 \u202eevil \x9b31m", name="[/]\x1b[2J.txt")
    log.reward("a", 1.0, name="\x1b[5m[bold]")
    output = memagent("runs").stdout
    assert not any(character in output for character in "\x1b\x07\x9b\u202e")
    assert "[red]one[/] two" in output
    assert "[/] [2J.txt" in output
    log.close()
    memagent("runs", "a\x1b[5m", code=6)


# Deleting


def test_deleting_runs_reports_the_bytes_freed(log) -> None:
    for run_id in ("a", "b", "c"):
        write_run(log, run_id, text=os.urandom(50_000).hex())
    result = memagent("runs", "a", "b", "--delete", "--yes")
    assert "2 runs deleted" in result.stderr
    assert "kB freed" in result.stderr
    assert [run.run_id for run in log.runs()] == ["c"]
    values = json.loads(memagent("runs", "--question", "who is c", "--delete", "--yes", "--json").stdout)
    assert values["deleted"] == 1
    assert values["bytes_freed"] > 50_000


def test_deleting_needs_yes_without_a_terminal_and_known_run_ids(log) -> None:
    write_run(log, "a")
    assert "--yes" in memagent("runs", "--delete", code=2).stderr
    assert "'nope'" in memagent("runs", "a", "nope", "--delete", "--yes", code=6).stderr
    assert log.counts() == (1, 2)


@pytest.mark.parametrize(("key", "run_count", "code"), [("n", 1, 1), ("y", 0, 0)])
def test_deleting_asks_for_confirmation_on_a_terminal(log, key, run_count, code) -> None:
    write_run(log, "a")
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "memagent_graph", "runs", "--delete"]
    with os.fdopen(follower) as terminal:
        process = Program(command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        os.write(leader, f"{key}\n".encode())
        output, errors = process.communicate(timeout=60)
    os.close(leader)
    assert process.returncode == code
    assert "Delete 1 run (a) from" in errors
    assert output.strip() == ""
    assert log.counts()[0] == run_count


def test_a_run_that_is_being_read_is_not_deleted(log) -> None:
    write_run(log, "read", stop_reason=None)
    write_run(log, "killed", stop_reason=None)
    checkpoints = get_default_checkpoints_path()
    with lease(checkpoints.with_name(checkpoints.name + "-reading"), "read"):
        result = memagent("runs", "--delete", "--yes")
        assert "not deleted, because it is being read: read" in result.stderr
        assert "1 run deleted" in result.stderr
        assert json.loads(memagent("runs", "--delete", "--yes", "--json").stdout)["being_read"] == ["read"]
    assert [record.run_id for record in log.runs()] == ["read"]
    memagent("runs", "--delete", "--yes")
    assert log.counts()[0] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_unwritable_output_is_an_error_without_a_traceback(log, isolated_home) -> None:
    write_run(log, "a", name="naïve.txt")
    command = [sys.executable, "-m", "memagent_graph", "runs"]
    with Path("/dev/full").open("w") as full_device:
        result = subprocess.run(command, check=False, stdout=full_device, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith("error: cannot write to standard output: No space left on device\n")
    assert "memagent show latest" in result.stderr
    assert "Traceback" not in result.stderr
    ascii_environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=ascii_environment)
    assert (result.returncode, "na?ve.txt" in result.stdout, result.stderr) == (0, True, "")
    result_without_streams = subprocess.run(
        ["sh", "-c", '"$@" --json >&- && exec "$@" --delete <&-', "sh", *command],
        check=False, stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert (result_without_streams.returncode, result_without_streams.stderr[:6]) == (2, "Usage:")


# Missing logs


@pytest.mark.parametrize("arguments", [["runs"], ["export", "x.parquet"]])
def test_a_missing_log_is_an_error_and_is_not_created(tmp_path, arguments) -> None:
    path = tmp_path / "nowhere" / "runs.sqlite"
    assert f"there is no run log at {path}" in memagent(*arguments, "--log", path, code=6).stderr
    assert not path.parent.exists()
    values = json.loads(memagent(*arguments, "--log", path, "--json", code=6).stdout)
    assert values["error"]["type"] == "RunLogError"


# memagent reward


def test_rewards_are_given_to_runs_and_conversations(log) -> None:
    rows = write_run(log, "a")
    memagent("reward", "a", "-0.5", "--name", "exact", "--source", "scorer", "--note", "off by one")
    values = json.loads(memagent("reward", "a", 1, "--conversation", rows[1], "--json").stdout)
    assert values == {
        "run_id": "a", "conversation": rows[1], "name": "reward", "value": 1.0, "source": "person", "note": None,
    }  # fmt: skip
    first, second = log.rewards("a")
    assert (first.value, first.name, first.source, first.note) == (-0.5, "exact", "scorer", "off by one")
    assert (second.value, second.conversation) == (1.0, rows[1])
    assert "finite" in memagent("reward", "a", "nan", code=2).stderr


# memagent export and import


def test_an_export_is_imported_into_another_log(tmp_path, log) -> None:
    write_run(log, "a")
    write_run(log, "b", stop_reason="max_chunks")
    file, other_path = tmp_path / "runs.parquet", tmp_path / "other" / "runs.sqlite"
    result = memagent("export", file, "--stop-reason", "answered")
    assert "1 run with 2 conversations and 0 rewards" in result.stderr
    assert result.stdout == ""
    assert json.loads(memagent("import", file, "--log", other_path, "--json").stdout) == {
        "runs": 1, "conversations": 2, "rewards": 0, "skipped": 0,
    }  # fmt: skip
    assert "1 run already there" in memagent("import", file, "--log", other_path).stderr
    other_log = RunLog(other_path)
    assert [run.run_id for run in other_log.runs()] == ["a"]
    memagent("reward", "a", 1, "--log", other_path)
    assert "--replace" in memagent("import", file, "--log", other_path, code=6).stderr
    memagent("import", file, "--log", other_path, "--replace")
    assert other_log.rewards("a") == []
    other_log.close()


def test_an_export_reports_its_runs_and_bytes(tmp_path, log) -> None:
    write_run(log, "good")
    write_run(log, "bad", logprobs=None)
    file = tmp_path / "runs"
    options = ["export", file, "--for-training"]
    assert "'bad'" in memagent(*options, code=6).stderr
    assert "1 run with 2 conversations" in memagent(*options, "--question", "good").stderr
    assert "--overwrite" in memagent(*options, "--question", "good", code=6).stderr
    values = json.loads(memagent(*options, "--question", "good", "--overwrite", "--json").stdout)
    assert (values["file"], values["bytes"]) == (str(file), file.stat().st_size)


def test_importing_a_missing_file_creates_no_log(tmp_path) -> None:
    assert "missing.parquet" in memagent("import", tmp_path / "missing.parquet", code=6).stderr
    assert not Path(get_default_run_log_path()).exists()


# Naming a run


def test_a_run_is_named_by_its_id_a_prefix_or_latest(log) -> None:
    for run_id in ("20261124-a-1", "20261124-a-10", "20261125-b"):
        write_run(log, run_id, count=0)
    for name, run_id in (("20261124-a-1", "20261124-a-1"), ("20261125", "20261125-b"), ("latest", "20261125-b")):
        memagent("reward", name, 1.0, "--name", name)
        assert log.latest_rewards(run_id)[name] == 1.0
    result = memagent("reward", "20261124", 1.0, "--name", "none", code=6)
    assert "several runs begin with '20261124'" in result.output
    assert "20261124-a-10, 20261124-a-1." in " ".join(result.output.split())
    assert not any("none" in log.latest_rewards(run.run_id) for run in log.runs())
    assert "20261125-b" in memagent("show").stdout


def test_the_version_is_that_of_the_package() -> None:
    assert memagent("--version").stdout.strip() == f"memagent {version('memagent-graph')}"


def test_a_narrow_terminal_shows_fewer_columns(log) -> None:
    run_id = "20261124-165424-1b1e4ed4-" + "9" * 60
    write_run(log, run_id, question="What is " + "so " * 40 + "long?")
    assert run_id in memagent("runs").stdout
    document: Any = {"name": "book.txt"}
    record: Any = SimpleNamespace(
        run_id="r", began=0.0, document=document, question="Why?", strategy="gated", stop_reason="answered"
    )
    totals = {"r": RunTotals(conversations=2)}
    names = [[column.header for column in _make_table([record], totals, width).columns] for width in (200, 100, 40)]
    assert names[0] == [*names[1][:6], "turns", "tokens in", "out", "ids", "rewards"]
    assert names[1] == ["run", "begun", "document", "question", "strategy", "ended", "rewards"]
    assert names[2] == ["run", "ended", "question"]
