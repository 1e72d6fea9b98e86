"""Map and reduce: what each chunk contributes, asked side by side, then merged until it can be answered from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from langgraph.graph import END

from memagent_graph.reading import side_by_side
from memagent_graph.reading.nodes import Change, StepContext
from memagent_graph.reading.state import StepRecord
from memagent_graph.reading.strategy import OPEN, Strategy, StrategyGraph
from memagent_graph.roles import ANSWER, Role, shipped

FOUND = frozenset({"chunk"})
MAP = Role("map", fields=FOUND, template=shipped("map"), parse=side_by_side.unless_none, stand_in="update")
MERGE = Role("merge", fields=FOUND, template=shipped("merge"), parse=side_by_side.unless_none, stand_in="update")


@dataclass(frozen=True)
class MapReduce(Strategy):
    """choose_chunks -> map_chunk, side by side -> ... -> gather -> merge_findings, side by side -> ... -> answer."""

    width: int = 64
    """Chunks that are chosen at once; the reader's `concurrency` bounds how many are read side by side."""

    name: ClassVar[str] = "map_reduce"
    roles: ClassVar[tuple[Role, ...]] = (MAP, MERGE, ANSWER)
    state: ClassVar[type] = side_by_side.SideBySideState

    def wire(self, graph: StrategyGraph) -> None:
        """Add the two rounds."""
        graph.add_node("choose_chunks", self._choose_chunks)
        graph.add_node("map_chunk", _map_chunk)
        graph.add_node("gather", side_by_side.gather)
        graph.add_node("merge_findings", _merge_findings)
        graph.add_node("answer", side_by_side.answer_from_findings)
        graph.add_edge(OPEN, "choose_chunks")
        after_choosing = side_by_side.each_chunk("map_chunk", then="gather")
        graph.add_conditional_edges("choose_chunks", after_choosing, ["map_chunk", "gather", END])
        graph.add_edge("map_chunk", "choose_chunks")
        after_gathering = side_by_side.each_group("merge_findings", then="answer")
        graph.add_conditional_edges("gather", after_gathering, ["merge_findings", "answer"])
        graph.add_edge("merge_findings", "gather")
        graph.add_edge("answer", END)

    def edited(self, state: Any, record: StepRecord, text: str) -> Change:
        """What a branch found is replaced."""
        return side_by_side.edited_finding(record, text)

    async def _choose_chunks(self, state: side_by_side.SideBySideState, step: StepContext) -> Change:
        return await side_by_side.choose_chunks(state, step, self.width)


async def _map_chunk(state: side_by_side.Branch, step: StepContext) -> Change:
    reply = await step.ask(MAP, chunk=step.text(state["span"]), reads=[state["span"]])
    step.has_read(state["span"])
    return side_by_side.found(reply, step)


async def _merge_findings(state: side_by_side.Branch, step: StepContext) -> Change:
    group = state["group"]
    parents = [each["step"] for each in group.values()]
    reply = await step.ask(MERGE, chunk=side_by_side.joined(group.values(), step.context), parents=parents)
    return side_by_side.found(reply, step, instead_of=group)
