"""Logs of several processes become one: a run that one began and another finished is whole, with nothing twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command_line import memagent
from support.scripts import make_document, read_perfectly
from unit.test_exchange import collect_content

from memagent_graph import Limits, MemAgent, ScriptedPolicy
from memagent_graph.errors import RunLogError
from memagent_graph.run_log import RunLog
from memagent_graph.run_log.exchange import export_runs, is_sqlite_file, merge_logs
from memagent_training.data.replay import load_groups
from memagent_training.data.replay_report import Refusal

TEXT = make_document({0.2: "The key of harbor is 4711."}, words=600)
QUESTION = "What is the key of harbor?"


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[RunLog]:
    """The log that the others are merged into."""
    with closing(RunLog(tmp_path / "all.sqlite")) as log:
        yield log


@pytest.fixture
def reader_of(make_reader: Any, tmp_path: Path) -> Callable[[RunLog], MemAgent]:
    """A reader with this log, and the checkpoints of all."""
    return lambda log: make_reader(checkpoints=tmp_path / "c.sqlite", run_log=log)


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
            return read_perfectly(prompt)

        logs.append(folder / f"{number}.sqlite")
        agent = make_reader(ScriptedPolicy(reply), checkpoints=folder / "c.sqlite", run_log=logs[-1])
        try:
            if number == 0:
                await agent.aread(TEXT, QUESTION, run_id="r")
            else:
                await agent.aresume("r")
        except KilledError:
            pass
        await agent.aclose()
    return logs


async def test_a_run_that_several_processes_read_is_put_together(
    make_reader: Any, tmp_path: Path, whole: RunLog
) -> None:
    parts = await read_in_parts(make_reader, tmp_path, [3, 4])
    report = merge_logs(whole, parts[::-1])
    (run,) = whole.runs()
    assert run.answer == "4711" and run.stop_reason == "answered" and run.ended is not None
    *updates, _ = whole.conversations("r")
    assert [turn.slot for turn in updates] == list(range(len(updates)))
    count = len(updates) + 1
    assert report.runs == 1 and report.conversations == count
    again = merge_logs(whole, parts)
    assert (again.runs, again.conversations, again.skipped) == (0, 0, 1)
    assert len(list(whole.conversations("r", superseded=True))) == count


async def test_a_chunk_that_two_processes_read_counts_once(make_reader: Any, tmp_path: Path, whole: RunLog) -> None:
    first, second = await read_in_parts(make_reader, tmp_path, [3])
    newest = list(RunLog(second).conversations("r"))
    repeated = replace(newest[0], id=None, call_id="another", text="read, but not saved")
    RunLog(first).wait(RunLog(first).record(repeated))
    merge_logs(whole, [first, second])
    counted = [conversation.call_id for conversation in whole.conversations("r")]
    everything = [conversation.call_id for conversation in whole.conversations("r", superseded=True)]
    assert "another" not in counted and "another" in everything and newest[0].call_id in counted


async def test_the_command_takes_logs_and_exports_together(make_reader: Any, tmp_path: Path) -> None:
    logs = await read_in_parts(make_reader, tmp_path, [2])
    (tmp_path / "more").mkdir()
    (other,) = await read_in_parts(make_reader, tmp_path / "more", [])
    export_runs(RunLog(other), tmp_path / "runs.parquet")
    assert (
        is_sqlite_file(other)
        and not is_sqlite_file(tmp_path / "runs.parquet")
        and not is_sqlite_file(tmp_path / "nothing")
    )
    options = ("--log", tmp_path / "all.sqlite", "--json")
    assert json.loads(memagent("import", *logs, *options).stdout)["runs"] == 1
    files = tmp_path / "runs.parquet", logs[0]
    assert json.loads(memagent("import", *files, "--replace", *options).stdout)["runs"] >= 1


def test_a_file_that_is_no_log_is_named(tmp_path: Path, whole: RunLog) -> None:
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(RunLogError, match="is not a log of runs"):
        merge_logs(whole, [tmp_path / "x"])


async def test_a_chunk_whose_checkpoint_was_lost_does_not_replace_what_was_read_later(
    make_reader: Any, tmp_path: Path, whole: RunLog
) -> None:
    first, second, third = await read_in_parts(make_reader, tmp_path, [3, 4])
    with closing(RunLog(second)) as log:
        last = list(log.conversations("r"))[-1]
        place = {"slot": last.slot + 1, "parents": (last.call_id,), "began": last.began + 1e-6}
        lost = replace(last, id=None, call_id="lost", **place)
        log.wait(log.record(lost))
    with closing(RunLog(first)) as log:
        merge_logs(log, [third])  # the process that began continued after the second one was killed
    merge_logs(whole, [first, second])
    assert "lost" not in [conversation.call_id for conversation in whole.conversations("r")]
    assert whole.trace("r").answers


async def test_edits_events_and_rewards_of_every_part_are_in_the_merged_log(
    reader_of: Any, tmp_path: Path, whole: RunLog
) -> None:
    first, second = (RunLog(tmp_path / f"machine {number}.sqlite") for number in range(2))
    await reader_of(first).aread(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=4))
    agent = reader_of(second)
    await agent.aedit_memory("r", 2, "harbor 99", author="alice")
    await agent.aresume("r")
    second.reward("r", 1.0, name="exact", source="scorer")
    second.reward("r", 0.0, name="exact", source="scorer")
    second.reward("r", 0.5, name="step", conversation=next(second.conversations("r")).id)
    report = merge_logs(whole, [first.path, second.path])
    conversations = {turn.id: turn for turn in whole.conversations("r", superseded=True)}
    assert (report.runs, report.rewards, report.conversations) == (1, 3, len(conversations))
    assert whole.latest_rewards("r") == {"exact": 0.0}
    (reward,) = [reward for reward in whole.rewards("r") if reward.conversation is not None]
    assert conversations[reward.conversation].call_id == next(second.conversations("r")).call_id
    assert [event.kind for event in whole.events("r")] == ["memory_edited"]
    assert whole.trace("r").updates[2].memory == "harbor 99"
    assert whole.get("r").answer == second.get("r").answer is not None
    *updates, _ = whole.conversations("r")
    assert [turn.slot for turn in updates] == list(range(len(updates)))
    assert whole.templates("r") == second.templates("r")
    # It is refused for training, as the second machine's would be.
    assert load_groups(whole, reward="exact", min_group=1).report.refused == {Refusal.EDITED: ("r",)}
    before = collect_content(whole)
    again = merge_logs(whole, [second.path, first.path])
    assert (again.runs, again.rewards, again.conversations, again.skipped) == (0, 0, 0, 1)
    assert collect_content(whole) == before


async def test_a_reward_that_is_given_after_a_merge_arrives_at_the_next(
    make_reader: Any, tmp_path: Path, whole: RunLog
) -> None:
    (part,) = await read_in_parts(make_reader, tmp_path, [])
    merge_logs(whole, [part])
    with closing(RunLog(part)) as log:
        log.reward("r", 1.0)
    report = merge_logs(whole, [part])
    assert (report.runs, report.conversations, report.rewards, report.skipped) == (1, 0, 1, 0)
    assert whole.latest_rewards("r") == {"reward": 1.0}
    whole.reward("r", 0.25, name="own")
    assert merge_logs(whole, [part]).skipped == 1
    assert whole.latest_rewards("r") == {"reward": 1.0, "own": 0.25}


async def test_an_edit_after_a_merge_reaches_the_next_merge(
    make_reader: Any, reader_of: Any, tmp_path: Path, whole: RunLog
) -> None:
    (part,) = await read_in_parts(make_reader, tmp_path, [])
    merge_logs(whole, [part])
    whole.reward("r", 1.0)
    with closing(RunLog(part)) as log:
        await reader_of(log).aedit_memory("r", 1, "harbor 99")
    merge_logs(whole, [part])
    assert [turn.slot for turn in whole.conversations("r")] == [0, 1]
    assert whole.get("r").answer is None and whole.get("r").stop_reason is None
    assert whole.latest_rewards("r") == {}
    assert [event.kind for event in whole.events("r")] == ["memory_edited"]
    before = collect_content(whole)
    assert merge_logs(whole, [part]).skipped == 1 and collect_content(whole) == before


async def test_a_reward_that_was_given_before_a_resume_elsewhere_is_withdrawn_as_in_one_log(
    reader_of: Any, tmp_path: Path, whole: RunLog
) -> None:
    first, second = RunLog(tmp_path / "1.sqlite"), RunLog(tmp_path / "2.sqlite")
    await reader_of(first).aread(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=4))
    first.reward("r", 0.0, name="early")
    first.reward("r", 0.5, name="step", conversation=next(first.conversations("r")).id)
    await reader_of(second).aresume("r")
    second.reward("r", 1.0, name="late")
    assert merge_logs(whole, [first.path, second.path]).rewards == 2
    assert whole.latest_rewards("r") == {"late": 1.0}
    assert [reward.value for reward in whole.rewards("r") if reward.conversation is not None] == [0.5]
    before = collect_content(whole)
    for sources in ([first.path], [second.path], [second.path, first.path]):
        assert merge_logs(whole, sources).skipped == 1
        assert collect_content(whole) == before
