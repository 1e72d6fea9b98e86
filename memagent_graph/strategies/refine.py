"""The refine chain: a draft of the answer from the first chunk, improved at each later chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memagent_graph.prompts import read_template
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
    update_node: ClassVar[str] = "improve_draft"
