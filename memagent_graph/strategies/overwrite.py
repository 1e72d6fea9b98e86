"""The paper's strategy: one chunk after the other, the whole memory written anew at each."""

from __future__ import annotations

from dataclasses import dataclass

from langgraph.graph import END, START

from memagent_graph.reading.nodes import answer, as_route, as_runnable, open_document, read_chunk, update_memory
from memagent_graph.reading.state import ReaderState
from memagent_graph.strategies.base import GraphBuilder


@dataclass(frozen=True)
class Overwrite:
    """read_chunk -> update_memory -> ... -> read_chunk -> answer.

    `update_memory` follows itself while it could choose the next chunk on the way; `read_chunk` begins, ends and stops
    a read, and waits for live streams.
    """

    name: str = "overwrite"

    def wire(self, builder: GraphBuilder) -> None:
        """Add the paper's loop."""
        builder.add_node("open_document", as_runnable(open_document))
        builder.add_node("read_chunk", as_runnable(read_chunk))
        builder.add_node("update_memory", as_runnable(update_memory, follows_itself=_has_chunk))
        builder.add_node("answer", as_runnable(answer))
        builder.add_edge(START, "open_document")
        builder.add_edge("open_document", "read_chunk")
        builder.add_conditional_edges("read_chunk", as_route(_after_read_chunk), ["update_memory", "answer", END])
        builder.add_conditional_edges("update_memory", as_route(_after_update), ["update_memory", "read_chunk"])
        builder.add_edge("answer", END)


def _after_read_chunk(state: ReaderState) -> str:
    if state.get("stop_reason"):
        return END
    return "update_memory" if _has_chunk(state) else "answer"


def _after_update(state: ReaderState) -> str:
    return "update_memory" if _has_chunk(state) else "read_chunk"


def _has_chunk(state: ReaderState) -> bool:
    return state.get("span") is not None
