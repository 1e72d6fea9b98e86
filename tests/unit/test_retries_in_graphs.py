"""The read of a retried node or tool continues, and closing a stream ends its reads."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ToolRetryMiddleware
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt
from support.chat_models import make_chat_model, make_tool_calls
from support.scripts import extract, make_document, read_perfectly
from support.strategies import answer_perfectly
from typing_extensions import TypedDict
from unit.test_node import build_parent

from langchain_memagent import ReadLongDocument, memagent_node
from memagent_graph import Limits, MemAgent, ScriptedPolicy
from memagent_graph.errors import (
    BudgetError,
    DocumentError,
    PermanentError,
    PolicyAuthenticationError,
    PolicyOverloadedError,
    PolicyUnreachableError,
)
from memagent_graph.storage.private_files import get_default_checkpoints_path

MakeReader = Callable[..., MemAgent]
TEXT = make_document({0.3: "The key of harbor is 4711.", 0.8: "The key of castle is 2222."}, words=600)
QUESTION = "What is the key of harbor?"
RETRY = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=4)


class State(TypedDict, total=False):
    question: str | list[str]
    document: Any
    answer: Any
    turns: Annotated[list[str], operator.add]


def make_call(text: str) -> dict[str, Any]:
    """Return a call of the tool on a text."""
    arguments = {"text": text, "questions": [QUESTION]}
    return {"name": "read_long_document", "args": arguments, "id": "call", "type": "tool_call"}


def get_reading(message: Any) -> dict[str, Any]:
    return dict(message.artifact["readings"][0])


class FailingScript:
    """A policy's script that fails once, at the section with `text`, and counts its replies and failures."""

    def __init__(self, text: str = "2222", error: Any = None, script: Callable[[str], str] = read_perfectly) -> None:
        self.text, self.error, self.script = text, error or PolicyOverloadedError("too busy"), script
        self.replies = self.failures = 0

    def __call__(self, prompt: str) -> Any:
        if self.text in extract(prompt, "section") and not self.failures:
            self.failures += 1
            return self.error
        self.replies += 1
        return self.script(prompt)


def compile_graph(node: Any, **options: Any) -> Any:
    return build_parent(node, State, retry_policy=RETRY).compile(**options)


async def run(graph: Any, state: Any, *, sync: bool) -> Any:
    config: Any = {"configurable": {"thread_id": "one"}}
    return graph.invoke(state, config) if sync else await graph.ainvoke(state, config)


def count_calls(make_reader: MakeReader, text: str = TEXT) -> int:
    policy = ScriptedPolicy(read_perfectly)
    make_reader(policy).read(text, QUESTION)
    return len(policy.prompts)


@pytest.mark.parametrize(
    ("sync", "has_checkpoints", "question"),
    [(True, True, QUESTION), (False, False, [QUESTION])],
)
async def test_a_retried_node_continues_at_the_chunk_that_failed(make_reader, sync, has_checkpoints, question) -> None:
    script = FailingScript()
    node = memagent_node(make_reader(ScriptedPolicy(script)))
    graph = compile_graph(node, checkpointer=InMemorySaver() if has_checkpoints else None)
    state = await run(graph, {"question": question, "document": TEXT}, sync=sync)
    assert state["answer"] == ("4711" if isinstance(question, str) else ["4711"])
    assert (script.failures, script.replies) == (1, count_calls(make_reader))


async def test_two_reads_of_a_retried_node_are_not_mixed_up(make_reader) -> None:
    """A node calls a tool twice, and then one with another model; the second read fails."""
    script, calls = FailingScript(), [make_call(TEXT.replace("4711", "1111").replace("2222", "3333")), make_call(TEXT)]
    tool = ReadLongDocument(agent=make_reader(ScriptedPolicy(script)), on_failure="raise")
    other_tool = ReadLongDocument(agent=make_reader(ScriptedPolicy(lambda prompt: "\\boxed{5}", name="other")))

    async def read_both(state: State) -> Any:
        messages = [await tool.ainvoke(call) for call in calls] + [await other_tool.ainvoke(calls[1])]
        return {"answer": [get_reading(message)["answer"] for message in messages]}

    assert (await run(compile_graph(read_both), {}, sync=False))["answer"] == ["1111", "4711", "5"]
    assert (script.failures, script.replies) == (1, 2 * count_calls(make_reader))


