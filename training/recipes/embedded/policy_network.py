"""The embedded policy's network: transformers' Llama, with an attention for trunks and branches.

Tokens of a batch lie end to end without padding; only attention depends on rows. Attention has two parts, because one
dense mask took half of a CPU's time: the trunks (causal), and the branches over their trunk and themselves. The
architecture is Qwen2's, but ships as a Llama with attention biases, which computes the same: for the model type "qwen2"
transformers and vLLM use Qwen2's own pre-tokenizer instead of the one in tokenizer.json.

Shapes: N tokens of a batch, M of them learned, R rows, S tokens of a trunk, K branches of a row, T tokens of a branch,
H heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from recipes.embedded.tokenizer import SPECIAL_TOKENS, VOCABULARY_SIZE

CONTEXT_WINDOW: Final = 1024
HEAD_WIDTH: Final = 64
ROPE_THETA: Final = 1e6


@dataclass(frozen=True)
class Batch:
    """N tokens in rows, with their indices in the padded layout, and the M tokens that are learned.

    `trunks` (R, S) and `branches` (R, K, T) hold token indices, padded with 0; `branch_masks` (R*K, 1, T, S+T) is true
    where a branch's token sees a token of the trunk or of its own branch; `padded_indices` (N,) has the index of each
    token among the padded trunks followed by the padded branches. `learned_indices`, `targets` and `weights` are (M,).
    """

    tokens: Tensor
    positions: Tensor
    trunks: Tensor
    branches: Tensor
    branch_masks: Tensor
    padded_indices: Tensor
    learned_indices: Tensor
    targets: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the same batch on a device."""
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


class Network(LlamaForCausalLM):
    """The model that ships; `compute_logits` forwards a batch of trunks and branches; `forward` is the Llama's."""

    def __init__(self, config: LlamaConfig) -> None:
        config._attn_implementation = "branching"
        super().__init__(config)

    def compute_logits(self, batch: Batch) -> Tensor:
        """Return the logits (M, V) at the learned tokens; the last MLP and the head run only there."""
        hidden = self.model.embed_tokens(batch.tokens)[None]
        rope = self.model.rotary_emb(hidden, batch.positions[None])
        *layers, last = self.model.layers
        for layer in layers:
            hidden = layer(hidden, position_embeddings=rope, batch=batch)
        attended, _ = last.self_attn(last.input_layernorm(hidden), position_embeddings=rope, batch=batch)
        hidden = (hidden + attended)[0, batch.learned_indices]
        hidden = hidden + last.mlp(last.post_attention_layernorm(hidden))
        logits: Tensor = self.lm_head(self.model.norm(hidden))
        return logits


@torch.no_grad()
def make_policy(width: int = 256, mlp_width: int = 512, layers: int = 4) -> Network:
    """Return a policy with random weights; with more layers, each adds less to the residual stream."""
    heads = width // HEAD_WIDTH
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY_SIZE,
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_WIDTH,
        attention_bias=True,
        max_position_embeddings=CONTEXT_WINDOW,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
        eos_token_id=find_special_id("<|end|>"),
        pad_token_id=find_special_id("<|pad|>"),
    )
    policy = Network(config)
    for name, parameter in policy.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.div_((2 * layers) ** 0.5)
    return policy


def load_policy(source: Path) -> Network:
    """Return the policy in a folder or in a checkpoint of the supervised training, in float32."""
    if source.is_dir():
        return Network.from_pretrained(source, dtype=torch.float32, local_files_only=True)
    checkpoint: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True)
    policy = Network(LlamaConfig(**checkpoint["config"]))
    policy.load_state_dict(checkpoint["model"])
    return policy


def find_special_id(token: str) -> int:
    """Return the id of a special token; these are the last ids of the vocabulary."""
    return VOCABULARY_SIZE - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(token)


def attend_with_branches(
    module: nn.Module,
    query_1hnd: Tensor,
    key_1hnd: Tensor,
    value_1hnd: Tensor,
    attention_mask: Tensor | None,
    *,
    batch: Batch | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention, (1, N, H, D): trunks over themselves, branches over their trunk and themselves.

    Without a batch it is SDPA.
    """
    if batch is None:
        return sdpa_attention_forward(module, query_1hnd, key_1hnd, value_1hnd, attention_mask, **options)
    q_nhd, k_nhd, v_nhd = (tensor[0].transpose(0, 1) for tensor in (query_1hnd, key_1hnd, value_1hnd))
    heads, width = q_nhd.shape[1:]
    trunk_q, trunk_k, trunk_v = (tensor[batch.trunks].transpose(1, 2) for tensor in (q_nhd, k_nhd, v_nhd))
    trunk_outputs = F.scaled_dot_product_attention(trunk_q, trunk_k, trunk_v, is_causal=True)
    branch_q, branch_k, branch_v = (tensor[batch.branches].transpose(2, 3) for tensor in (q_nhd, k_nhd, v_nhd))
    keys, values = _join_with_trunks(trunk_k, branch_k), _join_with_trunks(trunk_v, branch_v)
    branch_outputs = F.scaled_dot_product_attention(branch_q.flatten(0, 1), keys, values, attn_mask=batch.branch_masks)
    padded = torch.cat(
        [outputs.transpose(1, 2).reshape(-1, heads, width) for outputs in (trunk_outputs, branch_outputs)]
    )
    return padded[batch.padded_indices][None], None


def _join_with_trunks(trunk_rhsd: Tensor, branch_rkhtd: Tensor) -> Tensor:
    """Return for each branch its trunk's keys or values and its own, (R*K, H, S+T, D)."""
    trunks = trunk_rhsd[:, None].expand(-1, branch_rkhtd.shape[1], -1, -1, -1)
    return torch.cat((trunks, branch_rkhtd), dim=3).flatten(0, 1)


AttentionInterface.register("branching", attend_with_branches)
AttentionMaskInterface.register("branching", sdpa_mask)
