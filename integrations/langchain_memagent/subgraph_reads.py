"""One read inside someone else's graph or chain: its callbacks, checkpointer and stream, and a `ReadResult` at the end.

`MemAgent.read` runs apart, on checkpoints of its own. Here the reader's graph is called with the caller's config, so
that a read is a part of the run around it, and goes on at its chunk when that run is resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.types import StateSnapshot

from memagent_graph import MemAgent, ReaderGraph, ReadResult, Trace, TraceStep
from memagent_graph.reading.state_views import result_from_state, trace_steps


class PreparedGraph:
    """A reader's graph, made when it is first needed: only then may its policy be asked what it is.

    Args:
        agent: the reader, or its graph, which is taken as it is.
    """

    def __init__(self, agent: MemAgent | ReaderGraph) -> None:
        self._reader = agent

    def get(self) -> ReaderGraph:
        """The graph. Raises what `MemAgent.graph` raises."""
        if not isinstance(self._reader, ReaderGraph):
            self._reader = self._reader.graph()
        return self._reader

    async def aget(self) -> ReaderGraph:
        """The graph. Raises what `MemAgent.agraph` raises."""
        if not isinstance(self._reader, ReaderGraph):
            self._reader = await self._reader.agraph()
        return self._reader


def read(graph: ReaderGraph, document: Any, question: str, config: RunnableConfig | None = None) -> ReadResult:
    """Read as a part of the run that `config`, or the calling context, belongs to.

    Args:
        graph: from `MemAgent.graph`; it must have no checkpointer of its own.
        document: what `Document.of` takes, or a reference from a `DocumentStore`.
        question: the question.
        config: the caller's; by default that of the runnable around this call, if there is one.

    Raises:
        DocumentError, BudgetError, PolicyError: as `MemAgent.read`.
    """
    config, followed = ensure_config(config), FollowedRead()
    given = {"question": question, "document": document}
    for state in graph.stream(given, config, stream_mode="values"):
        followed.see(state)
    if followed.began_later:
        followed.complete(graph.get_state_history(config))
    return followed.result(graph)


async def aread(graph: ReaderGraph, document: Any, question: str, config: RunnableConfig | None = None) -> ReadResult:
    """`read` for asynchronous code."""
    config, followed = ensure_config(config), FollowedRead()
    given = {"question": question, "document": document}
    async for state in graph.astream(given, config, stream_mode="values"):
        followed.see(state)
    if followed.began_later:
        followed.complete([snapshot async for snapshot in graph.aget_state_history(config)])
    return followed.result(graph)


@dataclass
class FollowedRead:
    """What was seen of a read inside another graph as its states came by."""

    state: Mapping[str, Any] = field(default_factory=dict)
    steps: dict[str, TraceStep] = field(default_factory=dict)

    def see(self, state: Mapping[str, Any]) -> None:
        """Take the next state."""
        self.state = state
        self.steps.update(_steps(state))

    @property
    def trace(self) -> Trace:
        """What was asked, as far as it was seen."""
        return Trace(tuple(self.steps.values()), self.state["document"]["size"])

    @property
    def began_later(self) -> bool:
        """Whether an earlier execution read the first chunks, or all of them."""
        return sum(each.chunk_index is not None for each in self.trace.updates) < int(self.state["chunks_read"])

    def complete(self, snapshots: Iterable[StateSnapshot]) -> None:
        """Add the chunks that were read earlier.

        Behind an edited memory lie two branches; only the one that leads to the newest state counts.
        """
        wanted: str | None = None
        for snapshot in snapshots:
            if wanted is None or snapshot.config["configurable"]["checkpoint_id"] == wanted:
                wanted = snapshot.parent_config["configurable"]["checkpoint_id"] if snapshot.parent_config else ""
                if snapshot.values.get("run_id") == self.state["run_id"]:
                    self.steps = {**_steps(snapshot.values), **self.steps}

    def result(self, graph: ReaderGraph) -> ReadResult:
        """The whole read, as `MemAgent` would have returned it."""
        return result_from_state(self.state, self.trace, graph.reader_context)


def _steps(state: Mapping[str, Any]) -> dict[str, TraceStep]:
    return {step.id: step for step in trace_steps(state.get("steps", ()), state)}
