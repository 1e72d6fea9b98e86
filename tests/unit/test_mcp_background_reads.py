"""Reads over MCP that outlive the requests that began them: no time-out, cancellation or kill loses one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, McpError, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.shared.memory import create_connected_server_and_client_session
from support.fake_server import FakeServer
from support.scripts import document_with, part, perfect_reader

from memagent_graph import Budget, MemAgent, PolicyError, ScriptedPolicy, load_prompts
from memagent_mcp import make_server

TEXT = document_with({0.3: "The key of harbor is 4711.", 0.62: "The key of castle is 1234."}, words=600)
QUESTION = "What is the key of harbor?"
ASK: dict[str, Any] = {"text": TEXT, "questions": QUESTION}
SMALL_BUDGET = Budget(context_window=900, question_tokens=50, memory_tokens=60, chunk_tokens=100, answer_tokens=60)
SMALL = ["--tokenizer", "embedded", "--context-window", "900", "--question-tokens", "50", "--memory-tokens", "60",
         "--chunk-tokens", "100", "--answer-tokens", "60"]  # fmt: skip


def reader_of(policy: Any, folder: Path, **options: Any) -> MemAgent:
    given: Any = {"tokenizer": "embedded", "budget": SMALL_BUDGET, "prompts": load_prompts(), "store": folder / "texts"}
    return MemAgent(policy, **{**given, "checkpoints": folder / "checkpoints.sqlite", **options})


@asynccontextmanager
async def connected(reader: MemAgent, **options: Any) -> AsyncIterator[ClientSession]:
    async with reader:
        server = make_server(reader, **options)
        async with create_connected_server_and_client_session(server) as session:
            yield session
        await server.aclose()


def answer_of(result: types.CallToolResult) -> dict[str, Any]:
    assert not result.isError, said(result)
    assert result.structuredContent
    answer: dict[str, Any] = result.structuredContent["answers"][0]
    return answer


def said(result: types.CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, types.TextContent)
    return content.text


def sections(prompts: list[str]) -> list[str]:
    return [part(prompt, "section") for prompt in prompts if "<section>" in prompt]


async def until_asked(prompts: list[str], number: int) -> None:
    async with asyncio.timeout(20):
        while len(prompts) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def until_listed(session: ClientSession) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            listed = await session.call_tool("list_runs", {})
            runs: list[dict[str, Any]] = listed.structuredContent["runs"]  # type: ignore[index]
            if runs:
                (run,) = runs
                return run
            await asyncio.sleep(0.005)


async def test_a_read_in_the_background_gives_its_run_id_at_once_and_its_answer_to_whoever_waits(tmp_path) -> None:
    policy = ScriptedPolicy(perfect_reader, delay=0.01)
    async with connected(reader_of(policy, tmp_path)) as session:
        both = {**ASK, "questions": [QUESTION, "What is the key of castle?"], "background": True}
        begun = await session.call_tool("read_document", both)
        first, second = begun.structuredContent["answers"]  # type: ignore[index]
        assert (first["is_reading"], second["is_reading"]) == (True, True)
        assert first["answer"] is None
        assert "still being read" in said(begun)
        assert "wait" in said(begun)
        assert len(policy.prompts) < 5
        heard: list[float] = []

        async def hear(progress: float, total: float | None, message: str | None) -> None:
            heard.append(progress)

        harbor = answer_of(await session.call_tool("wait", {"run_id": first["run_id"]}, progress_callback=hear))
        assert (harbor["answer"], harbor["is_reading"]) == ("4711", False)
        assert harbor["evidence"]
        assert (heard, heard[-1]) == (sorted(heard), 1.0)
        assert len(heard) > 5
        castle = answer_of(await session.call_tool("wait", {"run_id": second["run_id"]}))
        assert castle["answer"] == "1234"
        again = answer_of(await session.call_tool("wait", {"run_id": first["run_id"]}))
        assert again == harbor


async def test_a_wait_ends_after_its_seconds_and_says_how_far_the_read_is(tmp_path) -> None:
    policy = ScriptedPolicy(perfect_reader, delay=0.02)
    async with connected(reader_of(policy, tmp_path)) as session:
        begun = answer_of(await session.call_tool("read_document", {**ASK, "background": True}))
        await until_asked(policy.prompts, 4)
        far = answer_of(await session.call_tool("wait", {"run_id": begun["run_id"], "seconds": 0.01}))
        assert far["is_reading"]
        assert 0 < far["progress"] < 1
        assert answer_of(await session.call_tool("wait", {"run_id": begun["run_id"]}))["answer"] == "4711"


async def test_after_the_clients_own_time_out_the_same_read_can_be_waited_for(tmp_path) -> None:
    policy = ScriptedPolicy(perfect_reader, delay=0.02)
    async with connected(reader_of(policy, tmp_path)) as session:
        with pytest.raises(McpError, match="Timed out"):
            await session.call_tool("read_document", ASK, read_timeout_seconds=timedelta(seconds=0.3))
        run = await until_listed(session)  # on a busy machine the time-out may come before the read has begun
        assert answer_of(await session.call_tool("wait", {"run_id": run["run_id"]}))["answer"] == "4711"
    read = sections(policy.prompts)
    assert len(read) == len(set(read)), "no chunk was read twice"


@pytest.mark.parametrize("way", ["tool", "notification"])
async def test_a_cancelled_read_is_continued_at_its_chunk(tmp_path, way) -> None:
    policy = ScriptedPolicy(perfect_reader, delay=0.02)
    async with connected(reader_of(policy, tmp_path)) as session:
        if way == "tool":
            run_id = answer_of(await session.call_tool("read_document", {**ASK, "background": True}))["run_id"]
            await until_asked(policy.prompts, 5)
            cancelled = answer_of(await session.call_tool("cancel_read", {"run_id": run_id}))
            assert (cancelled["is_reading"], cancelled["answer"]) == (False, None)
            assert "resume_read" in cancelled["error"]
        else:
            number = session._request_id
            call = asyncio.create_task(session.call_tool("read_document", ASK))
            await until_asked(policy.prompts, 5)
            gone = types.CancelledNotification(params=types.CancelledNotificationParams(requestId=number))
            await session.send_notification(types.ClientNotification(gone))
            with pytest.raises(McpError, match="cancelled"):
                await call
            run_id = (await until_listed(session))["run_id"]
        asked = len(policy.prompts)
        await asyncio.sleep(0.1)
        assert len(policy.prompts) == asked, "it has ended"
        told = await session.call_tool("wait", {"run_id": run_id})
        assert told.isError
        assert "resume_read" in said(told)
        resumed = answer_of(await session.call_tool("resume_read", {"run_id": run_id}))
        assert (resumed["answer"], resumed["run_id"]) == ("4711", run_id)
        once = answer_of(await session.call_tool("resume_read", {"run_id": run_id}))
        assert once["answer"] == "4711"
    read = sections(policy.prompts)
    assert len(read) - len(set(read)) <= 1, "the chunk that it was at, and no other"


async def test_of_several_questions_one_can_be_cancelled(tmp_path) -> None:
    policy = ScriptedPolicy(perfect_reader, delay=0.02)
    async with connected(reader_of(policy, tmp_path)) as session:
        both = {**ASK, "questions": [QUESTION, "What is the key of castle?"], "background": True}
        first, second = (await session.call_tool("read_document", both)).structuredContent["answers"]  # type: ignore[index]
        await until_asked(policy.prompts, 4)
        await session.call_tool("cancel_read", {"run_id": first["run_id"]})
        assert answer_of(await session.call_tool("wait", {"run_id": second["run_id"]}))["answer"] == "1234"


async def test_a_read_that_stopped_or_failed_is_continued_and_waited_for_in_the_background(tmp_path) -> None:
    down = [False]
    policy = ScriptedPolicy(lambda prompt: PolicyError("gone") if down[0] else perfect_reader(prompt))
    async with connected(reader_of(policy, tmp_path)) as session:
        stopped = answer_of(await session.call_tool("read_document", {**ASK, "max_chunks": 3}))
        assert stopped["stop_reason"] == "max_chunks"
        down[0] = True
        failed = await session.call_tool("resume_read", {"run_id": stopped["run_id"]})
        assert failed.isError
        assert "gone" in said(failed)
        down[0] = False
        begun = answer_of(await session.call_tool("resume_read", {"run_id": stopped["run_id"], "background": True}))
        assert begun["is_reading"]
        done = answer_of(await session.call_tool("wait", {"run_id": stopped["run_id"]}))
        assert done["answer"] == "4711"
    read = sections(policy.prompts)
    assert len(read) - len(set(read)) <= 1


async def test_a_killed_servers_read_is_continued_by_the_next_one(tmp_path) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    arguments = {"path": "book.txt", "questions": QUESTION, "background": True}
    with FakeServer(delay=0.03) as policy:
        options = ["mcp", "--root", str(tmp_path), "--base-url", policy.base_url, *SMALL]
        pid_file = tmp_path / "pid"
        code = f"import os, runpy, sys; open({str(pid_file)!r}, 'w').write(str(os.getpid())); sys.argv[0] = 'memagent'; runpy.run_module('memagent_graph', run_name='__main__')"  # noqa: E501
        parameters = StdioServerParameters(command=sys.executable, args=["-c", code, *options], env=dict(os.environ))
        with open(os.devnull, "w") as errlog:  # noqa: ASYNC230, PTH123
            async with stdio_client(parameters, errlog=errlog) as streams, ClientSession(*streams) as session:
                await session.initialize()
                run_id = answer_of(await session.call_tool("read_document", arguments))["run_id"]
                async with asyncio.timeout(30):
                    while len(policy.requests) < 6:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                os.kill(int(pid_file.read_text()), 9)
            async with stdio_client(parameters, errlog=errlog) as streams, ClientSession(*streams) as session:
                await session.initialize()
                lost = await session.call_tool("wait", {"run_id": run_id})
                assert lost.isError
                assert "resume_read" in said(lost)
                assert answer_of(await session.call_tool("resume_read", {"run_id": run_id}))["answer"] == "4711"
        read = sections([body["messages"][0]["content"] for body in policy.requests])
    assert len(read) - len(set(read)) <= 1


async def test_closing_the_server_ends_its_reads_and_loses_none(tmp_path) -> None:
    policy = ScriptedPolicy(perfect_reader, delay=0.02)
    async with connected(reader_of(policy, tmp_path)) as session:
        run_id = answer_of(await session.call_tool("read_document", {**ASK, "background": True}))["run_id"]
        await until_asked(policy.prompts, 4)
    asked = len(policy.prompts)
    await asyncio.sleep(0.1)
    assert len(policy.prompts) == asked
    async with connected(reader_of(ScriptedPolicy(perfect_reader), tmp_path)) as session:
        assert answer_of(await session.call_tool("resume_read", {"run_id": run_id}))["answer"] == "4711"


async def test_wrong_ids_and_questions_are_told_at_once(tmp_path) -> None:
    async with connected(reader_of(ScriptedPolicy(perfect_reader), tmp_path)) as session:
        for tool in ("wait", "cancel_read", "resume_read"):
            told = await session.call_tool(tool, {"run_id": "nope"})
            assert told.isError
            assert "nope" in said(told)
        long = await session.call_tool("read_document", {**ASK, "questions": "why " * 100, "background": True})
        assert long.isError
        assert "question has" in said(long)


async def test_without_checkpoints_nothing_is_said_to_be_resumable(tmp_path) -> None:
    async with connected(reader_of(ScriptedPolicy(perfect_reader), tmp_path, checkpoints=None)) as session:
        assert "resume_read" not in [tool.name for tool in (await session.list_tools()).tools]
        begun = answer_of(await session.call_tool("read_document", {**ASK, "background": True}))
        assert answer_of(await session.call_tool("wait", {"run_id": begun["run_id"]}))["answer"] == "4711"


async def test_the_server_says_its_own_name_and_version(tmp_path) -> None:
    async with reader_of(ScriptedPolicy(perfect_reader), tmp_path) as reader:
        server = make_server(reader)
        options = server._mcp_server.create_initialization_options()
        assert (options.server_name, options.server_version) == ("memagent", version("memagent-graph"))


def test_the_settings_for_clients_in_the_docs_start_the_server() -> None:
    docs = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()
    settings = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", docs, re.S)]
    assert [*map(list, settings)] == [["mcpServers"]]
    for setting in settings:
        ((name, started),) = setting["mcpServers"].items()
        assert (name, started["command"], started["args"][:2]) == ("memagent", "memagent", ["mcp", "--root"])
