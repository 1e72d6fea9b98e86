"""The strategy of the paper: chunks are read in order, and the policy rewrites the whole memory at each chunk.

`SequentialStrategy` is the loop, for strategies that differ in what the memory is, or when it is rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NotRequired

from langgraph.graph import END

from memagent_graph.prompts import read_template
from memagent_graph.reading.state import SequentialState
from memagent_graph.reading.steps import (
    Change,
    StepContext,
    answer,
    read_chunk,
    read_with_memory,
    route_after_read_chunk,
)
from memagent_graph.reading.strategy import OPEN_DOCUMENT, Strategy, StrategyGraph
from memagent_graph.roles import ANSWER, UPDATE, Role


class PassState(SequentialState):
    """The state of a read that may read the document several times."""

    pass_number: NotRequired[int]
    """Counted from 1; None means 1."""
    earlier_chunks: NotRequired[int]
    """The number of chunks that the previous passes read."""
    earlier_memory: NotRequired[str]
    """The memory after the previous passes."""


@dataclass(frozen=True)
class SequentialStrategy(Strategy):
    """A strategy that reads one chunk after the other, and carries the memory on from pass to pass.

    In a later pass the policy can note what did not seem relevant before, such as a fact about a person who is named
    only in a later chunk.
    """

    passes: int = field(default=1, kw_only=True)
    """Maximum number of times to read the document. A pass that leaves the memory unchanged is the last. A document of
    one chunk is read once."""
    state: ClassVar[type] = PassState
    update_node: ClassVar[str] = "update_memory"
    """The node that shows the policy the memory and the chosen chunk, in the first of the `roles`."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "passes")

    def wire(self, graph: StrategyGraph) -> None:
        """Add the loop of the paper, between the choice of a chunk and the step that reads it, and the answer."""
        graph.add_loop("read_chunk", self._read_chunk, self.update_node, self._update_memory)
        graph.add_node("answer", answer)
        graph.add_edge(OPEN_DOCUMENT, "read_chunk")
        graph.add_conditional_edges(
            "read_chunk", route_after_read_chunk(self.update_node), [self.update_node, "answer", END]
        )
        self.wire_after_update(graph)
        graph.add_edge("answer", END)

    def wire_after_update(self, graph: StrategyGraph) -> None:
        """Add the edge back to the choice of a chunk."""
        graph.add_edge(self.update_node, "read_chunk")

    async def _read_chunk(self, state: PassState, step: StepContext) -> Change:
        """Choose the next chunk; at the document's end the first one, if there is another pass."""
        change = await read_chunk(state, step)
        pass_number, memory = state.get("pass_number") or 1, state.get("memory") or ""
        is_last_pass = pass_number >= self.passes or memory == (state.get("earlier_memory") or "")
        chunks = state.get("chunks_read") or 0
        has_chunk = change.get("span") is not None
        if is_last_pass or has_chunk or "stop_reason" in change or chunks - (state.get("earlier_chunks") or 0) < 2:
            return change
        pass_start = {
            "cursor": None,
            "pass_number": pass_number + 1,
            "earlier_chunks": chunks,
            "earlier_memory": memory,
        }
        next_pass_state: Any = {**state, **pass_start}
        return {**pass_start, **await read_chunk(next_pass_state, step)}

    async def _update_memory(self, state: PassState, step: StepContext) -> Change:
        return {"memory": (await read_with_memory(self.roles[0], state, step)).text}


@dataclass(frozen=True)
class Overwrite(SequentialStrategy):
    """read_chunk -> update_memory -> ... -> read_chunk -> answer (MemAgent, arXiv 2507.02259)."""

    name: ClassVar[str] = "overwrite"
    roles: ClassVar[tuple[Role, ...]] = (UPDATE, ANSWER)


REFINE = Role("refine", template=read_template("refine"), fallback="update")
"""Writes a new draft from a draft and the next chunk. A policy with its own prompts updates the draft like a memory."""


@dataclass(frozen=True)
class Refine(SequentialStrategy):
    """The loop of the paper, but the memory is a draft of the answer instead of notes.

    The draft includes its reasons. The answer is taken from it at the end.
    """

    name: ClassVar[str] = "refine"
    roles: ClassVar[tuple[Role, ...]] = (REFINE, ANSWER)
    update_node: ClassVar[str] = "improve_draft"
