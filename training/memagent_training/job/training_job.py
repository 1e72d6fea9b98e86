"""A training run from logged runs to a finished policy folder: its request, its preparation, and its execution.

    prepared = prepare(TrainingJob(runs="runs.sqlite", model="policy-1", out=Path("policy-2"), preset="dapo"))
    policy = train(prepared)

`prepare` loads no weights, and refuses whatever can be refused without them. Only a run with too few steps is accepted,
so that its plan (`dry_run`) can show how many it has. `memagent train` is a thin shell around the two functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from memagent_graph.plain_text import list_names
from memagent_graph.run_log import RunLog
from memagent_training.algorithm.credit import require_roles
from memagent_training.algorithm.planner import require_rows_fit
from memagent_training.algorithm.schedule import EQUAL_REWARDS_REMEDY, Schedule
from memagent_training.data.replay import Replay, load_groups
from memagent_training.data.replay_report import MAX_LISTED
from memagent_training.data.reward_functions import RewardFunction, get_reward_name
from memagent_training.job import training_output
from memagent_training.job.base_model import BaseModel, find_base_model, make_lora_config
from memagent_training.job.config import MultiConvDAPOConfig
from memagent_training.job.job_options import TrainingOptions
from memagent_training.job.job_settings import make_config, rate_depends_on_length, select_decisive_settings
from memagent_training.job.saved_policy import save_policy, write_card
from memagent_training.job.training_output import Checkpoints
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.reward_names import choose_term_rewards
from memagent_training.training_errors import TrainingError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob(TrainingOptions):
    """The request for a training run: the parsed options of `memagent train`."""

    runs: RunLog | Path | str
    """A run log or its path, or an export's path."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `MultiConvDAPOConfig` that replace the preset's."""
    reward: str | RewardFunction = "reward"
    """The name of a logged reward, or a function that scores the runs when they are loaded."""
    gold: GoldAnswers | None = None
    """The gold answers for built-in rewards: `reward` and those in `MultiConvDAPOConfig.credit`."""
    groups: Mapping[str, str] | None = None
    """The group of each run, by run id; by default, runs of one question on one document, read in the same way."""
    policy_versions: Sequence[str] | None = None
    """The policy versions that may have written the runs, oldest first; by default, any version."""


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A training run that is ready to start."""

    job: TrainingJob
    config: MultiConvDAPOConfig
    base: BaseModel
    replay: Replay
    schedule: Schedule
    checkpoints: Checkpoints
    """The checkpoint that the training run continues from."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        if self.config.max_steps > 0:
            return self.config.max_steps
        return -int(-self.config.num_train_epochs * self.schedule.steps_per_pass // 1)

    @property
    def decisive_inputs(self) -> dict[str, dict[str, Any]]:
        """The inputs that determine the weights, except the runs; with the number of steps if the learning rate depends
        on it.
        """
        steps = self.total_steps if rate_depends_on_length(self.config) else None
        return {
            "settings": {**select_decisive_settings(self.config), "steps": steps},
            "model": {"weights": self.base.weights_hash, "lora_rank": self.job.lora_rank},
        }


@dataclass(frozen=True, slots=True)
class TrainedPolicy:
    """The result of a training run."""

    folder: Path
    """Weights, tokenizer and, if the base model has one, profile: a policy to read with."""
    adapter: Path | None
    """The folder of the separate adapters, if any were trained; the weights in `folder` include them."""
    steps: int
    metrics: Mapping[str, float]
    """The logged metrics of the last step."""


def prepare(job: TrainingJob) -> PreparedJob:
    """Load the runs and check that the model can be trained on them as requested.

    Raises:
        TrainingError: training is not possible; the message says why and what to do. The subclasses ReplayError and
            RewardError are about the runs.
        TokenizerError, RunLogError, MissingExtraError: the model's tokenizer or the runs cannot be read.
    """
    config = make_config(job.preset, job.settings, job.out)
    _require_one_process_per_device(config)
    base = find_base_model(job.model)
    training_output.require_writable_folder(job.out, base.folder)
    training_output.require_unused_folder(job.out, resume=job.resume)
    checkpoints = training_output.find_checkpoints(job.out)
    terms = config.advantage_settings.terms
    replay = load_groups(
        job.runs,
        reward=job.reward,
        term_rewards=choose_term_rewards(terms, has_gold=job.gold is not None),
        find_gold=None if job.gold is None else job.gold.find,
        groups=job.groups,
        whole_groups=not job.partial_groups,
        max_tokens=min((limit for limit in (job.max_tokens, base.context_window) if limit is not None), default=None),
        policy_versions=job.policy_versions,
        tokenizer=job.tokenizer,
        template=job.template,
    )
    groups = replay.require_groups()
    config = _adopt_sampled_temperature(job, config, replay.report.temperatures)
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    require_roles(terms, {conversation.role for rollout in rollouts for conversation in rollout.conversations_K})
    _require_same_tokenizer(job, base, replay)
    schedule = config.make_schedule(replay.groups)
    _require_learnable_schedule(schedule, replay)
    prepared = PreparedJob(job, config, base, replay, schedule, checkpoints)
    if checkpoints.newest or checkpoints.incomplete:
        training_output.require_same_inputs(job.out, prepared.decisive_inputs)
    return prepared


def train(prepared: PreparedJob) -> TrainedPolicy:
    """Train, and write the policy to `out`. Call it on every rank.

    Raises:
        TrainingError: the training run is too short for its warm-up, the logged runs were sampled by another model, or
            the checkpoint belongs to other runs or settings.
    """
    from memagent_training.job.step_lines import show_step_lines  # noqa: PLC0415  heavy
    from memagent_training.job.trainer import MultiConvDAPOTrainer  # noqa: PLC0415  heavy

    job, base = prepared.job, prepared.base
    prepared.config.require_steps_after_warm_up(prepared.total_steps)
    trainer = MultiConvDAPOTrainer(
        base.source,
        prepared.replay.groups,
        prepared.config,
        policy_versions=job.policy_versions or (),
        peft_config=make_lora_config(job.lora_rank),
    )
    show_step_lines(trainer)
    checkpoint = prepared.checkpoints.newest
    if checkpoint is None and trainer.accelerator.is_main_process:
        training_output.write_record(job.out, prepared.decisive_inputs)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    adapter = save_policy(trainer, base, job.out, lora_rank=job.lora_rank)
    step_logs = [log_entry for log_entry in trainer.state.log_history if "loss" in log_entry]
    if trainer.accelerator.is_main_process:
        report = prepared.replay.report
        card_facts = {
            "runs": f"{report.rollouts:,} in {report.groups:,} groups, from {report.source}",
            "reward": get_reward_name(job.reward),
            "preset": str(job.preset),
            "optimizer steps": f"{trainer.state.global_step:,}",
        }
        write_card(job.out, base, card_facts, step_logs)
    return TrainedPolicy(job.out, adapter, trainer.state.global_step, step_logs[-1] if step_logs else {})


def read_groups(path: Path) -> dict[str, str]:
    """Return the group of each run, from a file with a JSON object.

    Raises:
        TrainingError: the file has no such object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, ValueError, RecursionError) as error:
        raise TrainingError(
            f"{path} does not define the groups: {error}", hint='Write a JSON object, {"run": "group", ...}.'
        ) from error


