"""The decoder that is trained here: Qwen2's arithmetic and parameter names in plain torch, with a branching mask.

Only what training needs: no KV cache, no dropout, no generation. `state_dict()` has exactly the keys of
`transformers.Qwen2ForCausalLM` with untied embeddings, so a checkpoint is the shipped weights file.

Tokens of a batch lie end to end without padding; attention alone sees rows. It runs in two parts, as half of a
CPU's time went there under one dense mask: the trunks (causal), and the branches over their trunk and themselves.

Shapes: N tokens of a batch, R rows, S tokens of a trunk, K branches of a row, T tokens of a branch, H heads,
D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the decoder; everything else is Qwen2's."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 704
    layers: int = 5
    head_dim: int = 64
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    output_bias: bool = False
    """Whether attention's output has a bias: Qwen2's has none, but one that was trained as a Llama does."""

    @property
    def heads(self) -> int:
        """Number of attention heads (no grouping of keys and values)."""
        return self.hidden_size // self.head_dim


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 as Qwen2 does."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


@dataclass(frozen=True)
class Layout:
    """Where the trunks and branches of a batch lie among its N tokens.

    `trunks` (R, S) and `branches` (R, K, T) hold token indices, padded with 0; `seen` (R*K, 1, T, S+T) is true where a
    branch's token sees a token of the trunk or of its own branch; `places` (N,) finds each token among the padded
    trunks followed by the padded branches.
    """

    trunks: Tensor
    branches: Tensor
    seen: Tensor
    places: Tensor


class SelfAttention(nn.Module):
    """Multi-head attention with biases on q, k and v and rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.heads, self.head_dim = shape.heads, shape.head_dim
        self.q_proj = nn.Linear(width, width, bias=True)
        self.k_proj = nn.Linear(width, width, bias=True)
        self.v_proj = nn.Linear(width, width, bias=True)
        self.o_proj = nn.Linear(width, width, bias=shape.output_bias)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], layout: Layout, wanted: Tensor | slice = slice(None)
    ) -> Tensor:
        """Attend, from (N, width) to the `wanted` ones of N."""

        def split(projection: nn.Linear) -> Tensor:
            out: Tensor = projection(x)
            return out.view(-1, self.heads, self.head_dim)

        q, k, v = rotate(split(self.q_proj), *rope), rotate(split(self.k_proj), *rope), split(self.v_proj)
        projected: Tensor = self.o_proj(branching_attention(q, k, v, layout).flatten(1)[wanted])
        return projected


def branching_attention(q_nhd: Tensor, k_nhd: Tensor, v_nhd: Tensor, layout: Layout) -> Tensor:
    """Attention of (N, H, D) queries: trunks over themselves, branches over their trunk and themselves."""
    heads, width = q_nhd.shape[1:]
    trunk_q, trunk_k, trunk_v = (tensor[layout.trunks].transpose(1, 2) for tensor in (q_nhd, k_nhd, v_nhd))
    of_trunks = F.scaled_dot_product_attention(trunk_q, trunk_k, trunk_v, is_causal=True)
    own_q, own_k, own_v = (tensor[layout.branches].transpose(2, 3) for tensor in (q_nhd, k_nhd, v_nhd))
    keys, values = _with_trunks(trunk_k, own_k), _with_trunks(trunk_v, own_v)
    of_branches = F.scaled_dot_product_attention(own_q.flatten(0, 1), keys, values, attn_mask=layout.seen)
    padded = torch.cat([each.transpose(1, 2).reshape(-1, heads, width) for each in (of_trunks, of_branches)])
    return padded[layout.places]


def _with_trunks(trunk_rhsd: Tensor, own_rkhtd: Tensor) -> Tensor:
    """For each branch, its trunk's keys or values and its own, (R*K, H, S+T, D)."""
    trunks = trunk_rhsd[:, None].expand(-1, own_rkhtd.shape[1], -1, -1, -1)
    return torch.cat((trunks, own_rkhtd), dim=3).flatten(0, 1)


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to each token."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = SelfAttention(shape)
        self.mlp = GatedMLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], layout: Layout, wanted: Tensor | slice = slice(None)
    ) -> Tensor:
        """Attention, then MLP, for the `wanted` ones of N tokens."""
        x = x[wanted] + self.self_attn(self.input_layernorm(x), rope, layout, wanted)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embeddings, layers and final norm: everything but the output head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, tokens: Tensor, positions: Tensor, layout: Layout, wanted: Tensor) -> Tensor:
        """Hidden states (len(wanted), width), the last layer leaving out what nobody wants."""
        x = self.embed_tokens(tokens)
        half = torch.is_autocast_enabled(x.device.type)
        rope = rope_tables(positions, self.shape, torch.bfloat16 if half else x.dtype)
        *layers, last = self.layers
        for layer in layers:
            x = layer(x, rope, layout)
        out: Tensor = self.norm(last(x, rope, layout, wanted))
        return out


class Policy(nn.Module):
    """The decoder with its own, untied output head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, positions: Tensor, layout: Layout, wanted: Tensor) -> Tensor:
        """Logits (len(wanted), V) at the flat token indices `wanted`; the head runs nowhere else."""
        logits: Tensor = self.lm_head(self.model(tokens, positions, layout, wanted))
        return logits


def rope_tables(positions: Tensor, shape: ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (N, 1, D) of the rotary angles, in the layout of transformers."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32) / shape.head_dim
    angles = positions.float()[:, None, None] * (shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding on the last dimension."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
