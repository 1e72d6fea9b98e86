"""Map and reduce: finds the facts of all chunks in parallel, then merges the findings into one memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from langgraph.graph import END

from memagent_graph.reading import branching
from memagent_graph.reading.steps import Change, StepContext, chosen_chunk
from memagent_graph.reading.strategy import OPEN, StrategyGraph
from memagent_graph.roles import ANSWER, Role, read_template

MAP = Role(
    "map", fields=frozenset({"chunk"}), template=read_template("map"), parse=branching.parse_finding, stand_in="update"
)


@dataclass(frozen=True)
class MapReduce(branching.BranchingStrategy):
    """choose_chunks -> map_chunk, in parallel -> ... -> gather -> merge_findings, in parallel -> ... -> answer."""

    width: int = 64
    """Number of chunks that are chosen at once. The reader's `branches` limits how many are read in parallel."""
    name: ClassVar[str] = "map_reduce"
    roles: ClassVar[tuple[Role, ...]] = (MAP, branching.MERGE, ANSWER)

    def __post_init__(self) -> None:
        self.require_at_least(1, "width")

    def wire(self, graph: StrategyGraph) -> None:
        """Add the map and the reduce step."""
        graph.add_node("choose_chunks", self._choose_chunks)
        graph.add_node("map_chunk", _map_chunk)
        self.wire_merging(graph)
        graph.add_edge(OPEN, "choose_chunks")
        chunks = branching.branch_per_chunk("map_chunk", then="gather")
        graph.add_conditional_edges("choose_chunks", chunks, ["map_chunk", "gather", END])
        graph.add_edge("map_chunk", "choose_chunks")

    async def _choose_chunks(self, state: branching.BranchingState, step: StepContext) -> Change:
        return await branching.choose_chunks(state, step, self.width)


async def _map_chunk(state: branching.Branch, step: StepContext) -> Change:
    return branching.add_finding(await step.read(MAP, chosen_chunk(state)), step)
