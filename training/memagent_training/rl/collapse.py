"""Detects when more training would only make a policy worse, and says what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from memagent_training.rl.loop_journal import CollectionRecord
from memagent_training.training_errors import TrainingError

_OTHERWISE: Final = (
    "Begin a loop in another folder from an earlier policy (`best` in this one, if any was measured) with "
)
_SHARE: Final = 0.5
"""The newest average must not fall below this share of the best one of the same stage, if that is above 0."""


class CollapsedError(TrainingError):
    """The policy became much worse during training."""


def check_rewards(records: Sequence[CollectionRecord], window: int = 8) -> None:
    """Refuse to continue after rewards fell. Stages are not compared with each other: rewards on longer documents are
    lower at first.

    Args:
        records: the collections so far.
        window: how many of them are averaged; an iteration with too few groups has several.

    Raises:
        CollapsedError: the newest average is below half the best one before.
    """
    if not records:
        return
    rewards = [each.reward for each in records if each.stage == records[-1].stage]
    averages = [fmean(rewards[end - window : end]) for end in range(window, len(rewards) + 1)]
    if averages and max(averages) > 0 and averages[-1] < _SHARE * max(averages):
        raise CollapsedError(
            f"the policy collapsed: the mean reward of the last {window} collections is {averages[-1]:.3f}, "
            f"and it was {max(averages):.3f} before",
            hint=f"{_OTHERWISE}a lower learning rate, or smaller steps (fewer an iteration, max_grad_norm, beta).",
        )


def check_metrics(metrics: Mapping[str, float], step: int) -> None:
    """Refuse to continue with numbers that are not finite.

    Raises:
        CollapsedError: loss or gradient are not finite.
    """
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics.get(name, 0.0)):
            raise CollapsedError(
                f"training broke down at step {step}: {name} is {metrics[name]}",
                hint=f"{_OTHERWISE}a lower learning rate or max_grad_norm.",
            )
