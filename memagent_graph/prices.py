"""The cost of tokens at the user's prices. No price is built in, because prices change."""

from __future__ import annotations

from dataclasses import dataclass

from memagent_graph.errors import EvaluationError

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million tokens, in any currency. Cached prompt tokens count in full: an upper bound."""

    prompt: float
    completion: float

    def cost(self, prompt_tokens: float, completion_tokens: float) -> float:
        """Return the cost of tokens."""
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / _MILLION


def make_prices(prompt: float | None, completion: float | None) -> Prices | None:
    """Return the prices; None if both are missing.

    Raises:
        EvaluationError: only one is given.
    """
    if prompt is None and completion is None:
        return None
    if prompt is None or completion is None:
        raise EvaluationError(
            "only one of the prices of prompt and completion tokens is given",
            hint="Pass both --price-in and --price-out, per million tokens; 0 is allowed.",
        )
    return Prices(prompt, completion)
