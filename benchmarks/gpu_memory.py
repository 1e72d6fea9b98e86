"""Estimate the GPU memory for training models of 1.5B to 14B, as `memagent train --dry-run` does, without their files.

    python -m benchmarks.gpu_memory

The estimates are for weights in 32 bits, matrix products in bfloat16, AdamW, gradient checkpointing, no KL, and
micro-batches of two sequences with 16,384 tokens together. No such model was trained.
"""

from __future__ import annotations

from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from memagent_training.forward.layouts import IdRow, lay_out
from memagent_training.job.base_model import make_lora_config
from memagent_training.job.dry_run import ModelSizes, estimate_memory

GPU_COUNTS = (1, 2, 6, 8)
MODEL_SHAPES = {  # hidden size, MLP size, layers, heads, key-value heads, whether embeddings are tied
    "1.5B (as Qwen2.5)": (1536, 8960, 28, 12, 2, True),
    "4B (as Qwen3)": (2560, 9728, 36, 32, 8, True),
    "7B (as Qwen2.5)": (3584, 18944, 28, 28, 4, False),
    "14B (as Qwen2.5)": (5120, 13824, 48, 40, 8, False),
}


def build_sizes(shape: tuple[int, int, int, int, int, bool], *, with_adapters: bool) -> ModelSizes:
    """Return the sizes of a model with this shape, which is built without memory for its weights."""
    from peft import get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden_size, mlp_size, layers, heads, key_value_heads, is_tied = shape
    config = Qwen3Config(
        hidden_size=hidden_size, intermediate_size=mlp_size, num_hidden_layers=layers, num_attention_heads=heads,
        head_dim=128, num_key_value_heads=key_value_heads, vocab_size=151_936, tie_word_embeddings=is_tied,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(config)
        return ModelSizes.from_model(get_peft_model(model, make_lora_config(32)) if with_adapters else model)


def main() -> None:
    """Print the estimates as a Markdown table."""
    micro_batch = lay_out([IdRow((1,) * 7168, (1,) * 1024)] * 2, "packed")
    table = Table(
        "model", "weights", "activations", *(f"GPUs: {count}" for count in GPU_COUNTS), "adapters, 1 GPU", box=MARKDOWN
    )
    for name, shape in MODEL_SHAPES.items():
        full_training, adapter_training = (
            estimate_memory(
                build_sizes(shape, with_adapters=has_adapters), micro_batch, mixed_precision=True, checkpointing=True
            )
            for has_adapters in (False, True)
        )
        totals = [decimal(memory) for memory in (*map(full_training.compute_total, GPU_COUNTS), adapter_training.total)]
        table.add_row(name, f"{full_training.sizes.parameters / 1e9:.2f}B", decimal(full_training.activations), *totals)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
