"""Multi-Conv DAPO on TRL's GRPOTrainer: logged rollouts with many conversations each, exact for any micro-batches.

TRL provides the reference model, adapters, the optimizer, checkpoints, logging, and whatever accelerate distributes.
The content of a step is different. A rollout has K conversations, so there is no batch of prompts to generate from. An
item of the dataloader is the index of an optimizer step, and the schedule gives the step's rows, weights and
micro-batches, the same on every rank. The loss of a micro-batch is the sum of its tokens' losses (`loss.TokenLoss`) and
entropies, times their weights in the whole step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import use_adapter

from memagent_training.algorithm.advantages import TrainingRow
from memagent_training.algorithm.muon import MuonWithAdamW
from memagent_training.algorithm.planner import PlannedMicroBatch
from memagent_training.algorithm.schedule import EQUAL_REWARDS_REMEDY, ScheduledStep
from memagent_training.algorithm.step_metrics import TokenMetrics, compute_device_metrics, compute_row_metrics
from memagent_training.data.rollouts import RolloutGroup, require_known_token_ids
from memagent_training.forward import recomputed_logprobs
from memagent_training.forward.layouts import IdRow, MicroBatch, lay_out
from memagent_training.forward.recomputed_logprobs import LogProbGap, RowKey, compare_logprobs, make_row_key
from memagent_training.forward.scoring import score_completions
from memagent_training.job.config import MultiConvDAPOConfig, OldLogProbs
from memagent_training.training_errors import TrainingError

_WARNING_GAP: Final = 0.02
"""The mean difference between logged and recomputed log-probs, in nats, above which it is more than rounding."""


class MultiConvDAPOTrainer(GRPOTrainer):
    """Trains a policy on logged groups of rollouts (MemAgent, arXiv 2507.02259; DAPO, arXiv 2503.14476).

    Args:
        model: a causal language model, or its path or hub id; also a peft model.
        groups: all groups, from `replay.load_groups`, the same on every rank. A subclass that collects groups during
            training passes None; `args.max_steps` is then the number of steps.
        args: the settings.
        processing_class: the tokenizer to save with the model; by default the model's own. Nothing is tokenised.
        policy_versions: names of the weights that wrote the runs, oldest first, for the metric of staleness.
        callbacks, peft_config: as for `GRPOTrainer`.

    Raises:
        TrainingError: the model cannot be trained on the groups.
    """

    args: MultiConvDAPOConfig
    _tag_names = ["trl", "multi-conv-dapo"]  # noqa: RUF012  TRL's type
    _name = "Multi-Conv DAPO"
    _prints_gap = True
    """Whether the difference between logged and recomputed log-probs is printed before the first step."""

    def __init__(
        self,
        model: Any,
        groups: Sequence[RolloutGroup] | None,
        args: MultiConvDAPOConfig,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        policy_versions: Sequence[str] = (),
        callbacks: list[TrainerCallback] | None = None,
        peft_config: Any = None,
    ) -> None:
        steps = args.max_steps
        if groups is not None:
            self._start_schedule(groups, args, args.seed)
            steps = self.schedule.steps_per_pass
        with _translate_setup_errors():
            super().__init__(
                model=model,
                reward_funcs=_refuse_reward_call,
                args=args,
                train_dataset=Dataset.from_dict({"step": list(range(steps))}),
                processing_class=processing_class,
                callbacks=callbacks,
                peft_config=peft_config,
            )
        if self.aux_loss_enabled:
            raise TrainingError(
                "the model balances its experts with an additional loss, which is not supported",
                hint="Set router_aux_loss_coef=0 to train without it.",
            )
        self.policy_versions = tuple(policy_versions)
        self._consecutive_skips = 0
        """The number of the latest steps that were skipped because loss or gradient was not finite."""
        self.logprob_gap: LogProbGap | None = None
        """The difference between logged and recomputed log-probs; None before the first step."""
        policy: Any = self.model
        self._weight_count = int(sum(parameter.numel() for parameter in policy.parameters()))
        if groups is not None:
            require_known_token_ids(policy.config, groups)

    def _start_schedule(
        self, groups: Sequence[RolloutGroup], args: MultiConvDAPOConfig, seed: int, steps: int | None = None
    ) -> None:
        """Schedule the optimizer steps over these groups, `steps` of them if set, and forget the previous groups."""
        self.schedule = args.make_schedule(groups, seed=seed, steps=steps)
        if not self.schedule.kept_groups:
            counts = Counter(self.schedule.batch.drop_reasons.values())
            reasons = ", ".join(f"{count} {reason.value}" for reason, count in counts.items()) or "there are none"
            raise TrainingError(
                f"none of the {len(groups)} groups has a training signal ({reasons})", hint=EQUAL_REWARDS_REMEDY
            )
        self._mean_reward = fmean(rollout.reward for group in groups for rollout in group.rollouts_G)
        self._recomputed_logprobs: Mapping[RowKey, Tensor] = {}
        self._has_started = False

    def _get_scheduled_step(self) -> ScheduledStep:
        """Return the next optimizer step."""
        return self.schedule.get_step(self.state.global_step)

    # Methods that the Trainer's loop calls

    def get_train_dataloader(self) -> DataLoader[dict[str, int]]:
        """Return one item per optimizer step, not sharded over ranks: the plan determines what each rank does."""
        steps: Any = self.train_dataset
        return DataLoader(steps, batch_size=1, collate_fn=itemgetter(0))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the Trainer's optimizer, or Muon and AdamW as one if `muon_learning_rate` is set.

        Raises:
            TrainingError: Muon is set, and matrices are sharded over ranks; or the settings of the optimizer are wrong.
        """
        muon_rate = self.args.muon_learning_rate
        trained_model: Any = self.model if model is None else model
        if self.optimizer is None and muon_rate is not None:
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise TrainingError(
                    "Muon needs each matrix whole, and FSDP and DeepSpeed spread them over ranks",
                    hint="Leave muon_learning_rate out, or train with plain data parallelism.",
                )
            self.optimizer = MuonWithAdamW(
                trained_model,
                lr=self.args.learning_rate,
                muon_lr=muon_rate,
                weight_decay=self.args.weight_decay,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
        with _translate_setup_errors():
            optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the Trainer's scheduler. Raises TrainingError if its settings are wrong."""
        with _translate_setup_errors():
            return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run the forward and backward passes of one optimizer step, micro-batch by micro-batch.

        Returns:
            This rank's part of the loss times the number of ranks, so that their mean is the step's loss.
        """
        model.train()
        step = self._get_scheduled_step()
        if not self._has_started:
            self._start_training(model)
        started_at = time.perf_counter()
        metrics = TokenMetrics(self.args.token_loss)
        planned_batches = step.plan.micro_batches[self.accelerator.process_index]
        loss = torch.zeros((), device=self.accelerator.device)
        for position, micro_batch in enumerate(planned_batches, start=1):
            is_last = position == len(planned_batches)
            self.accelerator.gradient_state._set_sync_gradients(is_last)  # used by DeepSpeed's engine
            # Not with FSDP, where every rank would hold whole gradients until the last micro-batch.
            with nullcontext() if is_last or self.is_fsdp_enabled else self.accelerator.no_sync(model):
                loss += self._forward_backward(model, step.rows, micro_batch, metrics)
        is_skipped = self._skip_if_not_finite(model, loss)
        self._log_step(step, metrics, time.perf_counter() - started_at, is_skipped=is_skipped)
        return torch.zeros_like(loss) if is_skipped else loss

    def _skip_if_not_finite(self, model: nn.Module, loss: Tensor) -> bool:
        """Drop the gradients if loss or gradient is not finite on any rank; return whether they were dropped.

        Raises:
            TrainingError: too many such steps in a row.
        """
        magnitudes = [loss.detach().float()]
        if not self.is_deepspeed_enabled:  # which keeps gradients to itself, and checks them when it scales the loss
            magnitudes += [
                _get_local_shard(parameter.grad.detach()).float().abs().sum().to(loss.device)
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
        # Stacked, so that there is one wait for the device.
        nonfinite_count = (~torch.isfinite(torch.stack(magnitudes))).sum().float()
        nonfinite_total = self.accelerator.reduce(nonfinite_count, reduction="sum")
        if not float(nonfinite_total):
            self._consecutive_skips = 0
            return False
        self._consecutive_skips += 1
        model.zero_grad(set_to_none=True)
        step = self.state.global_step + 1
        if self._consecutive_skips > self.args.max_skipped_steps:
            raise TrainingError(
                f"loss or gradient was not finite in {self._consecutive_skips} steps in a row, most recently step "
                f"{step}",
                hint="Lower the learning rate or max_grad_norm, look at rewards and log-probs of the step's runs, or "
                "allow more (--set max_skipped_steps=...). Continue from the last checkpoint with --resume.",
            )
        if self.accelerator.is_main_process:
            print(f"step {step} skipped: loss or gradient is not finite", flush=True)
        return True

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write nothing: TRL's card describes another method, and `saved_policy.write_card` writes the policy's."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Return FLOPs for the log: 6 per weight and forwarded token, without attention."""
        step = self._get_scheduled_step()
        return int(6 * self._weight_count * step.plan.forwarded_tokens / self.accelerator.num_processes)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the Trainer's files, then the recomputed log-probs, whose file marks a checkpoint as complete.

        Older checkpoints are deleted only after that.
        """
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[no-untyped-call]
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            run_folder = Path(self._get_output_dir(trial=trial))
            path = run_folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}" / recomputed_logprobs.FILE_NAME
            recomputed_logprobs.save(path, self.schedule.fingerprint, self._recomputed_logprobs)
            rotate_checkpoints(str(run_folder), limit, self.state.best_model_checkpoint, use_mtime=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[no-untyped-call]
        if checkpoint is not None:
            self._recomputed_logprobs = recomputed_logprobs.load(
                Path(checkpoint) / recomputed_logprobs.FILE_NAME, self.schedule.fingerprint
            )
            self._has_started = True

    # One micro-batch

    def _forward_backward(
        self,
        model: nn.Module,
        rows: Sequence[TrainingRow],
        planned_batch: PlannedMicroBatch,
        metrics: TokenMetrics,
    ) -> Tensor:
        micro_batch, (weights_BT, advantages_BT, logged_BT, old_BT) = self._lay_out_with_loss_inputs(
            rows, planned_batch
        )
        loss_mask_BT = weights_BT > 0
        reference_BT = self._compute_reference_logprobs(model, micro_batch)
        entropy_coef = self.args.entropy_coef
        with self.compute_loss_context_manager():
            scores = score_completions(
                model,
                micro_batch,
                temperature=self.args.temperature,
                with_entropy=True,
                entropy_gradient=entropy_coef != 0,
            )
            logprobs_BT, entropies_BT = scores.logprobs_BT, scores.entropies_BT
            assert entropies_BT is not None  # noqa: S101  they were asked for
            loss_BT = metrics.loss(logprobs_BT, old_BT, logged_BT, reference_BT, advantages_BT, loss_mask_BT)
            if entropy_coef != 0:
                loss_BT = loss_BT - entropy_coef * entropies_BT
            loss = (loss_BT * weights_BT).sum() * self.accelerator.num_processes
        comparable_BT = logged_BT if self.args.logged_is_sampled else None
        metrics.add(
            logprobs_BT.detach(),
            old_BT,
            comparable_BT,
            reference_BT,
            advantages_BT,
            loss_mask_BT,
            entropies_BT.detach(),
        )
        options = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
        self.accelerator.backward(loss, **options)
        detached: Tensor = loss.detach()
        return detached

    def _lay_out_with_loss_inputs(
        self, rows: Sequence[TrainingRow], planned_batch: PlannedMicroBatch
    ) -> tuple[MicroBatch, Tensor]:
        """Return the model inputs of a micro-batch, and the inputs of the loss for each completion token.

        The latter are (4, B, T): weights, advantages, logged and old log-probs, 0 where there is no token. Padding rows
        have a weight of 0.
        """
        planned_rows = [rows[index] for index in planned_batch.rows]
        micro_batch = self._lay_out_rows(planned_rows, planned_batch.padding_row_count)
        values_4BT = torch.zeros(4, *micro_batch.score_index_BT.shape)
        for index, row in enumerate(planned_rows):
            conversation = row.conversation
            row_values_4T = values_4BT[:, index, : len(conversation.completion_ids_T)]
            row_values_4T[0] = row.weight
            if conversation.loss_mask_T is not None:
                row_values_4T[0] *= torch.tensor(conversation.loss_mask_T)
            row_values_4T[1] = row.advantage
            row_values_4T[2] = torch.tensor(conversation.logprobs_T)
            row_values_4T[3] = self._get_old_logprobs(row)
        return micro_batch, values_4BT.to(self.accelerator.device)

    def _lay_out_rows(self, rows: Sequence[TrainingRow], padding_row_count: int) -> MicroBatch:
        padding_rows = [IdRow((0,), (0,))] * padding_row_count
        conversations = [row.conversation for row in rows]
        return lay_out([*conversations, *padding_rows], self.args.layout, device=self.accelerator.device)

    def _get_old_logprobs(self, row: TrainingRow) -> Tensor:
        if self.args.old_logprobs == OldLogProbs.LOGGED:
            return torch.tensor(row.conversation.logprobs_T)
        # A row without a gradient, forwarded because its step has no other, was not recomputed.
        return self._recomputed_logprobs.get(make_row_key(row), torch.tensor(row.conversation.logprobs_T))

    def _compute_reference_logprobs(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor | None:
        """Return the log-probs under the reference model, or the model without adapters; None without a KL penalty."""
        if self.args.beta == 0:
            return None
        adapters: AbstractContextManager[Any] = nullcontext()
        if self.ref_model is None:
            unwrapped_model = self.accelerator.unwrap_model(model)
            adapters = use_adapter(
                unwrapped_model, adapter_name="ref" if "ref" in unwrapped_model.peft_config else None
            )
        with torch.no_grad(), adapters, self._disable_checkpointing(model):
            reference: Any = self.ref_model or model
            return score_completions(reference, micro_batch, temperature=self.args.temperature).logprobs_BT

    def _disable_checkpointing(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Turn off gradient checkpointing, which would warn that there is no gradient."""
        options: Any = self.args.gradient_checkpointing_kwargs
        context: AbstractContextManager[Any] = disable_gradient_checkpointing(
            self.accelerator.unwrap_model(model), options
        )
        return context

    # Before the first step

    def _start_training(self, model: nn.Module) -> None:
        """Recompute the log-probs that are the ratios' denominators, and compare the logged ones with the model's."""
        fingerprints = gather_object([self.schedule.fingerprint])
        if len(set(fingerprints)) > 1:
            raise TrainingError(
                "the processes that train together have different runs or rewards",
                hint="Use rewards that are the same each time, or log them (RunLog.reward) first.",
            )
        self.args.require_steps_after_warm_up(self.state.max_steps)
        is_recomputed = self.args.old_logprobs == OldLogProbs.RECOMPUTED
        step = self.schedule.plan_groups(self.schedule.kept_groups) if is_recomputed else self.schedule.get_step(0)
        logprobs = self._compute_logprobs(model, step, self.args.temperature, heaviest_only=not is_recomputed)
        if is_recomputed:
            self._recomputed_logprobs = logprobs
        if not self.args.logged_is_sampled:  # the logged ones are before temperature
            logprobs = self._compute_logprobs(model, step, 1.0, heaviest_only=True)
        self.logprob_gap = compare_logprobs(step.rows, logprobs)
        self._check_logprob_gap()
        self._has_started = True

    def _compute_logprobs(
        self, model: nn.Module, step: ScheduledStep, temperature: float, *, heaviest_only: bool
    ) -> dict[RowKey, Tensor]:
        """Return the log-probs of a step's rows on all ranks, or only of each rank's heaviest micro-batch."""
        planned_batches = step.plan.micro_batches[self.accelerator.process_index]
        logprobs: list[tuple[RowKey, Tensor]] = []
        with torch.no_grad(), self._disable_checkpointing(model):
            for planned_batch in planned_batches[:1] if heaviest_only else planned_batches:
                rows = [step.rows[index] for index in planned_batch.rows]
                micro_batch = self._lay_out_rows(rows, planned_batch.padding_row_count)
                logprobs_BT = score_completions(model, micro_batch, temperature=temperature).logprobs_BT.float().cpu()
                for row, logprobs_T in zip(rows, logprobs_BT, strict=False):
                    logprobs.append((make_row_key(row), logprobs_T[: len(row.conversation.completion_ids_T)].clone()))
        return dict(gather_object(logprobs))

    def _check_logprob_gap(self) -> None:
        """Print the gap, warn if it is more than rounding, and refuse one above `max_logprob_gap`."""
        gap = self.logprob_gap
        if gap is None:
            return
        if self.accelerator.is_main_process and self._prints_gap:
            print(gap, flush=True)
        if gap.mean > _WARNING_GAP and self.accelerator.is_main_process:
            is_corrected = self.args.importance_cap is not None or self.args.old_logprobs == OldLogProbs.LOGGED
            remedy = "the loss corrects it" if is_corrected else "correct it with --set importance_cap=2"
            print(
                f"the sampler's log-probs are {gap.mean:.2g} nats from this model's on average: other weights, or "
                f"another number format (bfloat16); {remedy}",
                flush=True,
            )
        if not gap.mean <= self.args.max_logprob_gap:
            raise TrainingError(
                f"the runs were not sampled by this model: {gap}",
                hint="Give the model that wrote them, or raise max_logprob_gap if it has changed that much since.",
                run_id=gap.worst_run,
            )

    # Metrics

    def _log_step(self, step: ScheduledStep, metrics: TokenMetrics, seconds: float, *, is_skipped: bool) -> None:
        """Add a step's metrics to those that TRL logs."""
        plan = step.plan
        self.state.num_input_tokens_seen += plan.forwarded_tokens
        gap = compare_logprobs(step.rows, self._recomputed_logprobs) if self.args.logged_is_sampled else None
        gap = gap or self.logprob_gap  # if no row was recomputed, the gap before the first step
        step_metrics = {
            **metrics.reduce(self.accelerator),
            **(gap.metrics if gap is not None else {}),
            **compute_device_metrics(
                plan.forwarded_tokens, seconds, self._weight_count, self.accelerator.num_processes
            ),
            **compute_row_metrics(step.groups, step.batch, self.policy_versions),
            "reward/with_dropped": self._mean_reward,
            "groups/dropped_fraction": len(self.schedule.batch.drop_reasons) / len(self.schedule.groups),
            "tokens/forwarded": plan.forwarded_tokens,
            "conversations/forwarded": len(step.rows),
            "tokens/padding_fraction": plan.padding_tokens / plan.forwarded_tokens,
            "num_tokens": self.state.num_input_tokens_seen,
            "step_time": seconds,
            "skipped": float(is_skipped),
        }
        for name, value in step_metrics.items():
            self._metrics["train"][name].append(float(value))
        if self.log_completions:
            self._add_completions(step)

    def _add_completions(self, step: ScheduledStep) -> None:
        """Add the conversations of a step's first rollout to TRL's table of completions."""
        table: dict[str, Any] = self._logs
        for column in ("prompt", "completion", "advantages"):
            table[column] = []
        table["rewards"], table["extra"] = {"reward": []}, {"run_id": [], "role": []}
        for row in step.batch.rows:
            if row.run_id == step.batch.rows[0].run_id:
                conversation = row.conversation
                table["prompt"].append(self._tokenizer.decode(conversation.prompt_ids_P.tolist()))
                table["completion"].append(self._tokenizer.decode(conversation.completion_ids_T.tolist()))
                table["advantages"].append(row.advantage)
                table["rewards"]["reward"].append(step.groups[row.group_index].rollouts_G[row.rollout_index].reward)
                table["extra"]["run_id"].append(row.run_id)
                table["extra"]["role"].append(conversation.role)


@contextmanager
def _translate_setup_errors() -> Iterator[None]:
    """Raise `TrainingError` for what transformers, TRL or peft raise about a model or settings."""
    try:
        yield
    except (ImportError, OSError, SafetensorError, TypeError, ValueError) as error:
        raise TrainingError(
            f"the model, its optimizer or its scheduler cannot be loaded: {error}",
            hint="Check the model's weights, and the settings (--set).",
        ) from error


def _get_local_shard(value: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, or the tensor itself."""
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local


def _refuse_reward_call(*_: Any, **__: Any) -> list[float | None]:
    raise AssertionError("nothing is generated, so nothing is rewarded")
