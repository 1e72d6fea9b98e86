"""The refine chain: a draft of the solution from the first chunk, improved by each of the others in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from langgraph.graph import END

from memagent_graph.reading.nodes import Change, StepContext
from memagent_graph.reading.state import LineState
from memagent_graph.reading.steps import after_read_chunk, answer, chosen, read_chunk
from memagent_graph.reading.strategy import OPEN, Strategy, StrategyGraph
from memagent_graph.roles import ANSWER, Role, shipped

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
        graph.add_node("read_chunk", read_chunk)
        graph.add_node("improve_draft", improve_draft)
        graph.add_node("answer", answer)
        graph.add_edge(OPEN, "read_chunk")
        graph.add_conditional_edges("read_chunk", after_read_chunk("improve_draft"), ["improve_draft", "answer", END])
        graph.add_edge("improve_draft", "read_chunk")
        graph.add_edge("answer", END)


async def improve_draft(state: LineState, step: StepContext) -> Change:
    """Show the policy the draft and the chosen chunk, and take what it writes as the new draft."""
    span, draft = chosen(state), state.get("memory") or ""
    reply = await step.ask(IMPROVE, memory=draft, chunk=step.text(span), previous=draft, reads=[span])
    step.has_read(span)
    return {"memory": reply.text}