async def test_a_node_in_a_loop_reads_anew_at_every_turn_and_in_every_run_on_a_thread(make_reader) -> None:
    policy = ScriptedPolicy(read_perfectly)
    builder = StateGraph(State)
    write: Any = lambda state, result: {"turns": [result.answer]}  # noqa: E731
    builder.add_node("read", memagent_node(make_reader(policy), answer=None, write=write))
    builder.add_edge(START, "read")
    builder.add_conditional_edges("read", lambda state: "read" if len(state["turns"]) % 2 else END, ["read", END])
    graph = builder.compile(checkpointer=InMemorySaver())
    for runs in (1, 2):
        state = await run(graph, {"question": QUESTION, "document": TEXT}, sync=False)
        assert state["turns"] == ["4711"] * 2 * runs
        assert len(policy.prompts) == 2 * runs * count_calls(make_reader)


@pytest.mark.parametrize(("sync", "has_checkpoints"), [(True, True), (False, False)])
async def test_a_tool_retried_by_a_middleware_continues_at_the_chunk_that_failed(
    make_reader, sync, has_checkpoints
) -> None:
    script = FailingScript()
    tool = ReadLongDocument(agent=make_reader(ScriptedPolicy(script)), on_failure="raise")
    model = make_chat_model(
        make_tool_calls(("read_long_document", {"questions": [QUESTION], "text": TEXT})), "It is 4711."
    )
    retries = ToolRetryMiddleware(max_retries=2, initial_delay=0.001, jitter=False)
    agent = create_agent(model, [tool], middleware=[retries], checkpointer=InMemorySaver() if has_checkpoints else None)
    state = await run(agent, {"messages": [("user", QUESTION)]}, sync=sync)
    assert "Answer: 4711" in state["messages"][-2].text
    assert (script.failures, script.replies) == (1, count_calls(make_reader))


def test_an_agent_without_checkpoints_continues_a_read_when_its_model_asks_again(make_reader) -> None:
    script = FailingScript()
    tool = ReadLongDocument(agent=make_reader(ScriptedPolicy(script)))
    read = ("read_long_document", {"questions": [QUESTION], "text": TEXT})
    model = make_chat_model(make_tool_calls(read, prefix="a"), make_tool_calls(read, prefix="b"), "It is 4711.")
    *_, failed, _, message, _ = create_agent(model, [tool]).invoke({"messages": [("user", QUESTION)]})["messages"]
    assert "The read failed" in failed.text
    assert failed.text.endswith("Ask the same question about the same document again to read on from there.")
    assert message.text.startswith("Answer: 4711")
    assert message.artifact["readings"][0]["run_id"] == failed.artifact["readings"][0]["run_id"]
    assert (script.failures, script.replies) == (1, count_calls(make_reader))


def test_a_read_that_failed_in_an_agent_can_be_resumed_by_hand(make_reader) -> None:
    script = FailingScript()
    reader = make_reader(ScriptedPolicy(script))
    tool = ReadLongDocument(agent=reader)
    model = make_chat_model(make_tool_calls(("read_long_document", {"questions": [QUESTION], "text": TEXT})), "Sorry.")
    message = create_agent(model, [tool]).invoke({"messages": [("user", QUESTION)]})["messages"][-2]
    with reader.copy(checkpoints=get_default_checkpoints_path()) as reader_copy:
        assert reader_copy.resume(message.artifact["readings"][0]["run_id"]).answer == "4711"
    assert (script.failures, script.replies) == (1, count_calls(make_reader))


async def test_a_node_executed_again_after_an_interrupt_does_not_exceed_its_limit(make_reader) -> None:
    policy = ScriptedPolicy(read_perfectly)
    tool = ReadLongDocument(agent=make_reader(policy, limits=Limits(max_chunks=3)))

    async def read(state: State) -> Any:
        reading = get_reading(await tool.ainvoke(make_call(TEXT)))
        return {"answer": [interrupt("?"), reading["stop_reason"], reading["chunks_read"]]}

    graph = compile_graph(read, checkpointer=InMemorySaver())
    await run(graph, {}, sync=False)
    assert (await run(graph, Command(resume="yes"), sync=False))["answer"] == ["yes", "max_chunks", 3]
    assert len(policy.prompts) == 3


@pytest.mark.parametrize(
    "error", [DocumentError("gone"), BudgetError("too long"), PolicyAuthenticationError("a wrong key")]
)
async def test_a_permanent_error_is_not_retried(make_reader, error) -> None:
    script = FailingScript(error=error)
    graph = compile_graph(memagent_node(make_reader(ScriptedPolicy(script))))
    with pytest.raises(PermanentError):
        await run(graph, {"question": QUESTION, "document": TEXT}, sync=True)
    assert script.failures == 1
    assert not isinstance(PolicyUnreachableError("no connection"), PermanentError)


