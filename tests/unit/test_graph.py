"""The compiled graph of a reader: as a subgraph, with a checkpointer, and as a drawing."""

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
"""The default limit of langchain-core; reading TEXT takes more steps."""


def test_the_context_of_a_parent_graph_does_not_replace_that_of_the_reader(make_reader) -> None:
    builder = StateGraph(
        TypedDict("Parent", {"question": str, "document": str, "answer": str}),
        context_schema=TypedDict("Context", {"user": str}),
    )
    builder.add_node("reader", make_reader().graph())
    builder.set_entry_point("reader")
    assert builder.compile().invoke(INPUT, LOW_RECURSION_LIMIT, context={"user": "ada"})["answer"] == "4711"


def test_checkpoints_never_contain_the_document(make_reader) -> None:
    saver = InMemorySaver()
    graph = build_graph(make_reader().graph().reader_context, Overwrite(), checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "t"}}
    graph.invoke(INPUT, config)
    checkpoints = list(saver.list(config))
    assert len(checkpoints) > 50
    assert "word1 and then" not in repr(checkpoints)
    checkpoint_sizes = [len(repr(checkpoint.checkpoint)) for checkpoint in checkpoints]
    assert max(checkpoint_sizes) < 4000


def test_a_second_run_on_a_thread_starts_with_a_new_state(make_reader) -> None:
    graph = build_graph(make_reader().graph().reader_context, Overwrite(), checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    first_state = graph.invoke(INPUT, config)
    second_state = graph.invoke({"question": QUESTION, "document": "nothing in here at all"}, config)
    assert (first_state["answer"], second_state["answer"]) == ("4711", "yet")
    assert second_state["chunks_read"] == 1
    assert second_state["run_id"] != first_state["run_id"]


def test_the_drawn_graph_has_the_nodes_that_run(make_reader) -> None:
    graph = make_reader().graph()
    nodes = [node for update in graph.stream(INPUT, stream_mode="updates") for node in update]
    chunk_count = nodes.count("update_memory")
    assert chunk_count > 5
    assert nodes == ["open_document", *["read_chunk", "update_memory"] * chunk_count, "read_chunk", "answer"]
    assert set(graph.get_graph().nodes) == {"__start__", *nodes, "__end__"}
