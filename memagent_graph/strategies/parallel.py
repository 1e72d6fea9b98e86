"""Chunks read in parallel, in several passes: each pass sees the memory of the previous pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NotRequired

from memagent_graph.documents.chunking import start_cursor
from memagent_graph.prompts import read_template
from memagent_graph.reading.steps import Change, StepContext, get_chosen_chunk
from memagent_graph.reading.strategy import StrategyGraph
from memagent_graph.roles import ANSWER, Role
from memagent_graph.strategies.map_reduce import (
    MERGE,
    BranchingState,
    BranchingStrategy,
    add_finding,
    join_findings,
    parse_finding,
    sort_findings,
)

EXTRACT = Role("extract", template=read_template("extract"), parse=parse_finding, fallback="update")


class ParallelState(BranchingState):
    """The branches' findings, and the number of the pass."""

    number: NotRequired[int]
    """The number of the pass, from 1; None means 1."""
    previous_memory: NotRequired[str]
    """The memory after the previous passes."""
    previous_steps: NotRequired[list[str]]
    """The ids of the calls that wrote `previous_memory`."""


@dataclass(frozen=True)
class Parallel(BranchingStrategy):
    """choose_chunks -> extract, in parallel -> ... -> gather -> merge_findings -> ... -> end_pass -> ... -> answer.

    After PI-Mem (arXiv 2608.03048), with two changes: findings are merged as a tree within the memory's budget, so no
    prompt grows with the document, and findings keep their chunks.
    """

    passes: int = 2
    """Maximum number of passes. A pass that finds nothing new is the last."""
    width: int = 64
    """Number of chunks that are chosen at once. The reader's `branches` limits how many are read in parallel."""
    name: ClassVar[str] = "parallel"
    roles: ClassVar[tuple[Role, ...]] = (EXTRACT, MERGE, ANSWER)
    state: ClassVar[type] = ParallelState

    def __post_init__(self) -> None:
        self.require_at_least(1, "passes", "width")

    def wire(self, graph: StrategyGraph) -> None:
        """Add the steps of a pass, and the edge to the next pass."""
        graph.add_node("end_pass", self._end_pass)
        self.wire_merging(graph, next_node="end_pass")
        self.wire_chunks(graph, "extract", _extract, self.width, ("previous_memory", "previous_steps"))
        graph.add_conditional_edges("end_pass", _route_after_pass, ["choose_chunks", "answer"])

    async def _end_pass(self, state: ParallelState, step: StepContext) -> Change:
        """Begin the next pass, unless this was the last one or found nothing new."""
        pass_number = state.get("number") or 1
        findings = sort_findings(state.get("findings", {}))
        call_ids = [finding["call_id"] for finding in findings.values()]
        if pass_number >= self.passes or call_ids == (state.get("previous_steps") or []):
            return {"spans": None}
        memory = join_findings(findings.values(), step.context)
        return {
            "spans": [],
            "cursor": start_cursor(),
            "number": pass_number + 1,
            "previous_memory": memory,
            "previous_steps": call_ids,
        }


async def _extract(state: ParallelState, step: StepContext) -> Change:
    memory, parents = state.get("previous_memory") or "", state.get("previous_steps") or []
    reply = await step.read(EXTRACT, get_chosen_chunk(state), memory=memory, parents=parents)
    return add_finding(reply, step, memory=memory)


def _route_after_pass(state: ParallelState) -> str:
    return "answer" if state.get("spans") is None else "choose_chunks"
