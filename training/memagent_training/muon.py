"""Muon for the layers' matrices and AdamW for the rest, as one optimizer that schedulers and checkpoints know.

Muon (https://kellerjordan.github.io/posts/muon/) orthogonalises each matrix's momentum, so that every direction of it
moves equally far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that step together; groups of AdamW come first.

    Args:
        model: whose parameters are trained, but for those without a gradient.
        lr: AdamW's learning rate, for embeddings, head, norms, biases, and adapters' vectors.
        muon_lr: Muon's, per unit of spectral norm, for matrices between embedding and head.
        weight_decay: of all that is a matrix.
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
        matrices, tables, vectors = _sorted(model)
        decayed, plain = {"params": tables, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}
        rest = [group for group in (decayed, plain) if group["params"]]
        self._parts: list[torch.optim.Optimizer] = []
        if rest:  # adapters are matrices alone
            self._parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps))
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=muon_lr, weight_decay=weight_decay))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share_groups()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step with both. A closure is not called: gradients are there."""
        del closure
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Both states."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Both states, as `state_dict` gave them."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()

    def _share_groups(self) -> None:
        """Schedulers change the learning rates of these groups; they are the parts' own."""
        self.param_groups = [group for part in self._parts for group in part.param_groups]


def _sorted(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Matrices inside the layers; embedding and head; vectors."""
    of_tables = {
        id(parameter)
        for each in (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
        if each is not None
        for parameter in each.parameters()
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tables = [each for each in trained if id(each) in of_tables or each.ndim > 2]
    matrices = [each for each in trained if each.ndim == 2 and id(each) not in of_tables]
    vectors = [each for each in trained if each.ndim < 2 and id(each) not in of_tables]
    return matrices, tables, vectors
