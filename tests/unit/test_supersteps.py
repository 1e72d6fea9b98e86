"""Chunks share a superstep of LangGraph where nobody can see between them, and nothing else differs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from support.scripts import make_document, read_perfectly

from memagent_graph import Limits, MemAgent, ReadResult, ScriptedPolicy, StopReason, UpdateRule, UpdateRules
from memagent_graph.errors import PolicyError

TEXT = make_document({0.3: "The key of harbor is 4711.", 0.7: "The key of castle is 12."}, words=600)
QUESTION = "What is the key of harbor?"


class TaskNotingPolicy(ScriptedPolicy):
    """LangGraph runs a superstep's node in a task of its own; this notes in which each update was asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tasks: list[Any] = []

    async def complete(self, prompt, sampling):
        if "<section>" in prompt[0]["content"]:
            self.tasks.append(asyncio.current_task())
        return await super().complete(prompt, sampling)

    @property
    def supersteps(self) -> int:
        return len(set(self.tasks))


@pytest.fixture
def policy() -> TaskNotingPolicy:
    return TaskNotingPolicy(read_perfectly)


async def test_all_chunks_share_a_superstep_if_only_the_result_is_asked_for(make_reader, policy) -> None:
    result = await make_reader(policy).aread(TEXT, QUESTION)
    assert result.answer == "4711"
    assert len(policy.tasks) == result.chunks_read > 5
    assert policy.supersteps == 1


class TestEachChunkHasItsOwn:
    async def test_each_chunk_has_a_superstep_if_updates_are_streamed(self, make_reader, policy) -> None:
        async for _ in make_reader(policy).astream(TEXT, QUESTION):
            pass
        assert policy.supersteps == len(policy.tasks) > 5

    async def test_each_chunk_has_a_superstep_if_the_reader_saves_checkpoints(self, make_reader, policy) -> None:
        agent = make_reader(policy, checkpoints=InMemorySaver())
        await agent.aread(TEXT, QUESTION, run_id="r")
        assert policy.supersteps == len(policy.tasks) == len(await agent.ahistory("r")) > 5

    async def test_each_chunk_has_a_superstep_if_callbacks_listen(self, make_reader, policy) -> None:
        agent = make_reader(policy)

        async def read(question: str) -> ReadResult:
            return await agent.aread(TEXT, question)

        chain = RunnableLambda(read)
        await chain.ainvoke(QUESTION, {"callbacks": [BaseCallbackHandler()]})
        assert policy.supersteps == len(policy.tasks) > 5


async def both_ways(agent: MemAgent, limits: Limits | None = None) -> tuple[ReadResult, ReadResult]:
    """A read's result, and that of a read whose updates were streamed, without what differs between any two reads."""
    read = await agent.aread(TEXT, QUESTION, run_id="read", limits=limits)
    parts = [part async for part in agent.astream(TEXT, QUESTION, run_id="stream", limits=limits)]
    results = read, parts[-1]
    assert isinstance(results[1], ReadResult)
    assert results[1].updates == tuple(parts[:-1])
    same = [
        replace(
            result,
            run_id="",
            usage=replace(result.usage, seconds=0),
            updates=tuple(replace(update, seconds=0) for update in result.updates),
        )
        for result in results
    ]
    return same[0], same[1]


@pytest.mark.parametrize("limits", [None, Limits(max_chunks=1), Limits(max_chunks=4), Limits(max_tokens_total=900)])
async def test_the_result_is_that_of_a_streamed_read(make_reader, limits) -> None:
    read, streamed = await both_ways(make_reader(), limits)
    assert read == streamed
    assert (read.stop_reason is StopReason.ANSWERED) == (limits is None)


async def test_events_and_run_log_are_those_of_a_streamed_read(make_reader, log) -> None:
    def script(prompt: str) -> str:
        return "" if "<section>" in prompt and "word30 " in prompt else read_perfectly(prompt)

    rules = UpdateRules(empty=UpdateRule.RETRY, retries=1)
    read, streamed = await both_ways(make_reader(ScriptedPolicy(script), rules=rules, run_log=log))
    assert read == streamed
    assert read.events
    same = attrgetter("position", "role", "slot", "attempt", "outcome", "text", "reads")
    rows, streamed_rows = ([same(row) for row in log.conversations(run_id)] for run_id in ("read", "stream"))
    assert rows == streamed_rows
    assert len({conversation.call_id for conversation in log.conversations("read")}) > 5
    assert log.get("read").stop_reason == log.get("stream").stop_reason


async def test_a_failure_names_its_own_chunk_and_leaves_what_was_read_before(make_reader, log) -> None:
    policy = ScriptedPolicy(lambda prompt: PolicyError("gone") if "4711" in prompt else read_perfectly(prompt))
    with pytest.raises(PolicyError, match=r"gone \(run r, chunk \d+\)") as caught:
        await make_reader(policy, run_log=log).aread(TEXT, QUESTION, run_id="r")
    assert caught.value.run_id == "r"
    assert caught.value.chunk_index == len(policy.prompts) - 1 > 1
    assert [conversation.position for conversation in log.conversations("r")] == list(range(len(policy.prompts) - 1))
    assert log.get("r").stop_reason is None


@pytest.mark.parametrize("delay", [0.0, 0.02])
async def test_a_cancelled_read_asks_for_no_further_chunk(make_reader, delay) -> None:
    """Also where the policy never waits."""
    reading: list[asyncio.Task[Any]] = []

    def script(prompt: str) -> str:
        if len(policy.prompts) == 3:
            reading[0].cancel()
        return read_perfectly(prompt)

    policy = ScriptedPolicy(script, delay=delay)
    reading.append(asyncio.ensure_future(make_reader(policy, run_log=False).aread(TEXT, QUESTION)))
    with pytest.raises(asyncio.CancelledError):
        await reading[0]
    await asyncio.sleep(3 * delay)
    assert len(policy.prompts) <= 4
