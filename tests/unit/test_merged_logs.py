"""Merging the logs of several processes: a run that one starts and another finishes is complete."""

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
from memagent_graph.run_log import RunFilter, RunLog
from memagent_graph.run_log.exchange import export_runs, is_sqlite_file, merge_logs
from memagent_training.data.replay import load_groups
from memagent_training.data.replay_report import Refusal

TEXT = make_document({0.2: "The key of harbor is 4711."}, words=600)
QUESTION = "What is the key of harbor?"


@pytest.fixture
def merged_log(tmp_path: Path) -> Iterator[RunLog]:
    """The log that the others are merged into."""
    with closing(RunLog(tmp_path / "all.sqlite")) as log:
        yield log


@pytest.fixture
def make_log_reader(make_reader: Any, tmp_path: Path) -> Callable[[RunLog], MemAgent]:
    """A factory of readers with a log of their own and shared checkpoints."""
    return lambda log: make_reader(checkpoints=tmp_path / "c.sqlite", run_log=log)


class KilledError(Exception):
    """Raised in a call of the policy, in place of a kill of the process."""


async def read_in_turns(make_reader: Any, folder: Path, calls_per_reader: list[int]) -> list[Path]:
    """Let several readers, with a log each, read one run in turn; each but the last fails after its number of calls."""
    logs = []
    for index, max_calls in enumerate([*calls_per_reader, 10_000]):
        call_count = 0

        def reply(prompt: str, max_calls: int = max_calls) -> str:
            nonlocal call_count
            call_count += 1
            if call_count > max_calls:
                raise KilledError
            return read_perfectly(prompt)

        logs.append(folder / f"{index}.sqlite")
        agent = make_reader(ScriptedPolicy(reply), checkpoints=folder / "c.sqlite", run_log=logs[-1])
        try:
            if index == 0:
                await agent.aread(TEXT, QUESTION, run_id="r")
            else:
                await agent.aresume("r")
        except KilledError:
            pass
        await agent.aclose()
    return logs


async def test_a_run_read_by_several_processes_is_merged_into_one(
    make_reader: Any, tmp_path: Path, merged_log: RunLog
) -> None:
    logs = await read_in_turns(make_reader, tmp_path, [3, 4])
    report = merge_logs(merged_log, logs[::-1])
    (run,) = merged_log.runs(RunFilter(is_own=False))
    assert run.answer == "4711" and run.stop_reason == "answered" and run.ended is not None
    *updates, _ = merged_log.conversations("r")
    assert [conversation.slot for conversation in updates] == list(range(len(updates)))
    conversation_count = len(updates) + 1
    assert report.runs == 1 and report.conversations == conversation_count
    rerun = merge_logs(merged_log, logs)
    assert (rerun.runs, rerun.conversations, rerun.skipped) == (0, 0, 1)
    assert len(list(merged_log.conversations("r", superseded=True))) == conversation_count


async def test_of_a_chunk_read_twice_one_conversation_is_current(make_reader, tmp_path, merged_log: RunLog) -> None:
    first_log, second_log = await read_in_turns(make_reader, tmp_path, [3])
    second_conversations = list(RunLog(second_log).conversations("r"))
    repeated_conversation = replace(second_conversations[0], id=None, call_id="another", text="read, but not saved")
    RunLog(first_log).wait(RunLog(first_log).record(repeated_conversation))
    merge_logs(merged_log, [first_log, second_log])
    current_ids = [conversation.call_id for conversation in merged_log.conversations("r")]
    all_ids = [conversation.call_id for conversation in merged_log.conversations("r", superseded=True)]
    assert "another" not in current_ids and "another" in all_ids and second_conversations[0].call_id in current_ids


async def test_the_command_imports_logs_and_exports_together(make_reader: Any, tmp_path: Path) -> None:
    logs = await read_in_turns(make_reader, tmp_path, [2])
    (tmp_path / "more").mkdir()
    (other_log,) = await read_in_turns(make_reader, tmp_path / "more", [])
    export_runs(RunLog(other_log), tmp_path / "runs.parquet")
    assert is_sqlite_file(other_log)
    assert not is_sqlite_file(tmp_path / "runs.parquet") and not is_sqlite_file(tmp_path / "nothing")
    options = ("--log", tmp_path / "all.sqlite", "--json")
    assert json.loads(memagent("import", *logs, *options).stdout)["runs"] == 1
    files = tmp_path / "runs.parquet", logs[0]
    assert json.loads(memagent("import", *files, "--replace", *options).stdout)["runs"] >= 1


def test_a_file_that_is_not_a_log_is_refused(tmp_path: Path, merged_log: RunLog) -> None:
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(RunLogError, match="is not a log of runs"):
        merge_logs(merged_log, [tmp_path / "x"])


async def test_a_chunk_without_a_checkpoint_is_left_out_of_the_merged_run(
    make_reader: Any, tmp_path: Path, merged_log: RunLog
) -> None:
    first_log, second_log, third_log = await read_in_turns(make_reader, tmp_path, [3, 4])
    with closing(RunLog(second_log)) as log:
        last = list(log.conversations("r"))[-1]
        changes = {"slot": last.slot + 1, "parents": (last.call_id,), "began": last.began + 1e-6}
        log.wait(log.record(replace(last, id=None, call_id="lost", **changes)))
    with closing(RunLog(first_log)) as log:
        merge_logs(log, [third_log])  # the first process continued after the second was killed
        assert [run.answer for run in log.runs(RunFilter(is_own=True))] == ["4711"]
    merge_logs(merged_log, [first_log, second_log], is_own=True)
    assert "lost" not in [conversation.call_id for conversation in merged_log.conversations("r")]
    assert merged_log.trace("r").answers and list(merged_log.runs(RunFilter(is_own=True)))