async def test_progress_of_branches_never_falls_and_includes_chunks_read_before_a_failure(make_reader) -> None:
    def answer_with_both(prompt: str) -> str:
        reply = answer_perfectly(prompt)
        return "\\boxed{12, then 4711}" if reply == "\\boxed{4711}" else reply

    policy = ScriptedPolicy(FailingScript("4711", script=answer_with_both))
    tool = ReadLongDocument(agent=make_reader(policy, strategy="map_reduce:width=8", branches=3), on_failure="raise")
    text = make_document({0.1: "The key of harbor is 12.", 0.7: "The key of harbor is 4711."}, words=3000)
    model = make_chat_model(make_tool_calls(("read_long_document", {"questions": [QUESTION], "text": text})), "Done.")
    agent = create_agent(model, [tool], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "one"}}
    events: list[Any] = []
    with pytest.raises(PolicyOverloadedError):
        async for event in agent.astream({"messages": [("user", QUESTION)]}, config, stream_mode="custom"):
            events.append(event)
    resumed_events: list[Any] = [event async for event in agent.astream(None, config, stream_mode="custom")]
    reading = get_reading((await agent.aget_state(config)).values["messages"][-2])
    sections = {extract(prompt, "section") for prompt in policy.prompts if "<section>" in prompt}
    assert (reading["answer"], reading["chunks_read"]) == ("12, then 4711", len(sections))
    assert {item["quote"] for item in reading["evidence"]} == {"harbor is 12", "harbor is 4711"}
    for stream in (events, resumed_events):
        progress = [event["progress"] for event in stream]
        assert progress == sorted(progress)
        assert len({event["run_id"] for event in stream}) == 1
    assert events[-1]["progress"] > 0.5
    assert resumed_events[0]["progress"] > 0.5, "chunks read before the failure count"
    assert resumed_events[-1]["progress"] == 1.0
    chunks = {event["chunk_index"] for event in (*events, *resumed_events)} - {None}
    assert chunks == set(range(reading["chunks_read"]))


def build_graph(make_reader: MakeReader, policy: ScriptedPolicy, levels: int, kind: str) -> Any:
    if kind == "agent":
        model = make_chat_model(make_tool_calls(("read_long_document", {"questions": [QUESTION], "text": TEXT})), "OK.")
        return create_agent(model, [ReadLongDocument(agent=make_reader(policy))])
    graph: Any = compile_graph(memagent_node(make_reader(policy)))
    for _ in range(levels):
        graph = compile_graph(graph)
    return graph


@pytest.mark.parametrize(("kind", "levels"), [("node", 0), ("node", 2), ("agent", 0)])
def test_closing_a_stream_ends_the_reads_in_it(make_reader, kind, levels) -> None:
    policy = ScriptedPolicy(read_perfectly, delay=0.05)
    graph = build_graph(make_reader, policy, levels, kind)
    state: Any = {"messages": [("user", QUESTION)]} if kind == "agent" else {"question": QUESTION, "document": TEXT}
    updates = graph.stream(state, stream_mode="custom", subgraphs=True)
    next(updates)
    updates.close()
    calls_made = len(policy.prompts)
    assert calls_made <= 4 < count_calls(make_reader)
    threading.Event().wait(0.2)
    final_calls = len(policy.prompts)
    assert final_calls <= calls_made + 1, "a call in flight may still reach the policy"
    threading.Event().wait(0.2)
    assert len(policy.prompts) == final_calls


def test_closing_the_readers_own_stream_cancels_the_calls_of_other_branches(make_reader) -> None:
    is_cancelled = threading.Event()

    class BlockingPolicy(ScriptedPolicy):
        has_replied = False

        async def complete(self, *arguments: Any, **options: Any) -> Any:
            if not self.has_replied:
                self.has_replied = True
                return await super().complete(*arguments, **options)
            try:
                return await asyncio.sleep(3600)
            except asyncio.CancelledError:
                is_cancelled.set()
                raise

    reader = make_reader(BlockingPolicy(answer_perfectly), strategy="map_reduce")
    updates = reader.graph().stream({"question": QUESTION, "document": TEXT}, stream_mode="custom")
    assert next(updates)["type"] == "memagent.memory_update"
    updates.close()  # would wait for an hour if it waited for the calls
    assert is_cancelled.wait(5)
