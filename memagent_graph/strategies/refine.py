"""The refine chain: a draft of the solution from the first chunk, improved by each of the others in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memagent_graph.reading.nodes import Change, StepContext
from memagent_graph.reading.state import LineState
from memagent_graph.reading.steps import chosen
from memagent_graph.reading.strategy import Strategy, StrategyGraph
from memagent_graph.roles import ANSWER, Role, shipped
from memagent_graph.strategies.overwrite import wire_line

IMPROVE = Role("refine", template=shipped("refine"), stand_in="update")
"""A whole draft from a draft and the next chunk. A policy with words of its own updates it as a memory."""


@dataclass(frozen=True)
class Refine(Strategy):
    """Like the paper's loop it sees every chunk once, in order; unlike it, it carries a draft and no notes.

    The draft is kept whole, with its reasons; the answer is asked for from it at the end.
    """

    name: ClassVar[str] = "refine"
    roles: ClassVar[tuple[Role, ...]] = (IMPROVE, ANSWER)
    state: ClassVar[type] = LineState
    loop: ClassVar[tuple[str, str]] = ("read_chunk", "improve_draft")

    def wire(self, graph: StrategyGraph) -> None:
        """Add the chain."""
        wire_line(graph, "improve_draft", improve_draft)


async def improve_draft(state: LineState, step: StepContext) -> Change:
    """Show the policy the draft and the chosen chunk, and take what it writes as the new draft."""
    span, draft = chosen(state), state.get("memory") or ""
    reply = await step.ask(IMPROVE, memory=draft, chunk=step.text(span), previous=draft, reads=[span])
    step.has_read(span)
    return {"memory": reply.text}
