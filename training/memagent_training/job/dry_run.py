"""A training's plan, made only from its runs, settings and the model's shape: what `memagent train --dry-run`
prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from accelerate.utils import parse_flag_from_env
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from memagent_training.algorithm.planner import Layout, StepPlan, plan_step
from memagent_training.algorithm.schedule import ScheduledStep
from memagent_training.data.replay_report import ReplayReport, name_first
from memagent_training.forward.layouts import lay_out
from memagent_training.job.job_settings import ChangedSetting, changed_settings
from memagent_training.job.memory_estimate import (
    MemoryEstimate,
    ModelSizes,
    Precision,
    estimate_memory,
    unloaded_model,
)
from memagent_training.job.training_job import PreparedJob
from memagent_training.training_errors import TrainingError

_CHEAP_TOKENS: Final = 4_000_000
"""Maximum row tokens to plan in all layouts; this takes some seconds."""
GPU_COUNTS: Final = (2, 6, 8)
"""GPU counts of the launch files in training/configs/accelerate: the plan estimates a rank's memory for each."""
_ZERO_STAGE: Final = "ACCELERATE_DEEPSPEED_ZERO_STAGE"


_Row: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """The cost of the planned steps in one layout."""

    layout: str
    forwarded_tokens: int
    padding_share: float
    micro_batches: int
    """Micro-batches per rank, over the planned steps."""
    largest_micro_batch: int
    """The maximum number of tokens that a rank forwards at once."""
    idle_share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a training."""

    report: ReplayReport
    dropped: Mapping[str, str]
    """Groups without a training signal, by id, with the reason."""
    groups_kept: int
    steps_per_pass: int
    total_steps: int
    obstacle: str | None
    """Why a training with this number of steps cannot begin, and what to do."""
    ranks: int
    resumes_from: str | None
    planned_steps: int
    """Steps of the first pass that the costs below are for."""
    row_tokens: int
    """Tokens of all rows of those steps; shared ones count for each row."""
    learned_tokens: int
    layout: str
    """The layout of the settings."""
    costs: tuple[LayoutCost, ...]
    """For all layouts, including the chosen one."""
    checkpointing: bool
    memory: MemoryEstimate | None
    """None if the estimate does not know the model's shape."""
    model_version: str
    changed: tuple[ChangedSetting, ...]

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
    """Plan the first pass, or as much of it as can be planned quickly in all layouts.

    Raises:
        TrainingError: a row exceeds the token budget, or the model's configuration is not that of a causal language
            model.
    """
    schedule, config = prepared.schedule, prepared.config
    steps = list(_first_steps(prepared))
    plans = {layout: [_plan(step, layout, prepared) for step in steps] for layout in Layout}
    return Plan(
        report=prepared.replay.report,
        dropped={group: reason.value for group, reason in schedule.dropped.items()},
        groups_kept=len(schedule.kept),
        steps_per_pass=schedule.steps_per_pass,
        total_steps=prepared.total_steps,
        obstacle=_obstacle(prepared),
        ranks=schedule.ranks,
        resumes_from=None if prepared.checkpoints.newest is None else prepared.checkpoints.newest.name,
        planned_steps=len(steps),
        row_tokens=sum(each.row_tokens for each in plans[Layout.PADDED]),
        learned_tokens=sum(step.batch.report.learned_tokens for step in steps),
        layout=config.layout,
        costs=tuple(_cost(StepPlan.of_all(each)) for each in plans.values()),
        checkpointing=bool(config.gradient_checkpointing),
        memory=_memory(prepared, steps, plans[Layout(config.layout)]),
        model_version=prepared.base.version,
        changed=changed_settings(config, prepared.job.preset, {*prepared.job.settings, "temperature"}),
    )


def _obstacle(prepared: PreparedJob) -> str | None:
    try:
        prepared.config.check_warm_up(prepared.total_steps)
    except TrainingError as error:
        return str(error)
    return None


def _first_steps(prepared: PreparedJob) -> Iterator[ScheduledStep]:
    tokens = 0
    for number in range(min(prepared.schedule.steps_per_pass, prepared.total_steps)):
        step = prepared.schedule.step(number)
        tokens += step.plan.row_tokens
        if number and tokens > _CHEAP_TOKENS:
            return
        yield step


def _plan(step: ScheduledStep, layout: Layout, prepared: PreparedJob) -> StepPlan:
    if step.plan.layout is layout:
        return step.plan
    schedule = prepared.schedule
    return plan_step(step.rows, ranks=schedule.ranks, token_budget=schedule.token_budget, layout=layout)


def _cost(plan: StepPlan) -> LayoutCost:
    return LayoutCost(
        layout=plan.layout.value,
        forwarded_tokens=plan.forwarded_tokens,
        padding_share=plan.padding_share,
        micro_batches=len(plan.micro_batches[0]),
        largest_micro_batch=max(batch.tokens for rank in plan.micro_batches for batch in rank),
        idle_share=plan.idle_share,
    )


def _memory(prepared: PreparedJob, steps: list[ScheduledStep], plans: list[StepPlan]) -> MemoryEstimate | None:
    """Return the estimate for the heaviest micro-batch that was planned."""
    config, job = prepared.config, prepared.job
    model = unloaded_model(prepared.base.source, lora_rank=job.lora_rank)
    try:
        sizes = ModelSizes.of(model)
    except AttributeError:  # a shape with other parts, for example a recurrent one
        return None
    _, rows, chosen = max(
        (
            (batch.tokens, step.rows, batch.rows)
            for step, step_plan in zip(steps, plans, strict=True)
            for rank in step_plan.micro_batches
            for batch in rank
        ),
        key=lambda each: each[0],
    )
    options: Any = config.model_init_kwargs or {}
    is_narrow = str(options.get("dtype", "float32")).removeprefix("torch.") in {"bfloat16", "float16"}
    return estimate_memory(
        sizes,
        lay_out([rows[number].conversation for number in chosen], config.layout, pad_id=0),
        precision=Precision(2 if is_narrow else 4, mixed=not is_narrow and config.mixed_precision != "no"),
        checkpointing=bool(config.gradient_checkpointing),
        optimizer=str(getattr(config.optim, "value", config.optim)),
        with_reference=config.beta != 0 and job.lora_rank is None,
        shards=_shards(prepared),
    )


