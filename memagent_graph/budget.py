"""The token budget: how question, memory, chunk and output share the context window."""

from __future__ import annotations

from dataclasses import dataclass, fields

from memagent_graph.errors import BudgetError

CHAT_TEMPLATE_TOKENS = 24
"""Tokens reserved for the chat template around one user message."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Token budgets of one conversation. The defaults are the paper's: 1024 + 1024 + 5000 + 1024 in 8192."""

    context_window: int = 8192
    question_tokens: int = 1024
    memory_tokens: int = 1024
    """Maximum number of tokens of the memory, in a prompt and in an update."""
    chunk_tokens: int = 5000
    answer_tokens: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise BudgetError(
                    f"{field.name} must be at least 1, got {getattr(self, field.name)}", hint="Use 1 or more tokens."
                )

    def require(self, update_template_tokens: int, answer_template_tokens: int) -> None:
        """Check that both kinds of conversation fit the window with the given templates (in tokens, fields empty).

        Raises:
            BudgetError: a conversation does not fit. The message names the excess and what to shrink.
        """
        carried = self.question_tokens + self.memory_tokens + CHAT_TEMPLATE_TOKENS
        update = carried + self.chunk_tokens + self.memory_tokens + update_template_tokens
        if update > self.context_window:
            excess = update - self.context_window
            largest = max(("chunk_tokens", "memory_tokens", "question_tokens"), key=lambda name: getattr(self, name))
            if self.chunk_tokens > excess:
                remedy = f"Use --chunk-tokens {self.chunk_tokens - excess}"
            else:
                remedy = f"Shrink --{largest.replace('_', '-')} (now {getattr(self, largest)})"
            raise BudgetError(
                f"a memory update needs {update} tokens (question {self.question_tokens} + memory "
                f"{self.memory_tokens} + chunk {self.chunk_tokens} + new memory {self.memory_tokens} + template "
                f"{update_template_tokens} + chat template {CHAT_TEMPLATE_TOKENS}) and the context window has "
                f"{self.context_window}",
                hint=f"{remedy}, or serve the model with a window of at least {update} tokens.",
            )
        if (answer := carried + self.answer_tokens + answer_template_tokens) > self.context_window:
            raise BudgetError(
                f"an answer needs {answer} tokens and the context window has {self.context_window}",
                hint=f"Shrink --answer-tokens (now {self.answer_tokens}) by {answer - self.context_window}.",
            )
