"""Estimates the arithmetic of a read, and that of one call with the whole document in context.

The estimate is the usual one for a dense decoder: a forward pass costs two floating-point operations per weight and
token, plus `4 * layers * width` per token and attended position (scores and weighted sum), halved for causality.
Sparse attention, mixture-of-experts routing and cached prefixes are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memagent_graph.storage.bounded_files import json_file


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The size of a dense decoder. `parameters` leaves out the input embedding, which is a look-up."""

    parameters: int
    layers: int
    width: int

    @classmethod
    def from_config(cls, folder: Path) -> ModelShape | None:
        """Return the shape in a Hugging Face `config.json`; None if the file is missing or of another kind."""
        try:
            config = json_file(folder / "config.json")
            width, layers, heads = (
                int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
            )
            head = int(config.get("head_dim") or width // heads)
            kv_heads = int(config.get("num_key_value_heads") or heads)
            attention = width * head * (2 * heads + 2 * kv_heads)
            mlp = 3 * width * int(config["intermediate_size"])
            head_weights = width * int(config["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(parameters=layers * (attention + mlp) + head_weights, layers=layers, width=heads * head)

    def forward_flops(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Floating-point operations of one call without a cached prefix."""
        tokens = prompt_tokens + completion_tokens
        return 2.0 * self.parameters * tokens + 2.0 * self.layers * self.width * tokens * tokens
