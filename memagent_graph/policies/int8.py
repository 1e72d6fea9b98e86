"""Linear layers in 8-bit integers, for a policy that reads on a CPU.

Weights have a scale for each output, activations one for each token, both symmetric; products are summed exactly, in
32-bit integers. So a layer's result for a token does not depend on the other tokens of a batch. The dynamic
quantisation of `torch.ao` has one scale for all of them, and cost `smollm2` a sixth of its right answers; this one
costs none (`python -m benchmarks.engines`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGEST: Final = 127
_SMALLEST_SCALE: Final = 1e-12
"""Where everything is 0."""


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and activations; input and output stay in floats.

    Attributes:
        weight: transposed, (in, out).
        scale: of the weights, (out).
        bias: (out), if there is one.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = _scale(weight)
        self.weight = (weight / scale).round().to(torch.int8).t()
        self.scale = scale.squeeze(-1)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out)."""
        rows = x.reshape(-1, x.shape[-1])
        scale = _scale(rows)
        sums = torch._int_mm((rows / scale).round().to(torch.int8), self.weight)
        out = sums.float() * scale * self.scale
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)


def quantise(model: nn.Module) -> None:
    """Replace all linear layers of a model in place, its output head too."""
    for parent, name, linear in list(_linear_layers(model)):
        setattr(parent, name, Int8Linear(linear))


def is_fast_here() -> bool:
    """Whether this machine multiplies 8-bit integers faster than floats, as far as we have measured: with AVX-512.

    Elsewhere torch may sum them one by one.
    """
    has_mkldnn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_mkldnn and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _scale(values: torch.Tensor) -> torch.Tensor:
    """One for each row, so that the largest value becomes 127."""
    return (values.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=_SMALLEST_SCALE)


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child
