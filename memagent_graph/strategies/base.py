"""The strategy seam: what a way of reading has to provide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from langgraph.graph import StateGraph

    from memagent_graph.reading.state import ReaderContext, ReaderInput, ReaderOutput, ReaderState

    GraphBuilder: TypeAlias = StateGraph[ReaderState, ReaderContext, ReaderInput, ReaderOutput]
else:
    GraphBuilder: TypeAlias = Any


class Strategy(Protocol):
    """A topology. The steps in `memagent_graph.reading.nodes` are its material; it may add steps of its own."""

    @property
    def name(self) -> str:
        """The strategy's name, for results and logs."""
        ...

    def wire(self, builder: GraphBuilder) -> None:
        """Add nodes and edges, from START to END.

        The reader resumes a stopped or edited run behind `update_memory`, so a node of that name must exist, and
        what follows it must read on.
        """
        ...
