"""The trainer of a loop: one training over all iterations, whose groups are collected while it runs.

Optimizer, learning rate and checkpoints are those of a single training. Before the first step of an iteration the
source is asked for its groups, on the main process; the others wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import TrainerCallback

from memagent_graph.errors import MemAgentError
from memagent_training.algorithm.schedule import ScheduledStep
from memagent_training.data.rollouts import RolloutGroup
from memagent_training.forward.recomputed import LogProbGap
from memagent_training.job.config import MultiConvDAPOConfig
from memagent_training.job.model_fit import check_fit
from memagent_training.job.trainer import MultiConvDAPOTrainer
from memagent_training.job.training_output import step_of
from memagent_training.training_errors import TrainingError

_SEED_STRIDE: Final = 7919
"""Between the seeds of two iterations' orders."""


@dataclass(frozen=True, slots=True)
class CollectedIteration:
    """What an iteration is trained on."""

    groups: Sequence[RolloutGroup]
    policy_versions: Sequence[str] = ()
    """Oldest first; the last is that of the weights which the iteration begins with."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """For the training log, beside the first step's."""


class EndOfLoop(Exception):  # noqa: N818  it is not an error
    """The source has nothing more to train on; says why."""


GroupSource: TypeAlias = Callable[[int], CollectedIteration]
"""The groups of an iteration, counted from 0, as many as it has optimizer steps at least; its weights are in its
policy's folder by then. Only the main process asks. Raises EndOfLoop where there are none."""


class OnlineTrainer(MultiConvDAPOTrainer):
    """Multi-Conv DAPO on groups that are collected with the weights that it has just made.

    Args:
        model: as of `MultiConvDAPOTrainer`.
        source: asked for groups before each iteration.
        args: the settings; `max_steps` says how many steps there are in all.
        steps_per_iteration: optimizer steps on one iteration's groups, each of which is in one of them.
        save_policy: called on every process before each iteration, to write its weights where the source looks for
            them.
        callbacks, peft_config: as of `GRPOTrainer`.
    """

    def __init__(
        self,
        model: Any,
        source: GroupSource,
        args: MultiConvDAPOConfig,
        *,
        steps_per_iteration: int,
        save_policy: Callable[[OnlineTrainer, int], None],
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
    ) -> None:
        super().__init__(model, None, args, callbacks=callbacks, peft_config=peft_config)
        self._source = source
        self._steps_per_iteration = steps_per_iteration
        self._save_policy = save_policy
        self._iteration = -1

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One optimizer step, before which its iteration's groups are collected if it is the first on them."""
        self._enter(self.state.global_step // self._steps_per_iteration)
        return super().training_step(model, inputs, num_items_in_batch)

    def _scheduled_step(self) -> ScheduledStep:
        return self.schedule.step(self.state.global_step - self._iteration * self._steps_per_iteration)

    def _enter(self, iteration: int) -> None:
        if iteration == self._iteration:
            return
        self._save_policy(self, iteration)
        self.accelerator.wait_for_everyone()
        collected = self._asked(iteration)
        policy: Any = self.model
        check_fit(policy.config, collected.groups)
        self._begin_schedule(
            collected.groups, self.args, self.args.seed + _SEED_STRIDE * iteration, self._steps_per_iteration
        )
        self.policy_versions = tuple(collected.policy_versions)
        self._iteration = iteration
        for name, value in collected.metrics.items():
            self._metrics["train"][name].append(value)

    def _asked(self, iteration: int) -> CollectedIteration:
        """What the source has, on every process; the others must hear of an error, too, or would wait for ever."""
        told: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                told = [self._source(iteration)]
            except (EndOfLoop, MemAgentError) as error:
                told = [error]
            except Exception as error:
                broken = f"Iteration {iteration} has no groups: the main process failed with {error!r}"
                broadcast_object_list([TrainingError(broken)])
                raise
        broadcast_object_list(told)
        if isinstance(told[0], Exception):
            raise told[0]
        collected: CollectedIteration = told[0]
        return collected

    def _tell_gap(self, gap: LogProbGap) -> None:
        """Not once an iteration: it is among the metrics."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The Trainer's alone: checkpoints lie between two iterations, and the next one's log-probs are computed again.

        Raises:
            TrainingError: This one does not.
        """
        step = None if checkpoint is None else step_of(Path(checkpoint))
        if step is not None and step % self._steps_per_iteration:
            raise TrainingError(
                f"{checkpoint} was saved within an iteration of {self._steps_per_iteration} optimizer steps",
                hint="Resume with the settings that the loop began with.",
            )
        super(MultiConvDAPOTrainer, self)._load_optimizer_and_scheduler(checkpoint)  # type: ignore[no-untyped-call]
