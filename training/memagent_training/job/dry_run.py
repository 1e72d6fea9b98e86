"""What `memagent train --dry-run` prints: a training's plan, from its runs, its settings and the model's shape."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from accelerate.utils import parse_flag_from_env
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from memagent_training.algorithm.schedule import ScheduledStep
from memagent_training.data.replay_report import ReplayReport, name_first
from memagent_training.forward.layouts import lay_out
from memagent_training.job.base_model import unloaded_model
from memagent_training.job.memory_estimate import MemoryEstimate, ModelSizes, estimate_memory
from memagent_training.job.training_job import PreparedJob

_MAX_PLANNED_TOKENS: Final = 12_000_000
"""Row tokens to plan; this takes some seconds."""
GPU_COUNTS: Final = (2, 6, 8)
"""GPU counts of the launch files in training/configs/accelerate: the plan estimates a rank's memory for each."""

_Row: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a training. Costs are those of the planned steps, over all ranks unless stated otherwise."""

    report: ReplayReport
    dropped: Mapping[str, str]
    """Groups without a training signal, by id, with the reason."""
    groups_kept: int
    steps_per_pass: int
    total_steps: int
    ranks: int
    resumes_from: str | None
    planned_steps: int
    """Steps of the first pass that were planned."""
    row_tokens: int
    """Tokens of all rows; shared ones count for each row."""
    learned_tokens: int
    layout: str
    forwarded_tokens: int
    padding_share: float
    micro_batches: int
    """Micro-batches per rank."""
    largest_micro_batch: int
    """The maximum number of tokens that a rank forwards at once."""
    idle_share: float
    """The share of the ranks' time that is spent waiting for another."""
    memory: MemoryEstimate | None
    """None if the estimate does not know the model's shape."""
    model_version: str

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        values = asdict(self)
        refused = self.report.refused
        values["report"] |= {"refused": {reason.value: list(runs) for reason, runs in refused.items()}}
        values["report"] |= {"remedies": {reason.value: reason.remedy for reason in refused}}
        if self.memory is not None:
            values["memory"]["total"] = self.memory.total
        return values


def plan_training(prepared: PreparedJob) -> Plan:
    """Plan the first pass, or as much of it as can be planned in some seconds.

    Raises:
        TrainingError: a row exceeds the token budget, or the model's configuration is not that of a causal language
            model.
    """
    schedule = prepared.schedule
    steps = list(_first_steps(prepared))
    plans = [step.plan for step in steps]
    forwarded = sum(plan.forwarded_tokens for plan in plans)
    return Plan(
        report=prepared.replay.report,
        dropped={group: reason.value for group, reason in schedule.dropped.items()},
        groups_kept=len(schedule.kept),
        steps_per_pass=schedule.steps_per_pass,
        total_steps=prepared.total_steps,
        ranks=schedule.ranks,
        resumes_from=None if prepared.checkpoints.newest is None else prepared.checkpoints.newest.name,
        planned_steps=len(steps),
        row_tokens=sum(plan.row_tokens for plan in plans),
        learned_tokens=sum(step.batch.report.learned_tokens for step in steps),
        layout=prepared.config.layout,
        forwarded_tokens=forwarded,
        padding_share=sum(plan.padding_tokens for plan in plans) / forwarded,
        micro_batches=sum(len(plan.micro_batches[0]) for plan in plans),
        largest_micro_batch=max(batch.tokens for plan in plans for rank in plan.micro_batches for batch in rank),
        idle_share=1 - forwarded / (schedule.ranks * sum(plan.critical_tokens for plan in plans)),
        memory=_estimate(prepared, steps),
        model_version=prepared.base.version,
    )


def _first_steps(prepared: PreparedJob) -> Iterator[ScheduledStep]:
    tokens = 0
    for number in range(min(prepared.schedule.steps_per_pass, prepared.total_steps)):
        step = prepared.schedule.step(number)
        tokens += step.plan.row_tokens
        if number and tokens > _MAX_PLANNED_TOKENS:
            return
        yield step


def _estimate(prepared: PreparedJob, steps: list[ScheduledStep]) -> MemoryEstimate | None:
    """Estimate the memory for the heaviest micro-batch that was planned."""
    config, job = prepared.config, prepared.job
    try:
        sizes = ModelSizes.of(unloaded_model(prepared.base.source, lora_rank=job.lora_rank))
    except AttributeError:  # a shape with other parts, for example a recurrent one
        return None
    batches = ((step, batch) for step in steps for rank in step.plan.micro_batches for batch in rank)
    step, heaviest = max(batches, key=lambda pair: pair[1].tokens)
    options: Any = config.model_init_kwargs or {}
    is_narrow = str(options.get("dtype", "float32")).removeprefix("torch.") in {"bfloat16", "float16"}
    return estimate_memory(
        sizes,
        lay_out([step.rows[number].conversation for number in heaviest.rows], config.layout, pad_id=0),
        weight_bytes=2 if is_narrow else 4,
        mixed_precision=not is_narrow and config.mixed_precision != "no",
        checkpointing=bool(config.gradient_checkpointing),
        optimizer=str(getattr(config.optim, "value", config.optim)),
        with_reference=config.beta != 0 and job.lora_rank is None,
        shards=_shards(prepared),
    )


