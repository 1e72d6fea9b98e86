"""The strategy of the paper: chunks are read in order, and the policy rewrites the whole memory at each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from langgraph.graph import END

from memagent_graph.reading.state import LineState
from memagent_graph.reading.steps import Route, Step, answer, read_chunk, route_after_read_chunk, update_memory
from memagent_graph.reading.strategy import OPEN, Strategy, StrategyGraph
from memagent_graph.roles import ANSWER, UPDATE, Role


@dataclass(frozen=True)
class Overwrite(Strategy):
    """read_chunk -> update_memory -> ... -> read_chunk -> answer (MemAgent, arXiv 2507.02259)."""

    name: ClassVar[str] = "overwrite"
    roles: ClassVar[tuple[Role, ...]] = (UPDATE, ANSWER)
    state: ClassVar[type] = LineState
    loop: ClassVar[tuple[str, str]] = ("read_chunk", "update_memory")

    def wire(self, graph: StrategyGraph) -> None:
        """Add the loop of the paper."""
        wire_line(graph, "update_memory", update_memory)


def wire_line(graph: StrategyGraph, node: str, read: Step, *, leave: Route | None = None) -> None:
    """Wire the loop of a strategy that reads one chunk after the other.

    Args:
        graph: the graph of the strategy.
        node: the name of the step that reads the chosen chunk.
        read: the step.
        leave: the route after the step, if it may end the loop: to "read_chunk" or to "answer".
    """
    graph.add_node("read_chunk", read_chunk)
    graph.add_node(node, read)
    graph.add_node("answer", answer)
    graph.add_edge(OPEN, "read_chunk")
    graph.add_conditional_edges("read_chunk", route_after_read_chunk(node), [node, "answer", END])
    if leave is None:
        graph.add_edge(node, "read_chunk")
    else:
        graph.add_conditional_edges(node, leave, ["read_chunk", "answer"])
    graph.add_edge("answer", END)
