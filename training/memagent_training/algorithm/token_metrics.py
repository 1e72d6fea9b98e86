"""What a step's tokens tell of its loss, as exact means over the learned tokens that it forwards, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Of a micro-batch's rows: what the loss was made of. All are (B, T), detached, and count where `learned` is."""

    learned_BT: Tensor
    logprobs_BT: Tensor
    old_BT: Tensor
    logged_BT: Tensor | None
    """None where they are not comparable: those before a temperature other than 1."""
    reference_BT: Tensor | None
    entropies_BT: Tensor
    advantages_BT: Tensor
    """Before importance weights."""
    importance_BT: Tensor | None


@dataclass
class TokenMetrics:
    """Running sums over learned tokens.

    Args:
        epsilon_low, epsilon_high, delta: The clipping's bounds.
        per_conversation: Whether the ratio is one for all tokens of a conversation (GSPO).
        importance_cap: The cap of importance weights.
    """

    epsilon_low: float
    epsilon_high: float
    delta: float | None
    per_conversation: bool
    importance_cap: float | None
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _largest: dict[str, Tensor] = field(default_factory=dict)

    def add(self, values: TokenValues) -> None:
        """Add a micro-batch."""
        learned_BT = values.learned_BT
        log_ratio_BT = torch.where(learned_BT, values.logprobs_BT - values.old_BT, 0.0)
        if self.per_conversation:
            tokens_B1 = learned_BT.sum(1, keepdim=True).clamp(min=1)
            log_ratio_BT = (log_ratio_BT.sum(1, keepdim=True) / tokens_B1).expand_as(log_ratio_BT)
        ratio_BT = log_ratio_BT.exp()
        gains_BT, losses_BT = values.advantages_BT > 0, values.advantages_BT < 0
        means = {
            "entropy": values.entropies_BT,
            "ratio/mean": ratio_BT,
            "clip_ratio/low_mean": (ratio_BT < 1 - self.epsilon_low) & losses_BT,
            "clip_ratio/high_mean": (ratio_BT > 1 + self.epsilon_high) & gains_BT,
        }
        maxima = {"ratio/max": ratio_BT}
        if values.logged_BT is not None:
            means["logprob_gap/mean"] = maxima["logprob_gap/max"] = (values.logprobs_BT - values.logged_BT).abs()
        if self.delta is not None:
            means["clip_ratio/dual_mean"] = (ratio_BT > self.delta) & losses_BT
        if values.reference_BT is not None:
            log_ratio_to_new_BT = values.reference_BT - values.logprobs_BT
            means["kl"] = log_ratio_to_new_BT.exp() - log_ratio_to_new_BT - 1
        if values.importance_BT is not None:
            means["importance/mean"] = values.importance_BT
            means["importance/capped"] = values.importance_BT >= (self.importance_cap or 0.0)
        self._add("tokens", learned_BT, learned_BT)
        for name, value_BT in means.items():
            self._add(name, value_BT, learned_BT)
        for name, value_BT in maxima.items():
            largest = torch.where(learned_BT, value_BT, 0.0).max()
            self._largest[name] = torch.maximum(self._largest[name], largest) if name in self._largest else largest

    def reduced(self, accelerator: Accelerator) -> dict[str, float]:
        """Means and maxima over all ranks; every rank must ask."""
        names, largest = list(self._sums), list(self._largest)
        sums = accelerator.reduce(torch.stack([self._sums[name] for name in names]), reduction="sum")
        gathered = accelerator.gather(torch.stack([self._largest[name] for name in largest])[None])
        totals = dict(zip(names, sums.tolist(), strict=True))
        tokens = totals.pop("tokens")
        return {
            **{name: total / tokens for name, total in totals.items()},
            **dict(zip(largest, gathered.amax(0).tolist(), strict=True)),
        }

    def _add(self, name: str, value_BT: Tensor, learned_BT: Tensor) -> None:
        total = torch.where(learned_BT, value_BT.double(), 0.0).sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total
