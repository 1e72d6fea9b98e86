"""Background reads over MCP: they survive timeouts of their requests, cancellations and kills of the server."""

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
    SMALL_SETTINGS,
    TEXT,
    ProgressReports,
    connect_in_process,
    connect_over_stdio,
    get_answer,
    get_answers,
    get_error_text,
    get_text,
    make_command,
    open_session,
)

from memagent_graph import PolicyError, ScriptedPolicy
from memagent_mcp.active_reads import ActiveRead, ActiveReads

ARGUMENTS: dict[str, Any] = {"text": TEXT, "questions": QUESTION}


def connect(folder: Path, policy: Any = read_perfectly, **options: Any) -> AbstractAsyncContextManager[Any]:
    """Open a session with a server whose texts and checkpoints are in a folder."""
    storage = {"store": folder / "texts", "checkpoints": folder / "checkpoints.sqlite"}
    return connect_in_process(script=policy, reader={**storage, **options})


def get_sections(prompts: list[str]) -> list[str]:
    return [extract(prompt, "section") for prompt in prompts if "<section>" in prompt]


async def wait_for_prompts(prompts: Sized, count: int) -> None:
    async with asyncio.timeout(20):
        while len(prompts) < count:  # noqa: ASYNC110
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


async def test_a_background_read_returns_its_run_id_and_wait_returns_its_answer(tmp_path) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.02)
    async with connect(tmp_path, policy) as session:
        arguments = {**ARGUMENTS, "questions": [QUESTION, "What is the key of castle?"], "background": True}
        result = await session.call_tool("read_document", arguments)
        harbor_read, castle_read = get_answers(result)
        assert (harbor_read["is_reading"], castle_read["is_reading"], harbor_read["answer"]) == (True, True, None)
        assert all(text in get_text(result) for text in ("still being read", "wait"))
        assert len(policy.prompts) < 5
        await wait_for_prompts(policy.prompts, 4)
        wait_arguments, reports = {"run_id": harbor_read["run_id"]}, ProgressReports()
        unfinished_read = get_answer(await session.call_tool("wait", {**wait_arguments, "seconds": 0.01}))
        assert (unfinished_read["is_reading"], 0 < unfinished_read["progress"] < 1) == (True, True)
        harbor = get_answer(await session.call_tool("wait", wait_arguments, progress_callback=reports))
        assert (harbor["answer"], harbor["is_reading"], bool(harbor["evidence"])) == ("4711", False, True)
        fractions = reports.fractions
        assert (fractions, fractions[-1]) == (sorted(fractions), 1.0)
        assert len(fractions) > 3
        assert get_answer(await session.call_tool("wait", {"run_id": castle_read["run_id"]}))["answer"] == "1234"
        assert get_answer(await session.call_tool("wait", wait_arguments)) == harbor


async def test_a_read_can_be_waited_for_after_the_request_timed_out(tmp_path) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.1)
    async with connect(tmp_path, policy) as session:
        with pytest.raises(McpError, match="Timed out"):
            await session.call_tool("read_document", ARGUMENTS, read_timeout_seconds=timedelta(seconds=0.3))
        run = await wait_for_run(session)  # on a busy machine the timeout can precede the read
        assert get_answer(await session.call_tool("wait", {"run_id": run["run_id"]}))["answer"] == "4711"
    sections = get_sections(policy.prompts)
    assert len(sections) == len(set(sections)), "no chunk was read twice"


@pytest.mark.parametrize("cancellation", ["tool", "notification"])
async def test_a_cancelled_read_is_resumed_at_its_chunk(tmp_path, cancellation) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.02)
    async with connect(tmp_path, policy) as session:
        if cancellation == "tool":
            run_id = get_answer(await session.call_tool("read_document", {**ARGUMENTS, "background": True}))["run_id"]
            await wait_for_prompts(policy.prompts, 5)
            cancelled_read = get_answer(await session.call_tool("cancel_read", {"run_id": run_id}))
            assert (cancelled_read["is_reading"], cancelled_read["answer"]) == (False, None)
            assert "resume_read" in cancelled_read["error"]
        else:
            request_id = session._request_id
            call = asyncio.create_task(session.call_tool("read_document", ARGUMENTS))
            await wait_for_prompts(policy.prompts, 5)
            notification = types.CancelledNotification(params=types.CancelledNotificationParams(requestId=request_id))
            await session.send_notification(types.ClientNotification(notification))
            with pytest.raises(McpError, match="cancelled"):
                await call
            run_id = (await wait_for_run(session))["run_id"]
        prompt_count = len(policy.prompts)
        await asyncio.sleep(0.1)
        assert len(policy.prompts) == prompt_count, "the read has ended"
        assert "resume_read" in get_error_text(await session.call_tool("wait", {"run_id": run_id}))
        calls = [session.call_tool("resume_read", {"run_id": run_id}) for _ in range(3)]
        resumed_reads = [get_answer(result) for result in await asyncio.gather(*calls)]
        assert [(read["answer"], read["run_id"]) for read in resumed_reads] == [("4711", run_id)] * 3
        assert get_answer(await session.call_tool("resume_read", {"run_id": run_id}))["answer"] == "4711"
    sections = get_sections(policy.prompts)
    assert len(sections) - len(set(sections)) <= 1, "at most the chunk at which it was cancelled"


