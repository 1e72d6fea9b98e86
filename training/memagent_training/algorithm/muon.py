"""Muon for the layers' matrices and AdamW for the rest, as one optimizer for schedulers and checkpoints.

Muon (https://kellerjordan.github.io/posts/muon/) orthogonalises each matrix's momentum, so that all its directions move
equally far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
STEPS: Final = 5
BATCH_NUMBERS: Final = 1 << 22
"""How many numbers are orthogonalised at once: batches reduce the overhead of small matrices; large ones take
memory."""


class Muon(torch.optim.Optimizer):
    """The steps of `torch.optim.Muon`, the matrices of one shape as one batch.

    torch's own computes in bfloat16 everywhere, which processors without bfloat16 emulate about 40 times slower than
    float32; this one uses it only where it is fast.

    Args:
        parameters: matrices.
        lr: per unit of spectral norm.
        momentum: Nesterov's.
        weight_decay: decoupled from the gradient.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient. `closure` is ignored: the gradients are already computed."""
        del closure
        for group in self.param_groups:
            alike: dict[tuple[torch.Size, torch.device], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for matrix in group["params"]:
                if (gradient := matrix.grad) is not None:
                    alike[matrix.shape, matrix.device].append((matrix, gradient))
            for pairs in alike.values():
                at_once = max(1, BATCH_NUMBERS // pairs[0][0].numel())
                for first in range(0, len(pairs), at_once):
                    self._move(group, pairs[first : first + at_once])

    def _move(self, group: dict[str, Any], pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Move matrices of one shape by their gradients."""
        rows, columns = pairs[0][0].shape
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        moves = orthogonalise(torch.stack([self._direction(*pair, group["momentum"]) for pair in pairs]))
        for (matrix, _), move in zip(pairs, moves, strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(move.to(matrix.dtype), alpha=rate)

    def _direction(self, matrix: nn.Parameter, gradient: Tensor, momentum: float) -> Tensor:
        """Add the gradient to the momentum and return Nesterov's direction."""
        state = self.state[matrix]
        if "momentum_buffer" not in state:  # as in torch's own checkpoints
            state["momentum_buffer"] = torch.zeros_like(matrix)
        buffer: Tensor = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return the nearest (semi-)orthogonal matrices of a stack (K, rows, columns), roughly."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if bfloat16_is_fast(matrices.device) else matrices.float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    back: Tensor = x.mT if tall else x
    return back


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that step together; groups of AdamW come first.

    Args:
        model: its parameters are trained, except those without a gradient.
        lr: AdamW's learning rate, for embeddings, head, norms, biases, and adapters' vectors.
        muon_lr: Muon's, per unit of spectral norm, for matrices between embedding and head.
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
        decayed, plain = {"params": tables, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}
        rest = [group for group in (decayed, plain) if group["params"]]
        self._parts: list[torch.optim.Optimizer] = []
        if rest:  # adapters have only matrices
            self._parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps))
        if matrices:
            self._parts.append(Muon(matrices, lr=muon_lr, weight_decay=weight_decay))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share_groups()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step with both. `closure` is ignored: the gradients are already computed."""
        del closure
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both states from `state_dict`."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()

    def _share_groups(self) -> None:
        """Schedulers change the learning rates of these groups; they are the parts' own."""
        self.param_groups = [group for part in self._parts for group in part.param_groups]


def _split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices inside the layers, those of embedding and head, and the vectors."""
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


def bfloat16_is_fast(device: torch.device) -> bool:
    """Whether bfloat16 is assumed to be as fast as float32.

    True for processors with AVX-512 or SVE, for which oneDNN has kernels. On one with only AVX2, a product took 45
    times as long as in float32; others were not compared.
    """
    return device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "SVE"))
