"""Tiny models with random weights, in double precision so that gradients can be compared exactly."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def make_model(kind: str = "Llama", *, seed: int = 0, dtype: Any = torch.float64, **sizes: Any) -> Any:
    """Return a model with random weights, large enough that its predictions depend on their context."""
    torch.manual_seed(seed)
    defaults: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None, "initializer_range": 0.2,
        "tie_word_embeddings": False, "attn_implementation": "sdpa",
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**(defaults | sizes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    if dtype == torch.float64:
        _give_norms_full_precision(model)
    return model


def _give_norms_full_precision(model: Any) -> None:
    """Replace the RMSNorms of transformers, which compute in float32, too coarse to compare gradients."""
    norms = [name for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")]
    for name in norms:
        parent, _, last = name.rpartition(".")
        weight = model.get_submodule(name).weight
        norm = torch.nn.RMSNorm(weight.shape, eps=model.config.rms_norm_eps, dtype=torch.float64)
        norm.weight = weight
        setattr(model.get_submodule(parent), last, norm)
