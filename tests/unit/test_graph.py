from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from support.scripts import document_with, perfect_reader
from typing_extensions import TypedDict

from memagent_graph import (
    ANSWER,
    UPDATE,
    LineState,
    MemAgent,
    Overwrite,
    ReaderState,
    ScriptedPolicy,
    Strategy,
    build_graph,
)
from memagent_graph.errors import MemAgentError, PolicyError
from memagent_graph.reading.steps import answer, read_chunk, update_memory

TEXT = document_with({0.5: "The key of harbor is 4711."}, words=2000)
QUESTION = "What is the key of harbor?"
INPUT = {"question": QUESTION, "document": TEXT}
TIGHT: Any = {"recursion_limit": 25}
"""What langchain-core puts into every config that has no limit of its own; reading TEXT takes more steps."""


@pytest.fixture
def reader(make_reader) -> MemAgent:
    return make_reader()


@pytest.fixture
def graph(reader):
    return reader.graph()


class ParentState(TypedDict, total=False):
    question: str
    document: Any
    answer: str


def parent_of(node: Any) -> StateGraph:
    builder = StateGraph(ParentState)
    builder.add_node("reader", node)
    builder.add_edge(START, "reader")
    builder.add_edge("reader", END)
    return builder


class TestRecursionLimitsOfCallersDoNotReachIt:
    def test_as_a_bare_graph(self, graph) -> None:
        assert graph.invoke(INPUT, TIGHT)["answer"] == "4711"

    async def test_as_a_subgraph_node(self, graph) -> None:
        parent = parent_of(graph).compile()
        assert (await parent.ainvoke(INPUT, TIGHT))["answer"] == "4711"
        assert parent.invoke(INPUT, TIGHT)["answer"] == "4711"

    async def test_in_a_tool(self, graph) -> None:
        @tool
        async def read(question: str) -> str:
            """Read the document."""
            return (await graph.ainvoke({"question": question, "document": TEXT}))["answer"]

        assert await read.ainvoke({"question": QUESTION}, TIGHT) == "4711"


def test_a_parents_context_does_not_replace_the_readers(graph) -> None:
    class Other(TypedDict):
        user: str

    builder = StateGraph(ParentState, context_schema=Other)
    builder.add_node("reader", graph)
    builder.add_edge(START, "reader")
    assert builder.compile().invoke(INPUT, TIGHT, context={"user": "ada"})["answer"] == "4711"


def test_state_never_holds_the_document(make_reader) -> None:
    saver = InMemorySaver()
    reader = make_reader()
    graph = build_graph(reader.graph().reader_context, Overwrite(), checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "t"}}
    graph.invoke(INPUT, config)
    checkpoints = list(saver.list(config))
    assert len(checkpoints) > 50
    assert "word1 and then" not in repr(checkpoints)
    sizes = [len(repr(checkpoint.checkpoint)) for checkpoint in checkpoints]
    assert max(sizes) < 4000


def test_a_second_run_on_the_same_thread_starts_afresh(reader) -> None:
    graph = build_graph(reader.graph().reader_context, Overwrite(), checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    first = graph.invoke(INPUT, config)
    second = graph.invoke({"question": QUESTION, "document": "nothing in here at all"}, config)
    assert (first["answer"], second["answer"]) == ("4711", "yet")
    assert second["chunks_read"] == 1
    assert second["run_id"] != first["run_id"]


@pytest.mark.parametrize("sync", [True, False])
async def test_as_a_node_it_resumes_to_the_exact_chunk_with_its_parents_checkpointer(
    make_reader, tmp_path, sync
) -> None:
    broken = True

    def script(prompt: str):
        if broken and "4711" in prompt:
            return PolicyError("gone")
        return perfect_reader(prompt)

    policy = ScriptedPolicy(script)
    node = make_reader(policy).graph() if sync else await make_reader(policy).agraph()
    path = str(tmp_path / "parent.sqlite")
    config: Any = {"configurable": {"thread_id": "t"}, **TIGHT}
    if sync:
        with SqliteSaver.from_conn_string(path) as saver:
            parent = parent_of(node).compile(checkpointer=saver)
            with pytest.raises(PolicyError):
                parent.invoke(INPUT, config, durability="sync")
            asked, broken = len(policy.prompts), False
            result = parent.invoke(None, config, durability="sync")
    else:
        async with AsyncSqliteSaver.from_conn_string(path) as saver:
            parent = parent_of(node).compile(checkpointer=saver)
            with pytest.raises(PolicyError):
                await parent.ainvoke(INPUT, config, durability="sync")
            asked, broken = len(policy.prompts), False
            result = await parent.ainvoke(None, config, durability="sync")
    assert result["answer"] == "4711"
    sections = [prompt for prompt in policy.prompts if "<section>" in prompt]
    assert len(sections) == len(set(sections)) + 1
    assert asked < len(policy.prompts)


def test_progress_comes_through_the_stream_writer(graph) -> None:
    parts = list(graph.stream(INPUT, stream_mode="custom"))
    kinds = [part["type"] for part in parts]
    assert set(kinds[:-1]) == {"memagent.memory_update"}
    assert kinds[-1] == "memagent.answer"
    assert parts[-1]["answer"] == "4711"
    progress = [part["step"]["progress"] for part in parts]
    assert progress == sorted(progress)
    assert parts[0]["memory"] == "nothing yet"


async def test_progress_also_comes_through_a_parent(graph) -> None:
    parent = parent_of(graph).compile()
    parts = [part async for part in parent.astream(INPUT, stream_mode="custom", subgraphs=True)]
    assert parts[-1][1]["type"] == "memagent.answer"


def test_the_graph_shows_its_steps(graph) -> None:
    nodes = set(graph.get_graph().nodes)
    assert nodes == {"__start__", "open_document", "read_chunk", "update_memory", "answer", "__end__"}


def test_the_drawn_graph_is_the_graph_that_runs(graph) -> None:
    nodes = [node for part in graph.stream(INPUT, stream_mode="updates") for node in part]
    chunks = nodes.count("update_memory")
    assert chunks > 5
    assert nodes == ["open_document", *["read_chunk", "update_memory"] * chunks, "read_chunk", "answer"]


def test_its_input_schema_asks_for_a_question_and_a_document(graph) -> None:
    assert {"question", "document"} <= set(graph.get_input_jsonschema()["properties"])


@pytest.mark.parametrize("wrong", [{"question": QUESTION}, {"document": TEXT}, {"question": 3, "document": TEXT}])
def test_incomplete_input_is_named(graph, wrong) -> None:
    with pytest.raises(MemAgentError, match='"question"'):
        graph.invoke(wrong)


def test_a_strategy_can_be_wired_from_the_same_steps(reader) -> None:
    """Read only the first chunk: another topology, no step changed."""

    class FirstChunkOnly(Strategy):
        name = "first_chunk_only"
        roles = (UPDATE, ANSWER)
        state = LineState

        def wire(self, graph) -> None:
            for step in (read_chunk, update_memory, answer):
                graph.add_node(step.__name__, step)
            for left, right in pairwise(("open_document", "read_chunk", "update_memory", "answer", END)):
                graph.add_edge(left, right)

    graph = build_graph(reader.graph().reader_context, FirstChunkOnly())
    state: ReaderState = graph.invoke({"question": QUESTION, "document": "The key of harbor is 8. " + TEXT})
    assert state["chunks_read"] == 1
    assert state["answer"] == "8"
