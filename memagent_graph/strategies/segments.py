"""Cuts a document into segments, reads them in parallel with separate memories, and merges the memories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NotRequired

from langgraph.graph import END
from langgraph.types import Send
from typing_extensions import TypedDict

from memagent_graph.documents.chunking import Cursor, start_cursor
from memagent_graph.errors import StrategyError
from memagent_graph.reading.state import merge_entries
from memagent_graph.reading.steps import Change, StepContext, branch
from memagent_graph.reading.strategy import OPEN_DOCUMENT, StrategyGraph
from memagent_graph.roles import ANSWER, UPDATE, Role
from memagent_graph.strategies.map_reduce import MERGE, BranchingState, BranchingStrategy, add_finding


class Segment(TypedDict):
    """A range of whole chunks: the cursor of its next chunk, and the index of the first chunk after it."""

    cursor: Cursor
    end: int


class SegmentsState(BranchingState):
    """The memories and cursors of the segments."""

    segments: NotRequired[list[Segment]]
    cursors: NotRequired[Annotated[dict[str, Cursor], merge_entries]]
    """The cursor of the next chunk, by segment. A segment has the name of its first chunk."""
    next_segments: NotRequired[list[str]]
    """The segments that read their next chunk in the next superstep."""


@dataclass(frozen=True)
class Segments(BranchingStrategy):
    """cut_segments -> choose_segments -> read_segment, in parallel -> ... -> gather -> merge_findings -> ... -> answer.

    The loop of the paper, `count` times in parallel. The calls of a segment are sequential, one per chunk.
    """

    count: int = 8
    """The number of segments. A document with fewer chunks has fewer segments."""
    name: ClassVar[str] = "segments"
    roles: ClassVar[tuple[Role, ...]] = (UPDATE, MERGE, ANSWER)
    state: ClassVar[type] = SegmentsState
    continues_after: ClassVar[str] = "cut_segments"

    def __post_init__(self) -> None:
        self.require_at_least(1, "count")

    def wire(self, graph: StrategyGraph) -> None:
        """Add the loop of the segments."""
        graph.add_node("cut_segments", self._cut_segments)
        graph.add_node("choose_segments", _choose_segments)
        graph.add_node("read_segment", _read_segment)
        self.wire_merging(graph)
        graph.add_edge(OPEN_DOCUMENT, "cut_segments")
        graph.add_edge("cut_segments", "choose_segments")
        graph.add_conditional_edges("choose_segments", _route_to_segments, ["read_segment", "gather", END])
        graph.add_edge("read_segment", "choose_segments")

    async def _cut_segments(self, state: SegmentsState, step: StepContext) -> Change:
        """Cut the document into segments of equal length (in chunks, plus or minus one).

        The document is read once, as a stream. Only the positions of its chunks are kept in memory.
        """
        cursors = [start_cursor()]
        while (choice := await step.next_chunk(cursors[-1], needs_text=False)) is not None:
            cursors.append(choice[1])
        boundaries = [(len(cursors) - 1) * index // self.count for index in range(self.count + 1)]
        return {
            "segments": [Segment(cursor=cursors[start], end=end) for start, end in pairwise(boundaries) if start < end]
        }


async def _choose_segments(state: SegmentsState, step: StepContext) -> Change:
    if stop := step.stop_if_limit_reached():
        return stop
    unread = list(_find_unread_cursors(state))
    return {"next_segments": unread[: step.count_chunks_left(len(unread))]}


def _route_to_segments(state: SegmentsState) -> str | Sequence[Send]:
    if state.get("stop_reason"):
        return END
    memories = {name: finding["text"] for name, finding in state.get("findings", {}).items()}
    cursors = _find_unread_cursors(state)
    return [
        branch("read_segment", state, name, cursor=cursors[name], memory=memories.get(name, ""))
        for name in state.get("next_segments", ())
    ] or "gather"


def _find_unread_cursors(state: Mapping[str, Any]) -> dict[str, Cursor]:
    """Return the cursors of all segments that were not read to their end."""
    cursors = state.get("cursors", {})
    segments = {str(segment["cursor"]["index"]): segment for segment in state.get("segments") or ()}
    return {
        name: cursor
        for name, segment in segments.items()
        if (cursor := cursors.get(name, segment["cursor"]))["index"] < segment["end"]
    }


async def _read_segment(state: Any, step: StepContext) -> Change:
    chunk_and_cursor = await step.next_chunk(state["cursor"])
    if chunk_and_cursor is None:
        raise StrategyError(
            "a segment is longer than the rest of the document", hint="Check whether the stored document was changed."
        )
    span, cursor = chunk_and_cursor
    reply = await step.read(UPDATE, span, memory=state["memory"], previous=state["memory"])
    return {**add_finding(reply, step), "cursors": {step.branch: cursor}}