async def test_edits_events_and_rewards_of_every_log_are_merged(
    make_log_reader: Any, tmp_path: Path, merged_log: RunLog
) -> None:
    first_log, second_log = (RunLog(tmp_path / f"machine {number}.sqlite") for number in range(2))
    await make_log_reader(first_log).aread(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=4))
    agent = make_log_reader(second_log)
    await agent.aedit_memory("r", 2, "harbor 99", author="alice")
    await agent.aresume("r")
    second_log.reward("r", 1.0, name="exact", source="scorer")
    second_log.reward("r", 0.0, name="exact", source="scorer")
    second_log.reward("r", 0.5, name="step", conversation=next(second_log.conversations("r")).id)
    report = merge_logs(merged_log, [first_log.path, second_log.path])
    conversations = {conversation.id: conversation for conversation in merged_log.conversations("r", superseded=True)}
    assert (report.runs, report.rewards, report.conversations) == (1, 3, len(conversations))
    assert merged_log.latest_rewards("r") == {"exact": 0.0}
    (reward,) = [reward for reward in merged_log.rewards("r") if reward.conversation is not None]
    assert conversations[reward.conversation].call_id == next(second_log.conversations("r")).call_id
    assert [event.kind for event in merged_log.events("r")] == ["memory_edited"]
    assert merged_log.trace("r").updates[2].memory == "harbor 99"
    assert merged_log.get("r").answer == second_log.get("r").answer is not None
    *updates, _ = merged_log.conversations("r")
    assert [conversation.slot for conversation in updates] == list(range(len(updates)))
    assert merged_log.templates("r") == second_log.templates("r")
    # An edited run is refused for training, here as in the log of the second machine.
    assert load_groups(merged_log, reward="exact", min_group=1).report.refused == {Refusal.EDITED: ("r",)}
    content_before = collect_content(merged_log)
    rerun = merge_logs(merged_log, [second_log.path, first_log.path])
    assert (rerun.runs, rerun.rewards, rerun.conversations, rerun.skipped) == (0, 0, 0, 1)
    assert collect_content(merged_log) == content_before


async def test_a_reward_given_after_a_merge_is_added_by_the_next_merge(
    make_reader: Any, tmp_path: Path, merged_log: RunLog
) -> None:
    (source_log,) = await read_in_turns(make_reader, tmp_path, [])
    merge_logs(merged_log, [source_log])
    with closing(RunLog(source_log)) as log:
        log.reward("r", 1.0)
    report = merge_logs(merged_log, [source_log])
    assert (report.runs, report.conversations, report.rewards, report.skipped) == (1, 0, 1, 0)
    assert merged_log.latest_rewards("r") == {"reward": 1.0}
    merged_log.reward("r", 0.25, name="own")
    assert merge_logs(merged_log, [source_log]).skipped == 1
    assert merged_log.latest_rewards("r") == {"reward": 1.0, "own": 0.25}


async def test_the_next_merge_adds_an_edit_and_the_newest_counts(
    make_reader: Any, make_log_reader: Any, tmp_path: Path, merged_log: RunLog
) -> None:
    (source_log,) = await read_in_turns(make_reader, tmp_path, [])
    merge_logs(merged_log, [source_log])
    merged_log.reward("r", 1.0)
    with closing(RunLog(source_log)) as log:
        await make_log_reader(log).aedit_memory("r", 1, "harbor 98")
    await make_log_reader(merged_log).aedit_memory("r", 1, "harbor 99")
    merge_logs(merged_log, [source_log])
    assert [conversation.slot for conversation in merged_log.conversations("r")] == [0, 1]
    assert {merged_log.get("r").answer, merged_log.get("r").stop_reason, *merged_log.latest_rewards("r")} == {None}
    assert [event.text for event in merged_log.events("r")] == ["harbor 98", "harbor 99"]
    content_before = collect_content(merged_log)
    assert merge_logs(merged_log, [source_log]).skipped == 1 and collect_content(merged_log) == content_before


async def test_run_rewards_from_before_a_resume_are_dropped_by_a_merge(
    make_log_reader: Any, tmp_path: Path, merged_log: RunLog
) -> None:
    first_log, second_log = RunLog(tmp_path / "1.sqlite"), RunLog(tmp_path / "2.sqlite")
    await make_log_reader(first_log).aread(TEXT, QUESTION, run_id="r", limits=Limits(max_chunks=4))
    first_log.reward("r", 0.0, name="early")
    first_log.reward("r", 0.5, name="step", conversation=next(first_log.conversations("r")).id)
    await make_log_reader(second_log).aresume("r")
    second_log.reward("r", 1.0, name="late")
    assert merge_logs(merged_log, [first_log.path, second_log.path]).rewards == 2
    assert merged_log.latest_rewards("r") == {"late": 1.0}
    assert [reward.value for reward in merged_log.rewards("r") if reward.conversation is not None] == [0.5]
    content_before = collect_content(merged_log)
    for sources in ([first_log.path], [second_log.path], [second_log.path, first_log.path]):
        assert merge_logs(merged_log, sources).skipped == 1
        assert collect_content(merged_log) == content_before
