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

from memagent_training.forward.layouts import MicroBatch
from memagent_training.forward.scoring import LOGITS_CHUNK

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
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
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
class MemoryEstimate:
    """Bytes on each rank."""

    sizes: ModelSizes
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    """Activations of the largest micro-batch."""
    shards: int = 1
    """The ranks that share weights, gradients, optimizer and reference."""

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.total_on(self.shards)

    def total_on(self, shards: int) -> int:
        """Return the sum if that many ranks shared all but the activations."""
        shared = self.weights + self.gradients + self.optimizer + self.reference
        return shared * self.shards // shards + self.activations


def estimate_memory(
    sizes: ModelSizes,
    micro_batch: MicroBatch,
    *,
    weight_bytes: int = 4,
    mixed_precision: bool = False,
    checkpointing: bool,
    optimizer: str = "adamw_torch_fused",
    with_reference: bool = False,
    shards: int = 1,
) -> MemoryEstimate:
    """Return the estimate of the module's docstring.

    Args:
        sizes: of the model.
        micro_batch: the largest that a rank forwards at once.
        weight_bytes: of each weight.
        mixed_precision: whether matrix products are computed in 16 bit while weights have 32.
        checkpointing: whether gradient checkpointing is on.
        optimizer: its name, as in the setting `optim`.
        with_reference: whether there is a second model for the KL.
        shards: ranks that share weights, gradients, optimizer and reference; 1 if each has all.
    """
    weights = sizes.parameters * weight_bytes
    copies = 2 * sizes.parameters if mixed_precision else 0
    return MemoryEstimate(
        sizes=sizes,
        weights=(weights + copies) // shards,
        gradients=(sizes.trained + sizes.largest) * weight_bytes // shards,
        optimizer=sizes.trained * _state_bytes(optimizer, weight_bytes) // shards,
        reference=(weights if with_reference else 0) // shards,
        activations=_activations(
            sizes,
            micro_batch,
            residual=4 if mixed_precision else weight_bytes,
            product=2 if mixed_precision else weight_bytes,
            checkpointing=checkpointing,
        ),
        shards=shards,
    )


def _activations(
    sizes: ModelSizes, micro_batch: MicroBatch, *, residual: int, product: int, checkpointing: bool
) -> int:
    """Return bytes; `residual` and `product` are the bytes of one number."""
    sequences, width = micro_batch.input_ids_SN.shape
    tokens = sequences * width
    pairs = 0 if micro_batch.nodes else tokens * width
    stream = tokens * residual * sizes.hidden
    narrow = 3 * sizes.queries + 2 * sizes.keys + 4 * sizes.mlp + 2 * sizes.hidden
    layer = 4 * stream + tokens * product * narrow + pairs * product
    scored = min(len(micro_batch.scored_ids_C), LOGITS_CHUNK)
    head = 3 * stream + _LOGITS_COPIES * scored * sizes.vocabulary * 4
    backward = 2 * tokens * product * sizes.mlp
    if checkpointing:
        return sizes.layers * stream + pairs + max(layer + backward, head)
    return sizes.layers * layer + pairs + max(head, backward)


def _state_bytes(optimizer: str, weight_bytes: int) -> int:
    """Return the bytes of state per trained weight; AdamW's for an unknown optimizer."""
    if "8bit" in optimizer or "4bit" in optimizer:
        return 2
    return 0 if optimizer in {"sgd", "adafactor"} else 2 * weight_bytes
