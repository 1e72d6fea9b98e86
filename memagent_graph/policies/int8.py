"""Linear layers in 8-bit integers, for a policy that reads on a CPU.

Weights have a scale for each output, activations one for each token, both symmetric; products are summed exactly, in
32-bit integers. So a layer's result for a token does not depend on the other tokens of a batch, as it does with the
dynamic quantisation of `torch.ao`, which has one scale for all. A few inputs of each layer are much larger than the
others and would leave these few steps. As in SmoothQuant (arXiv 2211.10438), each input is multiplied by the square
root of its largest weight over its largest value on a sample, and its weights are divided by that.
`python -m benchmarks.engines` measures speed and answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import nn

SAMPLE: Final = """\
The lighthouse of Arden was built in 1821 by Anna Berg, who "never liked the sea"; its lamp burns 40 litres of oil.

2. Settings

   retries = 3        # how often a request is sent again
   timeout = 10.5     # in seconds

If the file is empty, nothing is printed, and the exit status is 0. Otherwise every line is copied to standard output
(see also `--quiet`). You may charge a fee for a copy, but not for the right to use it, unless both parties agree.

Who built the lighthouse? What happens if the file is empty? Give the answer alone, or write "not stated".
"""
"""English of several kinds, for the size of each layer's inputs."""
_MAX_INT8: Final = 127
_MIN_DIVISOR: Final = 1e-12
"""Instead of 0, as a divisor."""


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and activations; input and output stay in floats.

    Args:
        linear: the layer.
        largest: each input's largest absolute value on some sample, (in).

    Attributes:
        relief: the factor of each input, by which its weights are divided, (in): it makes large inputs smaller.
        weight: transposed, (in, out).
        scale: of the weights, (out).
        bias: (out), if there is one.
    """

    def __init__(self, linear: nn.Linear, largest: torch.Tensor) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        self.relief = (_at_least(weight.abs().amax(0)) / _at_least(largest)).sqrt()
        weight = weight / self.relief
        scale = _scale(weight)
        self.weight = (weight / scale).round().to(torch.int8).t()
        self.scale = scale.squeeze(-1)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out)."""
        rows = x.reshape(-1, x.shape[-1]) * self.relief
        scale = _scale(rows)
        sums = torch._int_mm((rows / scale).round().to(torch.int8), self.weight)
        out = sums.float() * scale * self.scale
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)


def quantise(model: nn.Module, run_sample: Callable[[], object]) -> None:
    """Replace all linear layers of a model in place, its output head too.

    Args:
        model: in float32.
        run_sample: runs the model on `SAMPLE`, or on another text like those that it will read.
    """
    layers = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear)
    ]
    largest = [torch.zeros(layer.in_features) for _, _, layer in layers]
    hooks = [
        layer.register_forward_pre_hook(partial(_note_largest, seen))
        for (_, _, layer), seen in zip(layers, largest, strict=True)
    ]
    run_sample()
    for hook in hooks:
        hook.remove()
    for (parent, name, layer), seen in zip(layers, largest, strict=True):
        setattr(parent, name, Int8Linear(layer, seen))


def is_fast_here() -> bool:
    """Whether this machine multiplies 8-bit integers faster than floats, as far as we have measured: with AVX-512.

    Elsewhere torch may sum them one by one.
    """
    has_mkldnn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_mkldnn and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _note_largest(seen: torch.Tensor, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    torch.maximum(seen, inputs[0].detach().abs().flatten(0, -2).amax(0), out=seen)


def _scale(values: torch.Tensor) -> torch.Tensor:
    """One for each row, so that the largest value becomes 127."""
    return _at_least(values.abs().amax(-1, keepdim=True) / _MAX_INT8)


def _at_least(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(min=_MIN_DIVISOR)
