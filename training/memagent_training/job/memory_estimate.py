"""Estimates the device memory of an optimizer step before any weights are loaded.

For a dense decoder whose layers are Llama's (Qwen2, Mistral, ...), per rank, in bytes:

    weights        P * w                 and 2 * P more while mixed precision holds copies in 16 bit
    gradients      (T + largest) * w     the largest is there twice while micro-batches are added up
    optimizer      2 * T * w             AdamW's two moments; one byte each in 8 bit; nothing for plain SGD
    reference      P * w                 where a KL is asked for and no adapters can be switched off

    a layer        n * (4 r h + c (3 a + 2 kv + 4 m + 2 h)) + pairs * c
    the head       3 n r h + 5 * min(C, 1024) * V * 4
    activations    without checkpointing   L * layer + pairs + max(head, 2 n c m)
                   with checkpointing      L * n r h + pairs + max(layer + 2 n c m, head)

P weights, T of them trained, w bytes of one (4, as TRL loads them by default); L layers, h, m, V the widths of the
residual stream, the MLP and the vocabulary, a and kv those of all query heads and of all key heads; r bytes of a number
of the residual stream and c of a matrix product (4 and 4; 4 and 2 in mixed precision); n tokens of a micro-batch,
padding included, C completion tokens scored, pairs the entries of the padded layout's attention mask, of which each
layer keeps a copy as numbers; the other layouts have none. The 4 r h are the inputs of two norms, each unchanged and
normalised.

It was compared with measured peaks of Llama- and Qwen2-shaped models on a CPU, see tests/unit/training: within a fifth.
Not included: memory of the device's own libraries, and fragmentation. If weights are sharded, weights, gradients,
optimizer and reference are divided by the ranks; one gathered layer is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from memagent_training.forward.layouts import MicroBatch
from memagent_training.training_errors import TrainingError

_LOGITS_CHUNK: Final = 1024
"""Tokens whose logits are in memory at once (`scoring.completion_logprobs`)."""
_LOGITS_COPIES: Final = 5
"""Logits, logits divided by the temperature, and three tensors of that size in the backward pass."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model that determine its memory: numbers of weights, and widths."""

    parameters: int
    trained: int
    largest: int
    """Weights of the largest trained tensor."""
    layers: int
    hidden: int
    mlp: int
    queries: int
    """Heads times their dimension."""
    keys: int
    """Key heads times their dimension."""
    vocabulary: int

    @classmethod
    def of(cls, model: Any) -> ModelSizes:
        """Return the sizes of a causal language model of transformers, on any device, including "meta"."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        trained = [each.numel() for each in model.parameters() if each.requires_grad]
        return cls(
            parameters=sum(each.numel() for each in model.parameters()),
            trained=sum(trained),
            largest=max(trained, default=0),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            mlp=config.intermediate_size,
            queries=heads * head,
            keys=(getattr(config, "num_key_value_heads", None) or heads) * head,
            vocabulary=config.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class Precision:
    """How many bytes each number takes."""

    weights: int = 4
    mixed: bool = False
    """Whether matrix products are computed in 16 bit while weights have 32."""

    @property
    def products(self) -> int:
        """Bytes of each number in a matrix product."""
        return 2 if self.mixed else self.weights


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on each rank."""

    sizes: ModelSizes
    """The sizes of the model."""
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    """Activations of the largest micro-batch, with or without gradient checkpointing, as configured."""
    activations_checkpointed: int
    activations_kept: int
    """The same without checkpointing."""
    shards: int = 1
    """The ranks that share weights, gradients, optimizer and reference."""

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.total_on(self.shards)

    def total_on(self, shards: int) -> int:
        """Return the sum if as many ranks shared all but the activations."""
        shared = self.weights + self.gradients + self.optimizer + self.reference
        return shared * self.shards // shards + self.activations


def unloaded_model(source: str, *, lora_rank: int | None = None) -> nn.Module:
    """Return the model without its weights (on the device "meta"), with adapters if configured.

    Raises:
        TrainingError: transformers does not know this causal language model.
    """
    from transformers import AutoConfig  # noqa: PLC0415  only here

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, trust_remote_code=False))
            if lora_rank is not None:
                from peft import get_peft_model  # noqa: PLC0415  optional

                model = get_peft_model(model, lora_of_rank(lora_rank))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TrainingError(
            f"{source} is not a causal language model that transformers can build: {error}",
            hint="Name a folder with config.json and weights of a text model, or a hub id.",
        ) from error
    built: nn.Module = model
    return built


def lora_of_rank(rank: int) -> Any:
    """Adapters on every linear layer but the head, twice as strong as their rank (peft's `LoraConfig`)."""
    from peft import LoraConfig  # noqa: PLC0415  optional

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def estimate_memory(
    sizes: ModelSizes,
    micro_batch: MicroBatch,
    *,
    precision: Precision,
    checkpointing: bool,
    optimizer: str = "adamw_torch_fused",
    with_reference: bool = False,
    shards: int = 1,
) -> MemoryEstimate:
    """Return the estimate of the module's docstring.

    Args:
        sizes: of the model.
        micro_batch: the largest that a rank forwards at once.
        precision: of weights and matrix products.
        checkpointing: whether gradient checkpointing is on.
        optimizer: its name, as in the setting `optim`.
        with_reference: whether there is a second model for the KL.
        shards: ranks that share weights, gradients, optimizer and reference; 1 if each has all.
    """
    weights = sizes.parameters * precision.weights
    copies = 2 * sizes.parameters if precision.mixed else 0
    kept, checkpointed = _activations(sizes, micro_batch, precision)
    return MemoryEstimate(
        sizes=sizes,
        weights=(weights + copies) // shards,
        gradients=(sizes.trained + sizes.largest) * precision.weights // shards,
        optimizer=sizes.trained * _state_bytes(optimizer, precision) // shards,
        reference=(weights if with_reference else 0) // shards,
        activations=checkpointed if checkpointing else kept,
        activations_checkpointed=checkpointed,
        activations_kept=kept,
        shards=shards,
    )


def _activations(sizes: ModelSizes, micro_batch: MicroBatch, precision: Precision) -> tuple[int, int]:
    """Without checkpointing and with it."""
    sequences, width = micro_batch.input_ids_SN.shape
    tokens = sequences * width
    pairs = 0 if micro_batch.nodes else tokens * width
    residual, product = max(4 if precision.mixed else 0, precision.weights), precision.products
    stream = tokens * residual * sizes.hidden
    narrow = 3 * sizes.queries + 2 * sizes.keys + 4 * sizes.mlp + 2 * sizes.hidden
    layer = 4 * stream + tokens * product * narrow + pairs * product
    scored = min(len(micro_batch.scored_ids_C), _LOGITS_CHUNK)
    head = 3 * stream + _LOGITS_COPIES * scored * sizes.vocabulary * 4
    backward = 2 * tokens * product * sizes.mlp
    kept = sizes.layers * layer + pairs + max(head, backward)
    checkpointed = sizes.layers * stream + pairs + max(layer + backward, head)
    return kept, checkpointed


def _state_bytes(optimizer: str, precision: Precision) -> int:
    """Bytes of state per trained weight; AdamW's for an unknown optimizer."""
    if "8bit" in optimizer or "4bit" in optimizer:
        return 2
    return 0 if optimizer in {"sgd", "adafactor"} else 2 * precision.weights
