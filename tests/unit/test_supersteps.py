"""Chunks share a superstep of LangGraph where nothing observes single chunks; the results do not change."""

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


class TaskRecordingPolicy(ScriptedPolicy):
    """Records the asyncio task of each update: LangGraph runs the node of each superstep in a new task."""

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
def policy() -> TaskRecordingPolicy:
    return TaskRecordingPolicy(read_perfectly)


async def test_all_chunks_share_a_superstep_if_only_the_result_is_needed(make_reader, policy) -> None:
    result = await make_reader(policy).aread(TEXT, QUESTION)
    assert result.answer == "4711"
    assert len(policy.tasks) == result.chunks_read > 5
    assert policy.supersteps == 1


class TestSuperstepPerChunk:
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


async def read_and_stream(agent: MemAgent, limits: Limits | None = None) -> tuple[ReadResult, ReadResult]:
    """Return the results of a read and of a streamed read, without run ids and times."""
    result = await agent.aread(TEXT, QUESTION, run_id="read", limits=limits)
    *updates, streamed = [item async for item in agent.astream(TEXT, QUESTION, run_id="stream", limits=limits)]
    assert isinstance(streamed, ReadResult)
    assert streamed.updates == tuple(updates)
    comparable = [
        replace(
            result,
            run_id="",
            usage=replace(result.usage, seconds=0),
            updates=tuple(replace(update, seconds=0) for update in result.updates),
        )
        for result in (result, streamed)
    ]
    return comparable[0], comparable[1]


@pytest.mark.parametrize("limits", [None, Limits(max_chunks=1), Limits(max_chunks=4), Limits(max_tokens_total=900)])
async def test_a_read_has_the_result_of_a_streamed_read(make_reader, limits) -> None:
    result, streamed = await read_and_stream(make_reader(), limits)
    assert result == streamed
    assert (result.stop_reason is StopReason.ANSWERED) == (limits is None)


async def test_a_read_has_the_events_and_log_of_a_streamed_read(make_reader, log) -> None:
    def script(prompt: str) -> str:
        return "" if "<section>" in prompt and "word30 " in prompt else read_perfectly(prompt)

    rules = UpdateRules(empty=UpdateRule.RETRY, retries=1)
    result, streamed = await read_and_stream(make_reader(ScriptedPolicy(script), rules=rules, run_log=log))
    assert result == streamed
    assert result.events
    get_fields = attrgetter("position", "role", "slot", "attempt", "outcome", "text", "reads")
    rows, streamed_rows = ([get_fields(row) for row in log.conversations(run_id)] for run_id in ("read", "stream"))
    assert rows == streamed_rows
    assert len({conversation.call_id for conversation in log.conversations("read")}) > 5
    assert log.get("read").stop_reason == log.get("stream").stop_reason


async def test_a_failure_names_its_chunk_and_keeps_the_log_of_earlier_chunks(make_reader, log) -> None:
    policy = ScriptedPolicy(lambda prompt: PolicyError("gone") if "4711" in prompt else read_perfectly(prompt))
    with pytest.raises(PolicyError, match=r"gone \(run r, chunk \d+\)") as error:
        await make_reader(policy, run_log=log).aread(TEXT, QUESTION, run_id="r")
    assert error.value.run_id == "r"
    assert error.value.chunk_index == len(policy.prompts) - 1 > 1
    assert [conversation.position for conversation in log.conversations("r")] == list(range(len(policy.prompts) - 1))
    assert log.get("r").stop_reason is None


@pytest.mark.parametrize("delay", [0.0, 0.02])
async def test_a_cancelled_read_asks_for_no_further_chunk(make_reader, delay) -> None:
    """Also if the policy never waits."""
    read_tasks: list[asyncio.Task[Any]] = []

    def script(prompt: str) -> str:
        if len(policy.prompts) == 3:
            read_tasks[0].cancel()
        return read_perfectly(prompt)

    policy = ScriptedPolicy(script, delay=delay)
    read_tasks.append(asyncio.ensure_future(make_reader(policy, run_log=False).aread(TEXT, QUESTION)))
    with pytest.raises(asyncio.CancelledError):
        await read_tasks[0]
    await asyncio.sleep(3 * delay)
    assert len(policy.prompts) <= 4
