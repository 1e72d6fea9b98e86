"""Detects when more training would only make a policy worse, and says what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from memagent_training.rl.loop_journal import CollectionRecord
from memagent_training.training_errors import TrainingError

_OTHERWISE: Final = (
    "Begin a loop in another folder from an earlier policy (`best` in this one, if any was measured) with "
)


class CollapsedError(TrainingError):
    """The policy became much worse during training."""


@dataclass(frozen=True, slots=True)
class CollapseSettings:
    """When a loop stops."""

    window: int = 8
    """How many collections are averaged; an iteration with too few groups has several."""
    share: float = 0.5
    """The newest average must not fall below this share of the best one of the same stage, if that is above 0."""

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 <= self.share < 1:
            raise TrainingError(
                f"collapse cannot be seen with a window of {self.window} and a share of {self.share}",
                hint="Give a window of 1 or more, and a share from 0 (never stop) up to 1.",
            )


def check_rewards(records: Sequence[CollectionRecord], settings: CollapseSettings) -> None:
    """Refuse to continue after rewards fell. Stages are not compared with each other: rewards on longer documents are
    lower at first.

    Raises:
        CollapsedError: the newest average is too far below the best one before.
    """
    if not records or settings.share == 0:
        return
    rewards = [each.reward for each in records if each.stage == records[-1].stage]
    averages = [fmean(rewards[end - settings.window : end]) for end in range(settings.window, len(rewards) + 1)]
    if averages and max(averages) > 0 and averages[-1] < settings.share * max(averages):
        raise CollapsedError(
            f"the policy collapsed: the mean reward of the last {settings.window} collections is {averages[-1]:.3f}, "
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
