"""Map and reduce: what each chunk contributes, asked side by side, then merged until it can be answered from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from langgraph.graph import END

from memagent_graph.reading import side_by_side as side
from memagent_graph.reading.nodes import Change, StepContext
from memagent_graph.reading.state import StepRecord
from memagent_graph.reading.strategy import OPEN, Strategy, StrategyGraph
from memagent_graph.roles import ANSWER, Role, shipped

_FOUND = frozenset({"chunk"})
MAP = Role("map", fields=_FOUND, template=shipped("map"), parse=side.unless_none, stand_in="update")
MERGE = Role("merge", fields=_FOUND, template=shipped("merge"), parse=side.unless_none, stand_in="update")


@dataclass(frozen=True)
class MapReduce(Strategy):
    """choose_chunks -> map_chunk, side by side -> ... -> gather -> merge_findings, side by side -> ... -> answer."""

    width: int = 64
    """Chunks that are chosen at once; the reader's `concurrency` bounds how many are read side by side."""
    name: ClassVar[str] = "map_reduce"
    roles: ClassVar[tuple[Role, ...]] = (MAP, MERGE, ANSWER)
    state: ClassVar[type] = side.SideBySideState

    def wire(self, graph: StrategyGraph) -> None:
        """Add the two rounds."""
        steps = {"choose_chunks": self._choose_chunks, "map_chunk": _map_chunk, "merge_findings": _merge_findings}
        for name, step in {**steps, "gather": side.gather, "answer": side.answer_from_findings}.items():
            graph.add_node(name, step)
        edges = {OPEN: "choose_chunks", "map_chunk": "choose_chunks", "merge_findings": "gather", "answer": END}
        for start, end in edges.items():
            graph.add_edge(start, end)
        chunks, groups = side.each_chunk("map_chunk", then="gather"), side.each_group("merge_findings", then="answer")
        graph.add_conditional_edges("choose_chunks", chunks, ["map_chunk", "gather", END])
        graph.add_conditional_edges("gather", groups, ["merge_findings", "answer"])

    def edited(self, state: Any, record: StepRecord, text: str) -> Change:
        """What a branch found is replaced."""
        return side.edited_finding(record, text)

    async def _choose_chunks(self, state: side.SideBySideState, step: StepContext) -> Change:
        return await side.choose_chunks(state, step, self.width)


async def _map_chunk(state: side.Branch, step: StepContext) -> Change:
    reply = await step.ask(MAP, chunk=step.text(state["span"]), reads=[state["span"]])
    step.has_read(state["span"])
    return side.found(reply, step)


async def _merge_findings(state: side.Branch, step: StepContext) -> Change:
    texts, parents = side.joined(state["group"].values(), step.context), [f["step"] for f in state["group"].values()]
    return side.found(await step.ask(MERGE, chunk=texts, parents=parents), step, instead_of=state["group"])
