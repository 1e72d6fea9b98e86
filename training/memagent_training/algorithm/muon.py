"""Muon for the layers' matrices and AdamW for the rest, as one optimizer for schedulers and checkpoints.

Muon (https://kellerjordan.github.io/posts/muon/) orthogonalises each matrix's momentum, so that all its directions move
equally far. torch's Muon computes this in bfloat16, which processors with only AVX2 emulate slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW, which step together; AdamW's parameter groups come first.

    Args:
        model: the model whose parameters with `requires_grad` are trained.
        lr: AdamW's learning rate, for embeddings, head, norms, biases, and adapters' vectors.
        muon_lr: Muon's learning rate, per unit of spectral norm, for the matrices between embedding and head.
        weight_decay: for all matrices.
        betas, eps: AdamW's.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        muon_lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        matrices, tables, vectors = _split_parameters(model)
        groups = [
            {"params": tables, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._optimizers: list[torch.optim.Optimizer] = []
        if groups:  # adapters have only matrices
            self._optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps))
        if matrices:
            self._optimizers.append(torch.optim.Muon(matrices, lr=muon_lr, weight_decay=weight_decay))
        super().__init__(self._list_parameter_groups(), {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step with both. `closure` is ignored: the gradients are already computed."""
        del closure
        for optimizer in self._optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        return {"parts": [optimizer.state_dict() for optimizer in self._optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both states from `state_dict`."""
        for optimizer, state in zip(self._optimizers, state_dict["parts"], strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = self._list_parameter_groups()  # loading creates new groups

    def _list_parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizers' own groups, so that a scheduler of these changes the optimizers' learning rates."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def _split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Return three lists: the matrices of the layers, the tables of embedding and head, and the vectors."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    table_ids = {id(parameter) for module in embeddings if module is not None for parameter in module.parameters()}
    matrices: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_table = id(parameter) in table_ids or parameter.ndim > 2
            (tables if is_table else matrices if parameter.ndim == 2 else vectors).append(parameter)
    return matrices, tables, vectors
