"""Reads over MCP that outlive the requests that began them: no time-out, cancellation or kill loses one."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Sized
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, McpError, types
from support.fake_server import FakeServer
from support.programs import Program
from support.scripts import extract, read_perfectly
from unit.test_mcp import (
    QUESTION,
    SMALL,
    TEXT,
    ProgressReports,
    answer_of,
    answers_of,
    get_error_text,
    in_process,
    make_command,
    over_stdio,
    session_with,
    text_of,
)

from memagent_graph import PolicyError, ScriptedPolicy

ASK: dict[str, Any] = {"text": TEXT, "questions": QUESTION}


def keeping(folder: Path, policy: Any = read_perfectly, **options: Any) -> AbstractAsyncContextManager[Any]:
    """A session with a server that keeps texts and checkpoints in a folder."""
    places = {"store": folder / "texts", "checkpoints": folder / "checkpoints.sqlite"}
    return in_process(script=policy, reader={**places, **options})


def sections(prompts: list[str]) -> list[str]:
    return [extract(prompt, "section") for prompt in prompts if "<section>" in prompt]


async def wait_for_prompts(prompts: Sized, number: int) -> None:
    async with asyncio.timeout(20):
        while len(prompts) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def wait_for_run(session: ClientSession) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            listing = await session.call_tool("list_runs", {})
            runs: list[dict[str, Any]] = listing.structuredContent["runs"]  # type: ignore[index]
            if runs:
                (run,) = runs
                return run
            await asyncio.sleep(0.005)


async def test_a_background_read_returns_its_run_id_at_once_and_its_answer_on_waiting(tmp_path) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.01)
    async with keeping(tmp_path, policy) as session:
        both = {**ASK, "questions": [QUESTION, "What is the key of castle?"], "background": True}
        result = await session.call_tool("read_document", both)
        first, second = answers_of(result)
        assert (first["is_reading"], second["is_reading"]) == (True, True)
        assert first["answer"] is None
        assert "still being read" in text_of(result)
        assert "wait" in text_of(result)
        assert len(policy.prompts) < 5
        reports = ProgressReports()
        harbor = answer_of(await session.call_tool("wait", {"run_id": first["run_id"]}, progress_callback=reports))
        assert (harbor["answer"], harbor["is_reading"]) == ("4711", False)
        assert harbor["evidence"]
        fractions = reports.fractions
        assert (fractions, fractions[-1]) == (sorted(fractions), 1.0)
        assert len(fractions) > 5
        castle = answer_of(await session.call_tool("wait", {"run_id": second["run_id"]}))
        assert castle["answer"] == "1234"
        again = answer_of(await session.call_tool("wait", {"run_id": first["run_id"]}))
        assert again == harbor


async def test_a_wait_ends_after_its_seconds_and_says_how_far_the_read_is(tmp_path) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.02)
    async with keeping(tmp_path, policy) as session:
        reading = answer_of(await session.call_tool("read_document", {**ASK, "background": True}))
        await wait_for_prompts(policy.prompts, 4)
        far = answer_of(await session.call_tool("wait", {"run_id": reading["run_id"], "seconds": 0.01}))
        assert far["is_reading"]
        assert 0 < far["progress"] < 1
        assert answer_of(await session.call_tool("wait", {"run_id": reading["run_id"]}))["answer"] == "4711"


async def test_after_the_clients_own_time_out_the_same_read_can_be_waited_for(tmp_path) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.1)
    async with keeping(tmp_path, policy) as session:
        with pytest.raises(McpError, match="Timed out"):
            await session.call_tool("read_document", ASK, read_timeout_seconds=timedelta(seconds=0.3))
        run = await wait_for_run(session)  # on a busy machine the time-out may come before the read has begun
        assert answer_of(await session.call_tool("wait", {"run_id": run["run_id"]}))["answer"] == "4711"
    read = sections(policy.prompts)
    assert len(read) == len(set(read)), "no chunk was read twice"


@pytest.mark.parametrize("way", ["tool", "notification"])
async def test_a_cancelled_read_is_continued_at_its_chunk(tmp_path, way) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.02)
    async with keeping(tmp_path, policy) as session:
        if way == "tool":
            run_id = answer_of(await session.call_tool("read_document", {**ASK, "background": True}))["run_id"]
            await wait_for_prompts(policy.prompts, 5)
            reading = answer_of(await session.call_tool("cancel_read", {"run_id": run_id}))
            assert (reading["is_reading"], reading["answer"]) == (False, None)
            assert "resume_read" in reading["error"]
        else:
            number = session._request_id
            call = asyncio.create_task(session.call_tool("read_document", ASK))
            await wait_for_prompts(policy.prompts, 5)
            gone = types.CancelledNotification(params=types.CancelledNotificationParams(requestId=number))
            await session.send_notification(types.ClientNotification(gone))
            with pytest.raises(McpError, match="cancelled"):
                await call
            run_id = (await wait_for_run(session))["run_id"]
        calls = len(policy.prompts)
        await asyncio.sleep(0.1)
        assert len(policy.prompts) == calls, "it has ended"
        assert "resume_read" in get_error_text(await session.call_tool("wait", {"run_id": run_id}))
        whole = answer_of(await session.call_tool("resume_read", {"run_id": run_id}))
        assert (whole["answer"], whole["run_id"]) == ("4711", run_id)
        once = answer_of(await session.call_tool("resume_read", {"run_id": run_id}))
        assert once["answer"] == "4711"
    read = sections(policy.prompts)
    assert len(read) - len(set(read)) <= 1, "the chunk that it was at, and no other"


async def test_of_several_questions_one_can_be_cancelled(tmp_path) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.02)
    async with keeping(tmp_path, policy) as session:
        both = {**ASK, "questions": [QUESTION, "What is the key of castle?"], "background": True}
        first, second = answers_of(await session.call_tool("read_document", both))
        await wait_for_prompts(policy.prompts, 4)
        await session.call_tool("cancel_read", {"run_id": first["run_id"]})
        assert answer_of(await session.call_tool("wait", {"run_id": second["run_id"]}))["answer"] == "1234"


async def test_a_read_that_stopped_or_failed_is_continued_and_waited_for_in_the_background(tmp_path) -> None:
    down = [False]
    policy = ScriptedPolicy(lambda prompt: PolicyError("gone") if down[0] else read_perfectly(prompt))
    async with keeping(tmp_path, policy) as session:
        stopped = answer_of(await session.call_tool("read_document", {**ASK, "max_chunks": 3}))
        assert stopped["stop_reason"] == "max_chunks"
        down[0] = True
        assert "gone" in get_error_text(await session.call_tool("resume_read", {"run_id": stopped["run_id"]}))
        down[0] = False
        reading = answer_of(await session.call_tool("resume_read", {"run_id": stopped["run_id"], "background": True}))
        assert reading["is_reading"]
        done = answer_of(await session.call_tool("wait", {"run_id": stopped["run_id"]}))
        assert done["answer"] == "4711"
    read = sections(policy.prompts)
    assert len(read) - len(set(read)) <= 1


async def test_a_killed_servers_read_is_continued_by_the_next_one(tmp_path) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    arguments = {"path": "book.txt", "questions": QUESTION, "background": True}
    with FakeServer(delay=0.03) as policy:
        options = ["--root", tmp_path, "--base-url", policy.base_url, *SMALL]
        streams = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        with Program(make_command(*options), **streams) as process:
            async with session_with(process) as session:
                run_id = answer_of(await session.call_tool("read_document", arguments))["run_id"]
                await wait_for_prompts(policy.requests, 6)
                process.kill()
        async with over_stdio(*options) as session:
            assert "resume_read" in get_error_text(await session.call_tool("wait", {"run_id": run_id}))
            assert answer_of(await session.call_tool("resume_read", {"run_id": run_id}))["answer"] == "4711"
        read = sections([body["messages"][0]["content"] for body in policy.requests])
    assert len(read) - len(set(read)) <= 1


async def test_closing_the_server_ends_its_reads_and_loses_none(tmp_path) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.02)
    async with keeping(tmp_path, policy) as session:
        run_id = answer_of(await session.call_tool("read_document", {**ASK, "background": True}))["run_id"]
        await wait_for_prompts(policy.prompts, 4)
    calls = len(policy.prompts)
    await asyncio.sleep(0.1)
    assert len(policy.prompts) == calls
    async with keeping(tmp_path) as session:
        assert answer_of(await session.call_tool("resume_read", {"run_id": run_id}))["answer"] == "4711"


async def test_wrong_ids_and_questions_are_told_at_once(tmp_path) -> None:
    async with keeping(tmp_path) as session:
        for tool in ("wait", "cancel_read", "resume_read"):
            assert "nope" in get_error_text(await session.call_tool(tool, {"run_id": "nope"}))
        long = await session.call_tool("read_document", {**ASK, "questions": "why " * 100, "background": True})
        assert "question has" in get_error_text(long)


async def test_without_checkpoints_nothing_is_said_to_be_resumable(tmp_path) -> None:
    async with keeping(tmp_path, checkpoints=None) as session:
        assert "resume_read" not in [tool.name for tool in (await session.list_tools()).tools]
        reading = answer_of(await session.call_tool("read_document", {**ASK, "background": True}))
        assert answer_of(await session.call_tool("wait", {"run_id": reading["run_id"]}))["answer"] == "4711"


def test_the_settings_for_clients_in_the_docs_start_the_server() -> None:
    docs = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()
    settings = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", docs, re.S)]
    assert [*map(list, settings)] == [["mcpServers"]]
    for setting in settings:
        ((name, server),) = setting["mcpServers"].items()
        assert (name, server["command"], server["args"][:2]) == ("memagent", "memagent", ["mcp", "--root"])
