"""What a policy may tell of its model, which spares the user from spelling it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from memagent_graph.flops import ModelShape
from memagent_graph.profile import Profile
from memagent_graph.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of the model behind a policy; None where it is not known."""

    context_window: int | None = None
    """Prompt and completion together, in tokens."""
    tokenizer: Tokenizer | None = None
    shape: ModelShape | None = None
    profile: Profile | None = None
    """The budget and prompts that the model was trained with."""


@runtime_checkable
class SelfDescribing(Protocol):
    """A policy that can say what model it runs on."""

    async def describe(self) -> ModelInfo:
        """What is known of the model. Raises `PolicyError` when its server cannot be asked."""
        ...
