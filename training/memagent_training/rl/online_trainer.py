"""The trainer of a loop: one training run over all iterations, whose groups are collected while it runs.

There is one optimizer, one learning rate schedule and one series of checkpoints. Before the first step of an iteration,
the main process gets the groups from the source, and the other processes wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import TrainerCallback

from memagent_graph.errors import MemAgentError
from memagent_training.algorithm.schedule import ScheduledStep
from memagent_training.data.rollouts import RolloutGroup, require_known_token_ids
from memagent_training.job.config import MultiConvDAPOConfig
from memagent_training.job.trainer import MultiConvDAPOTrainer
from memagent_training.serving.policy_sync.probe import RowScorer, score_with_model
from memagent_training.training_errors import TrainingError

_SEED_STRIDE: Final = 7919
"""The difference between the seeds of two iterations."""


@dataclass(frozen=True, slots=True)
class IterationGroups:
    """The groups of an iteration."""

    groups: Sequence[RolloutGroup]
    policy_versions: Sequence[str] = ()
    """Versions of the weights, oldest first; the last one is that of the iteration's initial weights."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics for the training log, logged with those of the first step."""


class EndOfLoop(Exception):  # noqa: N818  it is not an error
    """The source has nothing more to train on; the message says why."""


GroupSource: TypeAlias = Callable[[int], IterationGroups]
"""Returns the groups of an iteration, counted from 0: at least as many as its optimizer steps. The iteration's weights
are already in its policy's folder. Only the main process calls it. Raises EndOfLoop if there are no groups."""


class OnlineTrainer(MultiConvDAPOTrainer):
    """Multi-Conv DAPO on groups that are collected with the trainer's newest weights.

    Args:
        model: as for `MultiConvDAPOTrainer`.
        source: called before each iteration to get its groups.
        args: the settings; `max_steps` is the total number of steps.
        steps_per_iteration: optimizer steps per iteration; each group is in one of them.
        save_policy: called on every process before each iteration, to write its weights to the folder from which the
            source reads them.
        callbacks, peft_config: as for `GRPOTrainer`.
    """

    _prints_gap = False  # the gap of each iteration is in the metrics

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
        """Take one optimizer step; collect the groups before the first step of an iteration."""
        self._begin_iteration(self.state.global_step // self._steps_per_iteration)
        return super().training_step(model, inputs, num_items_in_batch)

    def _get_scheduled_step(self) -> ScheduledStep:
        return self.schedule.get_step(self.state.global_step - self._iteration * self._steps_per_iteration)

    def _begin_iteration(self, iteration: int) -> None:
        if iteration == self._iteration:
            return
        self._save_policy(self, iteration)
        self.accelerator.wait_for_everyone()
        iteration_groups = self._collect_groups(iteration)
        policy: Any = self.model
        require_known_token_ids(policy.config, iteration_groups.groups)
        self._start_schedule(
            iteration_groups.groups, self.args, self.args.seed + _SEED_STRIDE * iteration, self._steps_per_iteration
        )
        self.policy_versions = tuple(iteration_groups.policy_versions)
        self._iteration = iteration
        for name, value in iteration_groups.metrics.items():
            self._metrics["train"][name].append(value)

    @property
    def row_scorer(self) -> RowScorer | None:
        """Computes log-probs of rows with the current weights, as in training; None if no process has all weights."""
        return None if self.is_fsdp_enabled or self.is_deepspeed_enabled else partial(score_with_model, self.model)

    def _collect_groups(self, iteration: int) -> IterationGroups:
        """Return the source's groups, on every process.

        Errors are also sent to the other processes, which would otherwise wait forever.
        """
        message: list[Any] = [None]
        if self.accelerator.is_main_process:
            try:
                message = [self._source(iteration)]
            except (EndOfLoop, MemAgentError) as error:
                message = [error]
            except Exception as error:
                reason = f"Iteration {iteration} has no groups: the main process failed with {error!r}"
                broadcast_object_list([TrainingError(reason)])
                raise
        broadcast_object_list(message)
        if isinstance(message[0], Exception):
            raise message[0]
        groups: IterationGroups = message[0]
        return groups

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load only what the Trainer saved, because each iteration recomputes its log-probs."""
        super(MultiConvDAPOTrainer, self)._load_optimizer_and_scheduler(checkpoint)  # type: ignore[no-untyped-call]