def _shards(prepared: PreparedJob) -> int:
    """Ranks that share the model's weights and states, with FSDP and ZeRO's stage 3; accelerate does not shard on CPUs.

    ZeRO's lower stages share a part; they are counted as sharing nothing, so the estimate is too high, not too low.
    """
    is_zero_3 = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    is_sharded = parse_flag_from_env("ACCELERATE_USE_FSDP") or (
        is_zero_3 and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    )
    return prepared.schedule.ranks if is_sharded and not prepared.config.use_cpu else 1


def render_plan(plan: Plan) -> RenderableType:
    """Return the plan as tables."""
    parts: list[RenderableType] = [_runs_table(plan), _schedule_table(plan)]
    parts.append(
        Text("memory: not estimated for a model of this shape") if plan.memory is None else _memory(plan.memory)
    )
    return Group(*(part for table in parts for part in (table, Text(""))))


def _runs_table(plan: Plan) -> Table:
    report = plan.report
    dropped: dict[str, list[str]] = {}
    for group, reason in plan.dropped.items():
        dropped.setdefault(reason, []).append(group)
    versions = ", ".join(f"{name or 'unknown'} ({count:,})" for name, count in report.versions.items())
    model = f"; the model is {plan.model_version}" if plan.model_version else ""
    sizes = f"in groups: {report.groups:,}; conversations: {report.conversations:,}"
    rows: list[_Row] = [("accepted", report.rollouts, sizes)]
    for refusal, runs in report.refused.items():
        rows.append((f"refused: {refusal.value}", len(runs), name_first(runs), refusal.remedy))
    rows += [(why, count) for why, count in report.details.items()]
    for reason, groups in dropped.items():
        rows.append((f"group dropped: {reason}", len(groups), name_first(groups), "nothing: it has no training signal"))
    rows.append(("policy versions", len(report.versions), versions + model))
    rows += [(f"staleness of {lag} versions", count, "rollouts") for lag, count in sorted(report.staleness.items())]
    if report.reshaped:
        runs = report.reshaped
        rows.append(("reshaped sampling", len(runs), name_first(runs), "collect with temperature 1 and top_p 1"))
    return _table("runs", "count", "which", "what to do", rows=rows)


def _schedule_table(plan: Plan) -> Table:
    steps = "one pass" if plan.planned_steps == plan.steps_per_pass else f"first {plan.planned_steps:,} steps"
    rows: list[_Row] = [
        ("groups to train on", plan.groups_kept),
        ("steps per pass", plan.steps_per_pass),
        ("steps in all", plan.total_steps),
        ("ranks", plan.ranks),
        (f"tokens in rows, {steps}", plan.row_tokens),
        ("completion tokens in the loss", plan.learned_tokens),
        (f"forwarded tokens, {plan.layout}", plan.forwarded_tokens),
        ("padding", f"{plan.padding_share:.1%}"),
        ("micro-batches per rank", plan.micro_batches),
        ("largest micro-batch, tokens", plan.largest_micro_batch),
        ("ranks idle", f"{plan.idle_share:.1%}"),
    ]
    if plan.resumes_from:
        rows.append(("continues from", plan.resumes_from))
    return _table("schedule", "count", rows=rows)


def _memory(memory: MemoryEstimate) -> Table:
    sizes = memory.sizes
    rows: list[_Row] = [
        ("weights", decimal(memory.weights), f"{sizes.parameters:,} weights, {sizes.trained:,} of them trained"),
        ("gradients", decimal(memory.gradients)),
        ("optimizer", decimal(memory.optimizer)),
        ("reference", decimal(memory.reference)),
        ("activations", decimal(memory.activations)),
        ("in all", decimal(memory.total)),
    ]
    rows += [(f"in all, sharded over {ranks} GPUs", decimal(memory.total_on(ranks))) for ranks in GPU_COUNTS]
    return _table("memory per rank, estimated", "size", "", rows=rows)


def _table(*columns: str, rows: Iterable[_Row]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in {"count", "size"} else "left")
    for row in rows:
        table.add_row(*(Text(cell if isinstance(cell, str) else f"{cell:,}") for cell in row))
    return table
