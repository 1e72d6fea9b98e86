from __future__ import annotations

from typing import Any

import pytest
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from support.scripts import document_with
from typing_extensions import TypedDict

from memagent_graph import (
    MemAgent,
    Overwrite,
    build_graph,
)
from memagent_graph.errors import MemAgentError

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


async def test_recursion_limits_of_callers_do_not_reach_it(graph) -> None:
    @tool
    async def read(question: str) -> str:
        """Read the document."""
        return (await graph.ainvoke({"question": question, "document": TEXT}))["answer"]

    assert graph.invoke(INPUT, TIGHT)["answer"] == "4711"
    assert await read.ainvoke({"question": QUESTION}, TIGHT) == "4711"


def test_a_parents_context_does_not_replace_the_readers(graph) -> None:
    builder = StateGraph(
        TypedDict("Parent", {"question": str, "document": str, "answer": str}),
        context_schema=TypedDict("Context", {"user": str}),
    )
    builder.add_node("reader", graph)
    builder.set_entry_point("reader")
    assert builder.compile().invoke(INPUT, TIGHT, context={"user": "ada"})["answer"] == "4711"


def test_state_never_holds_the_document(reader) -> None:
    saver = InMemorySaver()
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


def test_progress_comes_through_the_stream_writer(graph) -> None:
    parts = list(graph.stream(INPUT, stream_mode="custom"))
    kinds = [part["type"] for part in parts]
    assert set(kinds[:-1]) == {"memagent.memory_update"}
    assert kinds[-1] == "memagent.answer"
    assert parts[-1]["answer"] == "4711"
    progress = [part["step"]["progress"] for part in parts]
    assert progress == sorted(progress)
    assert parts[0]["memory"] == "nothing yet"


def test_the_drawn_graph_is_the_graph_that_runs(graph) -> None:
    nodes = [node for part in graph.stream(INPUT, stream_mode="updates") for node in part]
    chunks = nodes.count("update_memory")
    assert chunks > 5
    assert nodes == ["open_document", *["read_chunk", "update_memory"] * chunks, "read_chunk", "answer"]
    assert set(graph.get_graph().nodes) == {"__start__", *nodes, "__end__"}


def test_its_input_schema_asks_for_a_question_and_a_document(graph) -> None:
    assert {"question", "document"} <= set(graph.get_input_jsonschema()["properties"])


@pytest.mark.parametrize("wrong", [{"question": QUESTION}, {"document": TEXT}, {"question": 3, "document": TEXT}])
def test_incomplete_input_is_named(graph, wrong) -> None:
    with pytest.raises(MemAgentError, match='"question"'):
        graph.invoke(wrong)
