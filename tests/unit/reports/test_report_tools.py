"""Reports over MCP, where a call may be given up before the report is there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.memory import create_connected_server_and_client_session
from support.report_documents import asked_sections, reads_keys_and_writes
from support.scripts import document_with

from memagent_graph import Budget, MemAgent, ScriptedPolicy, load_prompts
from memagent_mcp import make_server

QUESTION = "What is the key of harbor?"


def reader_in(folder: Path, policy: Any) -> MemAgent:
    return MemAgent(
        policy,
        tokenizer="embedded",
        budget=Budget(1500, 60, 60, 100, 200),
        prompts=load_prompts(),
        store=folder / "documents",
        checkpoints=folder / "checkpoints.sqlite",
        run_log=folder / "runs.sqlite",
    )


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, key in (("a", "4711"), ("b", "12")):
        text = document_with({0.4: f"It rained. The key of harbor is {key}. Nobody came."}, words=300)
        (folder / f"{name}.txt").write_text(text.replace("word", f"{name}word"))
    return folder


async def test_over_mcp_the_same_call_waits_for_the_report_and_continues_it_in_another_server(
    tmp_path: Path, files: Path
) -> None:
    policy = ScriptedPolicy(reads_keys_and_writes, delay=0.05)
    arguments = {"question": QUESTION, "paths": ["a.txt", "b.txt"], "questions": [QUESTION]}

    async with reader_in(tmp_path, policy) as reader:
        server = make_server(reader, roots=[files])
        async with create_connected_server_and_client_session(server) as session:
            async with asyncio.timeout(60):
                while len(policy.prompts) < 4:
                    begun = await session.call_tool("write_report", {**arguments, "seconds": 0.01})
            assert begun.structuredContent is not None
            assert begun.structuredContent["is_writing"] is True
            assert begun.structuredContent["report_id"] is None
            assert "same call again" in str(begun.content)
        await server.aclose()
    policy.delay = 0.0
    async with reader_in(tmp_path, policy) as reader:
        server = make_server(reader, roots=[files])
        async with create_connected_server_and_client_session(server) as session:
            ended = await session.call_tool("write_report", arguments)
            assert ended.structuredContent is not None
            assert ended.structuredContent["is_writing"] is False
            assert "The key of harbor is 4711." in ended.structuredContent["markdown"]
            asked = len(policy.prompts)
            again = await session.call_tool("write_report", arguments)
            assert again.structuredContent == ended.structuredContent
            assert len(policy.prompts) == asked
            refused = await session.call_tool("write_report", {**arguments, "paths": ["../runs.sqlite"]})
            assert refused.isError
        await server.aclose()
    sections = asked_sections(policy.prompts)
    assert len(sections) - len(set(sections)) <= 2  # what each of the two documents was at when the server ended


async def test_over_mcp_an_error_is_told_and_the_next_call_tries_again(tmp_path: Path, files: Path) -> None:
    from memagent_graph import PolicyError

    state = {"fails": True}

    def script(prompt: str) -> Any:
        return PolicyError("the server is gone") if state["fails"] else reads_keys_and_writes(prompt)

    arguments = {"question": QUESTION, "paths": ["a.txt"], "questions": [QUESTION]}
    async with reader_in(tmp_path, ScriptedPolicy(script)) as reader:
        server = make_server(reader, roots=[files])
        async with create_connected_server_and_client_session(server) as session:
            failed = await session.call_tool("write_report", arguments)
            assert failed.isError
            assert "the server is gone" in str(failed.content)
            state["fails"] = False
            ended = await asyncio.wait_for(session.call_tool("write_report", arguments), 30)
            assert not ended.isError
        await server.aclose()
