from __future__ import annotations

from typing import Any

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from support.scripts import make_document
from typing_extensions import TypedDict

from memagent_graph import Overwrite, build_graph

TEXT = make_document({0.5: "The key of harbor is 4711."}, words=2000)
QUESTION = "What is the key of harbor?"
INPUT = {"question": QUESTION, "document": TEXT}
LOW_RECURSION_LIMIT: Any = {"recursion_limit": 25}
"""What langchain-core puts into every config that has no limit of its own; reading TEXT takes more steps."""


def test_a_parents_context_does_not_replace_the_readers(make_reader) -> None:
    builder = StateGraph(
        TypedDict("Parent", {"question": str, "document": str, "answer": str}),
        context_schema=TypedDict("Context", {"user": str}),
    )
    builder.add_node("reader", make_reader().graph())
    builder.set_entry_point("reader")
    assert builder.compile().invoke(INPUT, LOW_RECURSION_LIMIT, context={"user": "ada"})["answer"] == "4711"


def test_state_never_holds_the_document(make_reader) -> None:
    saver = InMemorySaver()
    graph = build_graph(make_reader().graph().reader_context, Overwrite(), checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "t"}}
    graph.invoke(INPUT, config)
    checkpoints = list(saver.list(config))
    assert len(checkpoints) > 50
    assert "word1 and then" not in repr(checkpoints)
    sizes = [len(repr(checkpoint.checkpoint)) for checkpoint in checkpoints]
    assert max(sizes) < 4000


def test_a_second_run_on_the_same_thread_starts_afresh(make_reader) -> None:
    graph = build_graph(make_reader().graph().reader_context, Overwrite(), checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    first = graph.invoke(INPUT, config)
    second = graph.invoke({"question": QUESTION, "document": "nothing in here at all"}, config)
    assert (first["answer"], second["answer"]) == ("4711", "yet")
    assert second["chunks_read"] == 1
    assert second["run_id"] != first["run_id"]


def test_the_drawn_graph_is_the_graph_that_runs(make_reader) -> None:
    graph = make_reader().graph()
    nodes = [node for part in graph.stream(INPUT, stream_mode="updates") for node in part]
    chunks = nodes.count("update_memory")
    assert chunks > 5
    assert nodes == ["open_document", *["read_chunk", "update_memory"] * chunks, "read_chunk", "answer"]
    assert set(graph.get_graph().nodes) == {"__start__", *nodes, "__end__"}
