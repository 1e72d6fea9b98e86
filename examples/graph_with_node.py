"""Add a reading node to a LangGraph graph: `python examples/graph_with_node.py FILE QUESTION [THREAD]`.

If you kill it while it reads and start it again with the same thread, it continues at its chunk. Set OPENAI_BASE_URL
to a server, or MEMAGENT_MODEL to a policy (`embedded` finds numbers).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph

from langchain_memagent import memagent_node
from memagent_graph import MemAgent
from memagent_graph.settings import ReadSettings


class State(TypedDict, total=False):
    """The graph's state."""

    path: str
    question: str
    answer: str
    quotes: list[dict[str, Any]]
    report: str


def write_report(state: State) -> State:
    """Write the report; this node stands for the existing nodes of your graph."""
    quotes = "".join(f'\n  "{quote["quote"]}" at {quote["start_char"]}' for quote in state["quotes"])
    return {"report": f"{state['question']} {state['answer']}{quotes}"}


def main(path: str, question: str, thread: str = "example") -> None:
    """Build the graph, run or resume it, and print its report."""
    agent = MemAgent(settings=ReadSettings.from_environment(os.environ))
    builder = StateGraph(State)
    builder.add_node("read", memagent_node(agent, document=lambda state: Path(state["path"]), evidence="quotes"))
    builder.add_node("write_report", write_report)
    builder.add_edge(START, "read")
    builder.add_edge("read", "write_report")
    builder.add_edge("write_report", END)
    with SqliteSaver.from_conn_string("graph.sqlite") as checkpoints:
        graph = builder.compile(checkpointer=checkpoints)
        config: RunnableConfig = {"configurable": {"thread_id": thread}}
        graph_input: State | None = None if graph.get_state(config).next else {"path": path, "question": question}
        for update in graph.stream(graph_input, config, stream_mode="custom"):
            print(f"{update['progress']:.0%}: {update['memory']!r}")
        print(graph.get_state(config).values["report"])


if __name__ == "__main__":
    main(*sys.argv[1:4])
