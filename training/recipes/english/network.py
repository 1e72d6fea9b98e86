"""The network of the base model with a trainable adapter.

Conversations that share a prefix form a tree; the prefix is computed once. The network is Qwen2 as in transformers,
without dropout or cache, in bfloat16. Suffixes of tensors: B sequences, S tokens, W the hidden width, H the width of a
head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

LORA_RANK: Final = 16
LORA_SCALE: Final = 2.0
BASE: Final = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"
ADAPTED_LAYERS: Final = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
BLOCK_TOKENS: Final = 128

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """The sizes of the network."""

    layers: int
    head_width: int
    rope_theta: float
    norm_eps: float

    @classmethod
    def read(cls, folder: Path) -> NetworkShape:
        """Read `config.json`."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
        return cls(
            config["num_hidden_layers"],
            config["hidden_size"] // config["num_attention_heads"],
            float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"]),
            float(config["rms_norm_eps"]),
        )


class AdaptedLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank change: W + LORA_SCALE * B A."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.lora_A = nn.Parameter(torch.empty(LORA_RANK, weight.shape[1], device=weight.device))
        self.lora_B = nn.Parameter(torch.zeros(weight.shape[0], LORA_RANK, device=weight.device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's output."""
        adapter_output = functional.linear(
            functional.linear(hidden, self.lora_A.to(hidden.dtype)), self.lora_B.to(hidden.dtype)
        )
        return functional.linear(hidden, self.weight, self.bias) + LORA_SCALE * adapter_output


class Layer(nn.Module):
    """Attention and a gated feed-forward part, each after a norm."""

    input_layernorm: Tensor
    post_attention_layernorm: Tensor

    def __init__(self, weights: dict[str, Tensor], prefix: str, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        for part, names in ADAPTED_LAYERS.items():
            module = nn.Module()
            for name in names:
                key = f"{prefix}.{part}.{name}"
                module.add_module(name, AdaptedLinear(weights[f"{key}.weight"], weights.get(f"{key}.bias")))
            self.add_module(part, module)
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.register_buffer(name, weights[f"{prefix}.{name}.weight"])

    def forward(self, hidden_BSW: Tensor, rotary: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        """Return the hidden states after the layer."""
        attention: Any = self.self_attn
        feed_forward: Any = self.mlp
        normalised = normalise_rms(hidden_BSW, self.input_layernorm, self.shape.norm_eps)
        query, key, value = (
            project(normalised).unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        attended = attend(apply_rotary(query, rotary), apply_rotary(key, rotary), value, mask)
        hidden_BSW = hidden_BSW + attention.o_proj(attended.transpose(1, 2).flatten(2))
        normalised = normalise_rms(hidden_BSW, self.post_attention_layernorm, self.shape.norm_eps)
        activations = functional.silu(feed_forward.gate_proj(normalised)) * feed_forward.up_proj(normalised)
        output: Tensor = hidden_BSW + feed_forward.down_proj(activations)
        return output


class AdaptedNetwork(nn.Module):
    """The base with its adapter.

    Args:
        folder: the base in transformers' format.
        device: a torch device.
        compiled: whether layers are compiled (on a GPU: two to three times as fast, after half a minute).
    """

    def __init__(self, folder: Path, device: str, *, compiled: bool) -> None:
        super().__init__()
        self.shape = NetworkShape.read(folder)
        weights = {
            name: weight.to(device, torch.bfloat16) for name, weight in load_file(folder / "model.safetensors").items()
        }
        self.embedding = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.last_norm = weights["model.norm.weight"]
        self.layers = nn.ModuleList(
            Layer(weights, f"model.layers.{number}", self.shape) for number in range(self.shape.layers)
        )
        self.uses_blocks = torch.device(device).type == "cuda"
        if compiled:
            torch._dynamo.config.cache_size_limit = 64
            for layer in self.layers:
                layer.compile(dynamic=False)

    def forward(self, ids_BS: Tensor, positions_BS: Tensor, trees_BS: Tensor, branches_BS: Tensor) -> Tensor:
        """Return the last hidden states.

        Args:
            ids_BS: token ids.
            positions_BS: the position of each token in its conversation, from 0.
            trees_BS: the index of each token's tree.
            branches_BS: the index of its conversation in the tree, from 1; 0 for the shared prefix.
        """
        frequencies = self.shape.rope_theta ** -(
            torch.arange(0, self.shape.head_width, 2, device=ids_BS.device).float() / self.shape.head_width
        )
        angles_BSH = positions_BS[..., None].float() * frequencies
        angles_B1SH = torch.cat([angles_BSH, angles_BSH], dim=-1)[:, None]
        rotary = (angles_B1SH.cos().bfloat16(), angles_B1SH.sin().bfloat16())
        mask = (make_block_mask if self.uses_blocks else list_nodes)(trees_BS, branches_BS)
        hidden_BSW = functional.embedding(ids_BS, self.embedding)
        for layer in self.layers:
            hidden_BSW = layer(hidden_BSW, rotary, mask)
        return normalise_rms(hidden_BSW, self.last_norm, self.shape.norm_eps)

    def get_adapter(self) -> dict[str, Tensor]:
        """Return the adapter's weights by the names that PEFT gives them."""
        return {
            "base_model.model.model." + name + ".weight": weights
            for name, weights in self.named_parameters()
            if ".lora_" in name
        }

    def load_adapter(self, tensors: dict[str, Tensor]) -> None:
        """Copy an adapter's weights, by PEFT's names, into this one."""
        adapter = self.get_adapter()
        with torch.no_grad():
            for name, weights in tensors.items():
                adapter[name].copy_(weights)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as PEFT does, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: weights.detach().to("cpu", torch.bfloat16) for name, weights in self.get_adapter().items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {
            "base_model_name_or_path": BASE,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "lora_alpha": int(LORA_SCALE * LORA_RANK),
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": LORA_RANK,
            "target_modules": [name for names in ADAPTED_LAYERS.values() for name in names],
            "task_type": "CAUSAL_LM",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def normalise_rms(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return hidden states divided by their root mean square."""
    wide = hidden.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(hidden.dtype)


def apply_rotary(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys with rotary position embeddings."""
    cosine, sine = rotary
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


@dataclass(frozen=True, slots=True)
class TreeNode:
    """Consecutive tokens of one conversation in a sequence; each sees those before it and the trunk of the tree."""

    row: int
    trunk: slice
    """The tokens with which the conversations of the tree begin; empty for the trunk itself."""
    own: slice


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Return the attention output."""
    if not isinstance(mask, list):
        output: Tensor = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        return output
    outputs_by_row: list[list[Tensor]] = [[] for _ in range(len(query))]
    for node in mask:
        trunk_tokens, own_tokens = node.trunk, node.own
        own_length, trunk_length = own_tokens.stop - own_tokens.start, trunk_tokens.stop - trunk_tokens.start
        mask_matrix = torch.ones(own_length, trunk_length + own_length, dtype=torch.bool).tril(trunk_length)
        keys, values = (
            torch.cat([heads[node.row, :, trunk_tokens], heads[node.row, :, own_tokens]], dim=1)
            for heads in (key, value)
        )
        outputs_by_row[node.row].append(
            functional.scaled_dot_product_attention(
                query[node.row, :, own_tokens][None], keys[None], values[None], attn_mask=mask_matrix, enable_gqa=True
            )[0]
        )
    return torch.stack([torch.cat(row, dim=1) for row in outputs_by_row])


def list_nodes(trees_BS: Tensor, branches_BS: Tensor) -> list[TreeNode]:
    """Return the nodes of all sequences in their order, for a device without block masks."""
    nodes = []
    for row, (trees, branches) in enumerate(zip(trees_BS.tolist(), branches_BS.tolist(), strict=True)):
        start, trunk = 0, slice(0, 0)
        for (_, branch), tokens in groupby(zip(trees, branches, strict=True)):
            own_tokens = slice(start, start + sum(1 for _ in tokens))
            nodes.append(TreeNode(row, trunk if branch else slice(0, 0), own_tokens))
            trunk, start = (trunk if branch else own_tokens), own_tokens.stop
    return nodes


def make_block_mask(trees_BS: Tensor, branches_BS: Tensor) -> Any:
    """Return which tokens each token sees, as a block mask, whose empty blocks are skipped."""

    def sees(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        branch = branches_BS[batch, key]
        return (
            (key <= query)
            & (trees_BS[batch, query] == trees_BS[batch, key])
            & ((branch == 0) | (branch == branches_BS[batch, query]))
        )

    row_count, length = trees_BS.shape
    return create_block_mask(
        sees, row_count, None, length, length, device=str(trees_BS.device), BLOCK_SIZE=BLOCK_TOKENS
    )
