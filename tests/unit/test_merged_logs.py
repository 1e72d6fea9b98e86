"""Logs of several processes become one: a run that one began and another finished is whole, with nothing twice."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.scripts import document_with, perfect_reader
from typer.testing import CliRunner

from memagent_graph import ScriptedPolicy
from memagent_graph.cli import app
from memagent_graph.errors import RunLogError
from memagent_graph.run_log import RunLog
from memagent_graph.run_log.exchange import export_runs, is_log, merge_logs

TEXT = document_with({0.2: "The key of harbor is 4711."}, words=2000)
QUESTION = "What is the key of harbor?"


class KilledError(Exception):
    """Stands for a process that ends here."""


async def read_in_parts(make_reader: Any, folder: Path, stops: list[int]) -> list[Path]:
    """One run, read by several readers with a log each; each but the last dies at a call."""
    logs = []
    for number, stop in enumerate([*stops, 10_000]):
        calls = 0

        def reply(prompt: str, stop: int = stop) -> str:
            nonlocal calls
            calls += 1
            if calls > stop:
                raise KilledError
            return perfect_reader(prompt)

        logs.append(folder / f"{number}.sqlite")
        agent = make_reader(
            ScriptedPolicy(reply), store=folder / "texts", checkpoints=folder / "c.sqlite", run_log=logs[-1]
        )
        try:
            if number == 0:
                await agent.aread(TEXT, QUESTION, run_id="r")
            else:
                await agent.aresume("r")
        except KilledError:
            pass
        await agent.aclose()
    return logs


async def test_a_run_that_several_processes_read_is_put_together(make_reader: Any, tmp_path: Path) -> None:
    parts = await read_in_parts(make_reader, tmp_path, [3, 4])
    whole = RunLog(tmp_path / "all.sqlite")
    report = merge_logs(whole, parts[::-1])
    (run,) = whole.runs()
    said = list(whole.conversations("r"))
    assert run.answer == "4711" and run.stop_reason == "answered" and run.ended is not None
    assert [each.slot for each in said if each.role == "update"] == list(range(len(said) - 1))
    assert report.runs == 1 and report.conversations == len(said)
    assert len({each.seq for each in said}) == len(said)
    again = merge_logs(whole, parts)
    assert (again.runs, again.conversations, again.skipped) == (0, 0, 1)
    assert len(list(whole.conversations("r", superseded=True))) == len(said)


async def test_a_chunk_that_two_processes_read_counts_once(make_reader: Any, tmp_path: Path) -> None:
    first, second = await read_in_parts(make_reader, tmp_path, [3])
    whole = RunLog(tmp_path / "all.sqlite")
    newest = list(RunLog(second).conversations("r"))
    from dataclasses import replace

    repeated = replace(newest[0], id=None, seq=None, step="another", text="read, but not saved")
    RunLog(first).wait(RunLog(first).record(repeated))
    merge_logs(whole, [first, second])
    counted = [each.step for each in whole.conversations("r")]
    everything = [each.step for each in whole.conversations("r", superseded=True)]
    assert "another" not in counted and "another" in everything and newest[0].step in counted


async def test_the_command_takes_logs_and_exports_together(make_reader: Any, tmp_path: Path) -> None:
    logs = await read_in_parts(make_reader, tmp_path, [2])
    (tmp_path / "more").mkdir()
    (other,) = await read_in_parts(make_reader, tmp_path / "more", [])
    export_runs(RunLog(other), tmp_path / "runs.jsonl")
    assert is_log(other) and not is_log(tmp_path / "runs.jsonl") and not is_log(tmp_path / "nothing")
    into = str(tmp_path / "all.sqlite")
    done = CliRunner().invoke(app, ["import", *map(str, logs), "--log", into, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["runs"] == 1
    done = CliRunner().invoke(
        app, ["import", str(tmp_path / "runs.jsonl"), str(logs[0]), "--log", into, "--replace", "--json"]
    )
    assert done.exit_code == 0 and json.loads(done.stdout)["runs"] >= 1


def test_a_file_that_is_no_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(RunLogError, match="is not a log of runs"):
        merge_logs(RunLog(tmp_path / "all.sqlite"), [tmp_path / "x"])


async def test_a_chunk_whose_checkpoint_was_lost_does_not_replace_what_was_read_later(
    make_reader: Any, tmp_path: Path
) -> None:
    first, second, third = await read_in_parts(make_reader, tmp_path, [3, 4])
    with closing(RunLog(second)) as log:
        last = list(log.conversations("r"))[-1]
        lost = replace(
            last, id=None, seq=None, step="lost", slot=last.slot + 1, parents=(last.step,), began=last.began + 1e-6
        )
        log.wait(log.record(lost))
    one = RunLog(first)
    merge_logs(one, [third])  # the process that began continued after the second one was killed
    one.close()
    whole = RunLog(tmp_path / "all.sqlite")
    merge_logs(whole, [first, second])
    steps = [each.step for each in whole.conversations("r")]
    assert "lost" not in steps
    assert whole.trace("r").answers
