"""Muon for the matrices and AdamW for the rest, both on one decaying schedule.

Muon orthogonalises the momentum of each weight matrix. The matrices of one shape are stacked, so a step is a few
batched products instead of hundreds of small ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by five Newton-Schulz steps; learning rate per unit of spectral norm."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        super().__init__([{"params": group} for group in by_shape.values()], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every group by one orthogonalised step."""
        del closure
        for group in self.param_groups:
            parameters = group["params"]
            gradients = torch.stack([parameter.grad for parameter in parameters])
            state = self.state[parameters[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradients)
            state["momentum"].lerp_(gradients, 1 - group["momentum"])
            direction = orthogonalise(gradients.lerp(state["momentum"], group["momentum"]))
            rows, columns = direction.shape[-2:]
            scale = group["lr"] * max(1.0, rows / columns) ** 0.5
            torch._foreach_add_(parameters, list(direction.to(gradients.dtype).unbind(0)), alpha=-scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices of a stack (K, rows, columns), roughly."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    back: Tensor = x.mT if tall else x
    return back


def build_optimizers(model: nn.Module, muon_lr: float, adamw_lr: float) -> list[torch.optim.Optimizer]:
    """Muon on the layers' matrices, AdamW on embeddings, head, norms and biases."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inside = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
        (matrices if inside else rest).append(parameter)
    fused = next(model.parameters()).is_cuda
    return [
        Muon(matrices, lr=muon_lr),
        torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]


def schedule(step: int, total: int, decay: int, warmup: int = 20) -> float:
    """The factor on both learning rates: a short rise, a plateau, then a straight line to zero in the last steps."""
    return min(1.0, (step + 1) / warmup, (total - step) / max(1, decay))
