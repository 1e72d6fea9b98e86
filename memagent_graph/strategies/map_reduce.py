"""Map and reduce: finds the facts of all chunks in parallel, then merges the findings into one memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memagent_graph.prompts import read_template
from memagent_graph.reading import branching
from memagent_graph.reading.steps import Change, StepContext, get_chosen_chunk
from memagent_graph.reading.strategy import StrategyGraph
from memagent_graph.roles import ANSWER, Role

MAP = Role(
    "map", fields=frozenset({"chunk"}), template=read_template("map"), parse=branching.parse_finding, fallback="update"
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
        self.wire_merging(graph)
        self.wire_chunks(graph, "map_chunk", _map_chunk, self.width)


async def _map_chunk(state: branching.BranchState, step: StepContext) -> Change:
    return branching.add_finding(await step.read(MAP, get_chosen_chunk(state)), step)
