"""The plan of a training run that `memagent train --dry-run` prints: from its runs, settings and the model's shape."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from accelerate.utils import parse_flag_from_env
from rich.filesize import decimal

from memagent_training.algorithm.schedule import ScheduledStep
from memagent_training.data.replay_report import name_first
from memagent_training.forward.layouts import lay_out
from memagent_training.job.base_model import build_unloaded_model
from memagent_training.job.memory_estimate import MemoryEstimate, ModelSizes, estimate_memory
from memagent_training.job.training_job import PreparedJob

_MAX_PLANNED_TOKENS: Final = 12_000_000
"""Row tokens to plan; this takes some seconds."""
GPU_COUNTS: Final = (2, 6, 8)
"""GPU counts of the launch files in training/configs/accelerate: the plan estimates a rank's memory for each."""


def plan_training(prepared: PreparedJob) -> dict[str, Any]:
    """Plan the first pass, or as much of it as can be planned in some seconds.

    Returns:
        `report` on the runs; `dropped` groups, by id, with the reason; `schedule`, whose tokens are counted
        over `planned_steps` and all ranks; `memory` of a rank in bytes, None if the model's shape is unknown.

    Raises:
        TrainingError: a row exceeds the token budget, or the model is not a causal language model.
    """
    report, schedule = prepared.replay.report, prepared.schedule
    newest = prepared.checkpoints.newest
    steps = list(_first_steps(prepared))
    plans = [step.plan for step in steps]
    forwarded = sum(plan.forwarded_tokens for plan in plans)
    memory = _estimate(prepared, steps)
    return {
        "report": {
            **asdict(report),
            "refused": {reason.value: list(runs) for reason, runs in report.refused.items()},
            "remedies": {reason.value: reason.remedy for reason in report.refused},
        },
        "dropped": {group: reason.value for group, reason in schedule.dropped.items()},
        "model_version": prepared.base.version,
        "schedule": {
            "groups": len(schedule.kept),
            "steps_per_pass": schedule.steps_per_pass,
            "total_steps": prepared.total_steps,
            "resumes_from": None if newest is None else newest.name,
            "ranks": schedule.ranks,
            "layout": prepared.config.layout,
            "planned_steps": len(steps),
            "row_tokens": sum(plan.row_tokens for plan in plans),
            "learned_tokens": sum(step.batch.learned_tokens for step in steps),
            "forwarded_tokens": forwarded,
            "padding_share": sum(plan.padding_tokens for plan in plans) / forwarded,
            "idle_share": 1 - forwarded / (schedule.ranks * sum(plan.critical_tokens for plan in plans)),
            "micro_batches_per_rank": sum(len(plan.micro_batches[0]) for plan in plans),
            "largest_micro_batch": max(batch.tokens for plan in plans for rank in plan.micro_batches for batch in rank),
        },
        "memory": None if memory is None else _bytes(memory),
    }


def plan_lines(prepared: PreparedJob, plan: dict[str, Any]) -> Iterator[str]:
    """Yield the plan as lines of text."""
    yield from prepared.replay.report.summary()
    if plan["dropped"]:
        groups = [f"{group} ({reason})" for group, reason in plan["dropped"].items()]
        yield f"groups without a training signal: {len(groups)}: {name_first(groups)}"
    if plan["model_version"]:
        yield f"the model is {plan['model_version']}"
    for name, value in plan["schedule"].items():
        if value is not None:
            number = value if isinstance(value, str) else f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
            yield f"{name.replace('_', ' ')}: {number}"
    if plan["memory"] is None:
        yield "memory: not estimated for a model of this shape"
    else:
        sizes = [f"{name.replace('_', ' ')} {decimal(size)}" for name, size in plan["memory"].items()]
        yield f"memory of a rank, estimated: {', '.join(sizes)}"


def _first_steps(prepared: PreparedJob) -> Iterator[ScheduledStep]:
    tokens = 0
    for index in range(min(prepared.schedule.steps_per_pass, prepared.total_steps)):
        step = prepared.schedule.step(index)
        tokens += step.plan.row_tokens
        if index and tokens > _MAX_PLANNED_TOKENS:
            return
        yield step


def _bytes(memory: MemoryEstimate) -> dict[str, int]:
    parts = ("weights", "gradients", "optimizer", "reference", "activations", "total")
    sharded = {f"total_sharded_over_{ranks}": memory.total_on(ranks) for ranks in GPU_COUNTS}
    return {part: getattr(memory, part) for part in parts} | sharded


def _estimate(prepared: PreparedJob, steps: list[ScheduledStep]) -> MemoryEstimate | None:
    """Estimate the memory for the heaviest micro-batch that was planned."""
    config, job = prepared.config, prepared.job
    try:
        sizes = ModelSizes.of(build_unloaded_model(prepared.base.source, lora_rank=job.lora_rank))
    except AttributeError:  # a shape with other parts, for example a recurrent one
        return None
    batches = ((step, batch) for step in steps for rank in step.plan.micro_batches for batch in rank)
    step, heaviest = max(batches, key=lambda pair: pair[1].tokens)
    options: Any = config.model_init_kwargs or {}
    is_narrow = str(options.get("dtype", "float32")).removeprefix("torch.") in {"bfloat16", "float16"}
    return estimate_memory(
        sizes,
        lay_out([step.rows[index].conversation for index in heaviest.rows], config.layout, pad_id=0),
        weight_bytes=2 if is_narrow else 4,
        mixed_precision=not is_narrow and config.mixed_precision != "no",
        checkpointing=bool(config.gradient_checkpointing),
        optimizer=str(getattr(config.optim, "value", config.optim)),
        with_reference=config.beta != 0 and job.lora_rank is None,
        shards=_shards(prepared),
    )


def _shards(prepared: PreparedJob) -> int:
    """Return how many ranks share the model's weights and states: with FSDP and ZeRO's stage 3; never on CPUs.

    ZeRO's lower stages share a part; they are counted as sharing nothing, so the estimate is too high, not too low.
    """
    is_zero_3 = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    is_sharded = parse_flag_from_env("ACCELERATE_USE_FSDP") or (
        is_zero_3 and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    )
    return prepared.schedule.ranks if is_sharded and not prepared.config.use_cpu else 1
