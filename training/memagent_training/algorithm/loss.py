"""The loss of a token in Multi-Conv DAPO, as in MemAgent's released recipe.

    r    = p(t) / p_old(t); or one for all tokens of a conversation, their geometric mean (GSPO)
    L    = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), where A < 0 at most dual_clip |A|
    loss = min(p_old(t) / p_logged(t), importance_cap) L + kl_coef KL, with Schulman's k3, at most kl_clamp, for KL

A step's loss is the sum of these times the weights of `advantages.prepare_batch`. Tensors are (B, T): a row for each
conversation, a column for each completion token. A token that is not learned has a ratio of 1 and needs a weight of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

LOG_RATIO_BOUND: Final = 20.0
"""Bound on log ratios, as in verl. It is far outside the clip range. Without it, the exponential can overflow, and the
gradient becomes 0 times infinity, which is NaN."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of a token, a function with these settings; None turns off a part of the loss."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    kl_coef: float = 1e-3
    kl_clamp: float | None = 10.0
    importance_cap: float | None = None
    per_conversation: bool = False

    def __call__(
        self, logprobs_BT: Tensor, old_BT: Tensor, logged_BT: Tensor, reference_BT: Tensor | None,
        advantages_BT: Tensor, loss_mask_BT: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return each token's loss, (B, T), in nats, differentiable with respect to `logprobs_BT`.

        `reference_BT` is used only for KL.
        """
        r_BT, A_BT = self.compute_ratio(logprobs_BT, old_BT, loss_mask_BT), advantages_BT
        loss_BT = -torch.min(r_BT * A_BT, r_BT.clamp(1 - self.clip_low, 1 + self.clip_high) * A_BT)
        if self.dual_clip is not None:
            loss_BT = torch.where(A_BT < 0, loss_BT.clamp(max=-self.dual_clip * A_BT), loss_BT)
        if self.importance_cap is not None:
            loss_BT = loss_BT * self.compute_importance(old_BT, logged_BT)
        return loss_BT if reference_BT is None else loss_BT + self.kl_coef * self.compute_kl(logprobs_BT, reference_BT)

    def compute_ratio(self, logprobs_BT: Tensor, old_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
        """Return p / p_old of each token, (B, T), or its geometric mean over a conversation (GSPO)."""
        log_r_BT = torch.where(loss_mask_BT, logprobs_BT - old_BT, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        if self.per_conversation:
            log_r_BT = (log_r_BT.sum(1, keepdim=True) / loss_mask_BT.sum(1, keepdim=True).clamp(min=1)) * loss_mask_BT
        return log_r_BT.exp()

    def compute_importance(self, old_BT: Tensor, logged_BT: Tensor) -> Tensor:
        """Return the truncated importance weight of each token, min(p_old / p_logged, cap)."""
        return (old_BT - logged_BT).exp().clamp(max=self.importance_cap)

    def compute_kl(self, logprobs_BT: Tensor, reference_BT: Tensor) -> Tensor:
        """Return k3, an estimate of the KL divergence from the reference that is never negative."""
        log_ratio_BT = (reference_BT - logprobs_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        k3_BT = log_ratio_BT.exp() - log_ratio_BT - 1
        return k3_BT if self.kl_clamp is None else k3_BT.clamp(max=self.kl_clamp)
