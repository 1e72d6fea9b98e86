"""The refine chain: a draft of the answer from the first chunk, improved at each later chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memagent_graph.prompts import read_template
from memagent_graph.reading.state import LineState
from memagent_graph.reading.steps import Change, StepContext, read_with_memory
from memagent_graph.reading.strategy import StrategyGraph
from memagent_graph.roles import ANSWER, Role
from memagent_graph.strategies.overwrite import SequentialStrategy

IMPROVE = Role("refine", template=read_template("refine"), fallback="update")
"""Writes a new draft from a draft and the next chunk. A policy with its own prompts updates the draft like a memory."""


@dataclass(frozen=True)
class Refine(SequentialStrategy):
    """The loop of the paper, but the memory is a draft of the answer instead of notes.

    The draft includes its reasons. The answer is taken from it at the end.
    """

    name: ClassVar[str] = "refine"
    roles: ClassVar[tuple[Role, ...]] = (IMPROVE, ANSWER)
    loop: ClassVar[tuple[str, str]] = ("read_chunk", "improve_draft")

    def wire(self, graph: StrategyGraph) -> None:
        """Add the chain."""
        self.wire_loop(graph, "improve_draft", improve_draft)


async def improve_draft(state: LineState, step: StepContext) -> Change:
    """Show the policy the draft and the chosen chunk, and use its reply as the new draft."""
    return {"memory": (await read_with_memory(IMPROVE, state, step)).text}