def _adopt_sampled_temperature(
    job: TrainingJob, config: MultiConvDAPOConfig, temperatures: Mapping[float, int]
) -> MultiConvDAPOConfig:
    """Return the settings with the runs' sampling temperature, because the loss needs the sampled distribution."""
    if set(temperatures) == {config.temperature}:
        return config
    counts = ", ".join(
        f"{temperature:g} ({count} conversations)" for temperature, count in sorted(temperatures.items())
    )
    if len(temperatures) > 1 or min(temperatures) <= 0 or "temperature" in job.settings:
        raise TrainingError(
            f"the runs were sampled at a temperature of {counts}, which cannot be trained on at {config.temperature:g}",
            hint="Export the runs of one temperature above 0 to their own file (memagent export) and train on it. "
            "Leave the setting temperature out to use theirs.",
        )
    return make_config(job.preset, {**job.settings, "temperature": min(temperatures)}, job.out)


def _require_one_process_per_device(config: MultiConvDAPOConfig) -> None:
    process_count = int(os.environ.get("WORLD_SIZE", "1"))
    if process_count != config.world_size:
        raise TrainingError(
            f"{process_count} processes were launched, and each would train by itself",
            hint="Launch as many as there are GPUs, or train on CPUs (--set use_cpu=true).",
        )
    if config.n_gpu > 1:
        raise TrainingError(
            f"one process sees {config.n_gpu} GPUs, but trains on one",
            hint="Start it with accelerate launch, or set CUDA_VISIBLE_DEVICES to one of them.",
        )


def _require_same_tokenizer(job: TrainingJob, base: BaseModel, replay: Replay) -> None:
    logged_tokenizer = replay.report.tokenizer
    if job.trust_tokenizer or logged_tokenizer == base.tokenizer_fingerprint:
        return
    raise TrainingError(
        f"wrong base model: the runs were made with the tokenizer {logged_tokenizer}, and {base.name} has "
        f"{base.tokenizer_fingerprint}",
        hint="Give the model that wrote the runs. If it is, and their reader only counted tokens with another "
        "tokenizer, say so (--trust-tokenizer); its log-probs are compared before training begins in any case.",
        run_id=replay.groups[0].rollouts_G[0].run_id,
    )


def _require_learnable_schedule(schedule: Schedule, replay: Replay) -> None:
    """Refuse runs without any training signal, and rows that are too long for a micro-batch."""
    if not any(row.advantage for row in schedule.batch.rows):
        report = replay.report
        group_list = f": {list_names(report.zero_variance_groups, MAX_LISTED)}" if report.zero_variance_groups else ""
        refusal_text = f"; refused are {report.reasons}" if report.refused else ""
        raise TrainingError(
            f"all rewards are equal within every group, so that there is nothing to learn{group_list}{refusal_text}",
            hint=" ".join([*([report.remedies] if report.refused else []), EQUAL_REWARDS_REMEDY]),
        )
    require_rows_fit(schedule.batch.rows, schedule.token_budget)
