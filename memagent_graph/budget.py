"""The token budget: how question, memory, chunk and output share the context window."""

from __future__ import annotations

from dataclasses import dataclass, fields

from memagent_graph.errors import BudgetError

CHAT_TEMPLATE_TOKENS = 24
"""Tokens reserved for the chat template around one user message."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The token budget of one conversation. The defaults are the paper's: 1024 + 1024 + 5000 + 1024 in 8192."""

    context_window: int = 8192
    question_tokens: int = 1024
    memory_tokens: int = 1024
    """Maximum number of tokens of the memory, both in a prompt and in an update."""
    chunk_tokens: int = 5000
    answer_tokens: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise BudgetError(
                    f"{field.name} must be at least 1, got {getattr(self, field.name)}", hint="Use 1 or more tokens."
                )
