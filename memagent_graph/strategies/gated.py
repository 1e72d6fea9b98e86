"""An update gate: one call per chunk keeps the memory, rewrites it, or finds it sufficient for the answer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import ClassVar, NotRequired

from memagent_graph.events import EventKind
from memagent_graph.prompts import Prompts, read_template
from memagent_graph.reading.steps import Change, StepContext, read_with_memory
from memagent_graph.reading.strategy import StrategyGraph
from memagent_graph.roles import ANSWER, ParsedReply, ParseFailure, Role
from memagent_graph.strategies.overwrite import PassState, SequentialStrategy


class Decision(StrEnum):
    """The first line of a reply."""

    KEEP = "KEEP"
    """Memory stays unchanged."""
    REWRITE = "REWRITE"
    """The lines below it are the whole new memory."""
    STOP = "STOP"
    """The memory is sufficient for an answer. The lines below it, if any, are the whole new memory."""


def parse_decision(
    text: str, prompts: Prompts, allowed_decisions: Collection[str] = tuple(Decision)
) -> ParsedReply | ParseFailure:
    """Parse a decision, which must be one of `allowed_decisions`, and the memory below it."""
    del prompts
    first_line, _, memory = text.partition("\n")
    decision, memory = first_line.strip(), memory.strip()
    if decision not in allowed_decisions:
        return ParseFailure(
            EventKind.MALFORMED, f"the first line is {decision[:20]!r}, not {', '.join(allowed_decisions)}"
        )
    if decision == Decision.KEEP and memory:
        return ParseFailure(EventKind.MALFORMED, "there is a new memory below KEEP")
    if decision == Decision.REWRITE and not memory:
        return ParseFailure(EventKind.MALFORMED, "there is no new memory below REWRITE")
    return ParsedReply(memory or None, Decision(decision))


GATED_UPDATE = Role(
    "gated_update",
    template=read_template("gated_update"),
    parse=partial(parse_decision, allowed_decisions=(Decision.KEEP, Decision.REWRITE)),
)
GATED_UPDATE_OR_STOP = Role(
    "gated_update_or_stop", template=read_template("gated_update_or_stop"), parse=parse_decision
)


class GatedState(PassState):
    """The state of a read that may end early."""

    enough: NotRequired[bool]
    """Whether the memory is sufficient for an answer."""


@dataclass(frozen=True)
class Gated(SequentialStrategy):
    """read_chunk -> update_or_keep -> read_chunk -> ... -> answer (after GRU-Mem, arXiv 2602.10560).

    Any other reply is malformed. By default the policy is asked again; if no reply is valid, the memory is kept.
    """

    stop: bool = False
    """Whether the policy may end the read before the document's end."""
    name: ClassVar[str] = "gated"
    state: ClassVar[type] = GatedState
    update_node: ClassVar[str] = "update_or_keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "roles", (GATED_UPDATE_OR_STOP if self.stop else GATED_UPDATE, ANSWER))

    def wire_after_update(self, graph: StrategyGraph) -> None:
        """Add edges back to the choice of a chunk, and to the answer if the memory is sufficient."""
        graph.add_conditional_edges(self.update_node, _route_when_enough, ["read_chunk", "answer"])

    async def _update_memory(self, state: PassState, step: StepContext) -> Change:
        reply = await read_with_memory(self.roles[0], state, step)
        return {"memory": reply.text, "enough": reply.value is Decision.STOP}


def _route_when_enough(state: GatedState) -> str:
    return "answer" if state.get("enough") else "read_chunk"
