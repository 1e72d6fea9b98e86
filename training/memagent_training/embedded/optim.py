"""Muon for the matrices and AdamW for the rest, both on one decaying schedule."""

from __future__ import annotations

import torch
from torch import nn

from memagent_training.algorithm.muon import Muon


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