def _shards(prepared: PreparedJob) -> int:
    """Ranks that share the model's weights and states, with FSDP and ZeRO's stage 3; accelerate does not shard on CPUs.

    ZeRO's lower stages share a part; they are counted as sharing nothing, so the estimate is too high, not too low.
    """
    zero_3 = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and os.environ.get(_ZERO_STAGE) == "3"
    is_asked = zero_3 or parse_flag_from_env("ACCELERATE_USE_FSDP")
    return prepared.schedule.ranks if is_asked and not prepared.config.use_cpu else 1


def render_plan(plan: Plan, translate: Callable[[str], str] = str) -> RenderableType:
    """Return the plan as tables; `translate` puts remedies into the caller's terms, such as a command's options."""
    parts: list[RenderableType] = [_runs_table(plan, translate), _schedule_table(plan), _tokens_table(plan)]
    if plan.memory is None:
        parts.append(Text("memory: not estimated for a model of this shape"))
    else:
        parts.append(_memory_table(plan.memory, checkpointing=plan.checkpointing))
    if plan.changed:
        settings = [(each.name, str(each.preset), str(each.value)) for each in plan.changed]
        parts.append(_table("settings", "preset", "here", rows=settings))
    if plan.obstacle is not None:
        parts.append(Text(f"cannot begin: {translate(plan.obstacle)}"))
    return Group(*(each for part in parts for each in (part, Text(""))))


def _runs_table(plan: Plan, translate: Callable[[str], str]) -> Table:
    report = plan.report
    dropped: dict[str, list[str]] = {}
    for group, why in plan.dropped.items():
        dropped.setdefault(why, []).append(group)
    versions = ", ".join(f"{name or 'unknown'} ({count:,})" for name, count in report.versions.items())
    here = f"; the model is {plan.model_version}" if plan.model_version else ""
    sizes = f"in groups: {report.groups:,}; conversations: {report.conversations:,}"
    rows: list[_Row] = [("accepted", report.rollouts, sizes)]
    for reason, runs in report.refused.items():
        rows.append((f"refused: {reason.value}", len(runs), name_first(runs), translate(reason.remedy)))
    rows += [(why, count) for why, count in report.details.items()]
    for why, groups in dropped.items():
        rows.append((f"group dropped: {why}", len(groups), name_first(groups), "nothing: it has no training signal"))
    rows.append(("policy versions", len(report.versions), versions + here))
    rows += [(f"staleness of {lag} versions", count, "rollouts") for lag, count in sorted(report.staleness.items())]
    if report.reshaped:
        runs = report.reshaped
        rows.append(("reshaped sampling", len(runs), name_first(runs), "collect with temperature 1 and top_p 1"))
    return _table("runs", "count", "which", "what to do", rows=rows)


def _schedule_table(plan: Plan) -> Table:
    rows: list[_Row] = [
        ("groups to train on", plan.groups_kept),
        ("steps per pass", plan.steps_per_pass),
        ("steps in all", plan.total_steps),
        ("ranks", plan.ranks),
        (f"tokens in rows, {_planned_part(plan)}", plan.row_tokens),
        ("completion tokens in the loss", plan.learned_tokens),
    ]
    if plan.resumes_from:
        rows.append(("continues from", plan.resumes_from))
    return _table("schedule", "count", rows=rows)


def _tokens_table(plan: Plan) -> Table:
    rows = [
        (
            each.layout + (" (chosen)" if each.layout == plan.layout else ""), each.forwarded_tokens,
            f"{each.padding_share:.1%}", each.micro_batches, each.largest_micro_batch, f"{each.idle_share:.1%}",
        )
        for each in plan.costs
    ]  # fmt: skip
    counted = ("forwarded", "padding", "micro-batches per rank", "largest", "ranks idle")
    return _table(f"tokens, {_planned_part(plan)}", *counted, rows=rows)


def _planned_part(plan: Plan) -> str:
    return "one pass" if plan.planned_steps == plan.steps_per_pass else f"first {plan.planned_steps:,} steps"


def _memory_table(memory: MemoryEstimate, *, checkpointing: bool) -> Table:
    sizes = memory.sizes
    rows: list[_Row] = [
        ("weights", decimal(memory.weights), f"{sizes.parameters:,} weights, {sizes.trained:,} of them trained"),
        ("gradients", decimal(memory.gradients)),
        ("optimizer", decimal(memory.optimizer)),
        ("reference", decimal(memory.reference)),
    ]
    for word, size in (("with", memory.activations_checkpointed), ("without", memory.activations_kept)):
        mark = " (chosen)" if checkpointing == (word == "with") else ""
        rows.append((f"activations {word} checkpointing{mark}", decimal(size)))
    rows.append(("in all", decimal(memory.total)))
    rows += [(f"in all, sharded over {ranks} GPUs", decimal(memory.total_on(ranks))) for ranks in GPU_COUNTS]
    return _table("memory per rank, estimated", "size", "", rows=rows)


def _table(*columns: str, rows: Iterable[_Row]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        numeric = name in {"count", "forwarded", "padding", "micro-batches per rank", "largest", "ranks idle", "size"}
        table.add_column(name, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(Text(cell if isinstance(cell, str) else f"{cell:,}") for cell in row))
    return table
