"""Attention of rows in one sequence, exact and without a mask: only pairs of tokens that see each other are computed.

A token sees the tokens before it in its node, and those of all ancestors (`layouts.py`). Both are contiguous in the
sequence, so there are two blocks per node: its own tokens with each other, and its descendants with the node. The
attention is computed for each block, and the outputs are combined, weighted by the log-sum-exp of each block's scores.
Keys and values are not copied, even if many rows share them. The blocks have as many pairs as the single rows, less the
pairs within shared prefixes. This is the computation on a CPU; elsewhere FlexAttention gets the same mask.

`NodeMask` connects this to a model of transformers. It is passed as a 4-D attention mask, which models pass unchanged
to SDPA (5.23, checked by the tests), and SDPA calls the mask's own function: torch's mechanism for masks that are not
matrices, see torch.nn.attention.bias. Nothing in the model is changed or registered, a layer that is run again by
gradient checkpointing gets the same mask, and a model that does anything else with the mask fails with an error instead
of a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from memagent_training.forward.layouts import Node
from memagent_training.training_errors import TrainingError


class NodeMask(Tensor):
    """Represents the (1, 1, N, N) mask of a sequence's nodes without storing its entries."""

    nodes: tuple[Node, ...]

    @cached_property
    def blocks(self) -> BlockMask:
        """The FlexAttention mask, built once for all layers."""
        lengths = torch.tensor([node.end - node.start for node in self.nodes])
        ends = torch.tensor([node.subtree_end for node in self.nodes]).repeat_interleave(lengths).to(self.device)
        tokens = len(ends)
        return create_block_mask(
            lambda _batch, _head, query, key: (key <= query) & (query < ends[key]),
            None, None, tokens, tokens, device=str(self.device),
        )  # fmt: skip

    @staticmethod
    def __new__(cls, nodes: tuple[Node, ...], device: torch.device | str = "cpu") -> NodeMask:
        """Return a one-element tensor, expanded to that shape."""
        tokens = nodes[-1].end
        mask = torch.zeros((), dtype=torch.bool, device=device).expand(1, 1, tokens, tokens).as_subclass(cls)
        mask.nodes = nodes
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute SDPA for this mask, allow functions that only inspect it, and refuse all others; torch calls this."""
        if func is functional.scaled_dot_product_attention:
            return attend(*args, **(kwargs or {}))
        if func in _ALLOWED_FUNCTIONS or getattr(func, "__name__", None) == "__get__":
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        raise TrainingError(
            f"the model's attention does not pass its mask to SDPA, but calls {getattr(func, '__name__', func)} on it:"
            " use --set layout=padded"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NodeMask({len(self.nodes)} nodes, {self.nodes[-1].end} tokens)"


_ALLOWED_FUNCTIONS: frozenset[Any] = frozenset(
    {Tensor.dim, Tensor.size, Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex}
)
"""Functions that wrappers and models call on any tensor."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: NodeMask,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `scaled_dot_product_attention` with a `NodeMask`; its arguments are described there.

    Raises:
        TrainingError: there is dropout, or there are keys other than those of the mask's tokens, such as cached ones.
    """
    nodes = attn_mask.nodes
    if dropout_p:
        raise TrainingError(
            "the model's attention has dropout: set attention_dropout to 0 in its config, or use --set layout=padded"
        )
    if not query.shape[2] == key.shape[2] == nodes[-1].end:
        raise TrainingError(
            f"the model's attention has {query.shape[2]} queries and {key.shape[2]} keys for {nodes[-1].end} tokens:"
            " use --set layout=padded"
        )
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.device.type != "cpu":
        return _compile_flex()(query, key, value, block_mask=attn_mask.blocks, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    key_width, value_width = key.shape[-1], value.shape[-1]
    scale = key_width**-0.5 if scale is None else scale
    # In bfloat16, the kernels are slow for small blocks, and branches have small blocks.
    inputs = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (query, key, value))
    if key_width != value_width:  # the kernels need one width
        width = max(key_width, value_width)
        inputs = (functional.pad(tensor, (0, width - tensor.shape[-1])) for tensor in inputs)
    output: Tensor = _BlockwiseAttention.apply(*inputs, nodes, scale)  # type: ignore[no-untyped-call]
    return output[..., :value_width].to(query.dtype)


@cache
def _compile_flex() -> Callable[..., Tensor]:
    """Return FlexAttention, whose GPU kernels leave out blocks in which no token sees another. Never run on a GPU."""
    return torch.compile(flex_attention, dynamic=True)


_attention: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The output, and for each query the log-sum-exp of its scores."""
_attention_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)
"""The gradients of queries, keys and values. With the output and log-sum-exp over all blocks, they are the block's
terms of the whole gradients."""


class _BlockwiseAttention(torch.autograd.Function):
    """Attention block by block on a CPU, with SDPA's kernels."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, nodes: tuple[Node, ...], scale: float | None
    ) -> Tensor:
        """Compute the attention block by block, and combine each block with those before it."""
        query, key, value = (_make_heads_contiguous(tensor) for tensor in (query, key, value))
        output = _make_zeros(query)
        logsumexp = output.new_full(query.shape[:3], -torch.inf)
        for queries, keys, is_causal in _iter_blocks(nodes):
            block_output, block_logsumexp = _attention(
                query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, is_causal, scale=scale
            )
            _add_block(output[:, :, queries], logsumexp[:, :, queries], block_output, block_logsumexp)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.nodes, ctx.scale = nodes, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Compute the gradients block by block, and sum them."""
        query, key, value, output, logsumexp = ctx.saved_tensors
        output_gradient = _make_heads_contiguous(output_gradient)
        query_gradient, key_gradient, value_gradient = (_make_zeros(tensor) for tensor in (query, key, value))
        for queries, keys, is_causal in _iter_blocks(ctx.nodes):
            block_gradients = _attention_backward(
                output_gradient[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, queries],
                logsumexp[:, :, queries],
                0.0,
                is_causal,
                scale=ctx.scale,
            )
            query_gradient[:, :, queries] += block_gradients[0]
            key_gradient[:, :, keys] += block_gradients[1]
            value_gradient[:, :, keys] += block_gradients[2]
        gradients = (query_gradient.to(query.dtype), key_gradient.to(key.dtype), value_gradient.to(value.dtype))
        return *gradients, None, None


def _iter_blocks(nodes: Sequence[Node]) -> Iterator[tuple[slice, slice, bool]]:
    """Yield queries, the keys that they see, and whether the block is causal: the tokens of one node."""
    for node in nodes:
        tokens, descendants = slice(node.start, node.end), slice(node.end, node.subtree_end)
        yield tokens, tokens, True
        if descendants.start < descendants.stop:
            yield descendants, tokens, False


def _add_block(output: Tensor, logsumexp: Tensor, block_output: Tensor, block_logsumexp: Tensor) -> None:
    """Add a block's output to the output of the blocks before it, in place."""
    combined = torch.logaddexp(logsumexp, block_logsumexp)
    output.mul_((logsumexp - combined).exp()[..., None])
    output.addcmul_(block_output.to(combined.dtype), (block_logsumexp - combined).exp()[..., None])
    logsumexp.copy_(combined)


def _make_heads_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor with contiguous heads, as the kernels need them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _make_zeros(tensor: Tensor) -> Tensor:
    """Return zeros, (batch, heads, tokens, dimension), stored in the order (batch, tokens, heads, dimension)."""
    batch, heads, tokens, dimension = tensor.shape
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return torch.zeros(batch, tokens, heads, dimension, dtype=dtype).transpose(1, 2)