async def test_a_cancellation_before_the_read_wakes_waiting_calls() -> None:
    reads, read = ActiveReads(), ActiveRead("r", "?", "d")
    async with asyncio.timeout(5):
        await asyncio.gather(read.change_event.wait(), reads.cancel(read))


async def test_of_several_questions_one_can_be_cancelled(tmp_path) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.02)
    async with connect(tmp_path, policy) as session:
        arguments = {**ARGUMENTS, "questions": [QUESTION, "What is the key of castle?"], "background": True}
        first_read, second_read = get_answers(await session.call_tool("read_document", arguments))
        await wait_for_prompts(policy.prompts, 4)
        await session.call_tool("cancel_read", {"run_id": first_read["run_id"]})
        assert get_answer(await session.call_tool("wait", {"run_id": second_read["run_id"]}))["answer"] == "1234"


async def test_a_stopped_or_failed_read_can_be_resumed_in_the_background(tmp_path) -> None:
    is_down = [False]
    policy = ScriptedPolicy(lambda prompt: PolicyError("gone") if is_down[0] else read_perfectly(prompt))
    async with connect(tmp_path, policy) as session:
        stopped_read = get_answer(await session.call_tool("read_document", {**ARGUMENTS, "max_chunks": 3}))
        assert stopped_read["stop_reason"] == "max_chunks"
        is_down[0] = True
        assert "gone" in get_error_text(await session.call_tool("resume_read", {"run_id": stopped_read["run_id"]}))
        is_down[0] = False
        reading = await session.call_tool("resume_read", {"run_id": stopped_read["run_id"], "background": True})
        assert get_answer(reading)["is_reading"]
        finished_read = get_answer(await session.call_tool("wait", {"run_id": stopped_read["run_id"]}))
        assert finished_read["answer"] == "4711"
    sections = get_sections(policy.prompts)
    assert len(sections) - len(set(sections)) <= 1


async def test_the_read_of_a_killed_server_is_resumed_by_the_next_server(tmp_path) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    arguments = {"path": "book.txt", "questions": QUESTION, "background": True}
    with FakeServer(delay=0.03) as policy:
        options = ["--root", tmp_path, "--base-url", policy.base_url, *SMALL_SETTINGS]
        streams = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        with Program(make_command(*options), **streams) as process:
            async with open_session(process) as session:
                run_id = get_answer(await session.call_tool("read_document", arguments))["run_id"]
                await wait_for_prompts(policy.requests, 6)
                process.kill()
        async with connect_over_stdio(*options) as session:
            assert "resume_read" in get_error_text(await session.call_tool("wait", {"run_id": run_id}))
            assert get_answer(await session.call_tool("resume_read", {"run_id": run_id}))["answer"] == "4711"
        sections = get_sections([body["messages"][0]["content"] for body in policy.requests])
    assert len(sections) - len(set(sections)) <= 1


async def test_reads_that_end_with_the_server_can_be_resumed(tmp_path) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.02)
    async with connect(tmp_path, policy) as session:
        run_id = get_answer(await session.call_tool("read_document", {**ARGUMENTS, "background": True}))["run_id"]
        await wait_for_prompts(policy.prompts, 4)
    prompt_count = len(policy.prompts)
    await asyncio.sleep(0.1)
    assert len(policy.prompts) == prompt_count
    async with connect(tmp_path) as session:
        assert get_answer(await session.call_tool("resume_read", {"run_id": run_id}))["answer"] == "4711"


async def test_unknown_run_ids_and_too_long_questions_are_errors(tmp_path) -> None:
    async with connect(tmp_path) as session:
        for tool in ("wait", "cancel_read", "resume_read"):
            assert "nope" in get_error_text(await session.call_tool(tool, {"run_id": "nope"}))
        arguments = {**ARGUMENTS, "questions": "why " * 100, "background": True}
        assert "question has" in get_error_text(await session.call_tool("read_document", arguments))


def test_the_client_settings_in_the_docs_name_the_command() -> None:
    docs = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()
    settings = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", docs, re.S)]
    assert [*map(list, settings)] == [["mcpServers"]]
    for setting in settings:
        ((name, server),) = setting["mcpServers"].items()
        assert (name, server["command"], server["args"][:2]) == ("memagent", "memagent", ["mcp", "--root"])
