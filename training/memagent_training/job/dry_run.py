"""The plan of a training run that `memagent train --dry-run` prints, from its runs, settings and the model's shape.

The device memory of an optimizer step is estimated before any weights are loaded. For a dense decoder whose layers are
Llama's (Qwen2, Mistral, ...), per rank, in bytes:

    weights        P * w                 and 2 * P more while mixed precision holds copies in 16 bit
    gradients      (T + largest) * w     the largest tensor exists twice while micro-batches are added up
    optimizer      2 * T * w             AdamW's two moments; 1 byte each in 8 or 4 bit; none for SGD, Adafactor
    reference      P * w                 for a KL penalty, unless adapters can be switched off

    a layer        n * (4 r h + c (3 a + 2 kv + 4 m + 2 h)) + pairs * c
    the head       3 n r h + 5 * min(C, 1024) * V * 4
    activations    without checkpointing   L * layer + pairs + max(head, 2 n c m)
                   with checkpointing      L * n r h + pairs + max(layer + 2 n c m, head)

P weights, T of them trained, w bytes of one (4, as TRL loads them by default); L layers, h, m, V the widths of the
residual stream, the MLP and the vocabulary, a and kv those of all query heads and of all key heads; r bytes per number
of the residual stream and c of a matrix product (4 and 4; 4 and 2 in mixed precision); n tokens of a micro-batch,
padding included, C completion tokens scored, pairs the entries of the padded layout's attention mask, of which each
layer keeps a copy in floating point; the other layouts have none. The 4 r h are the inputs of two norms, each before
and after normalisation.

The estimates are within a fifth of measured peaks of Llama- and Qwen2-shaped models on a CPU (tests/unit/training).
Not included: memory of the device's own libraries, and fragmentation. If weights are sharded, weights, gradients,
optimizer and reference are divided by the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from accelerate.utils import parse_flag_from_env
from rich.filesize import decimal

from memagent_graph.plain_text import list_names
from memagent_training.algorithm.schedule import ScheduledStep
from memagent_training.data.replay_report import MAX_LISTED
from memagent_training.forward.layouts import MicroBatch, lay_out
from memagent_training.forward.scoring import LOGITS_CHUNK
from memagent_training.job.base_model import build_empty_model
from memagent_training.job.training_job import PreparedJob

_LOGITS_COPIES: Final = 5
"""Logits, logits divided by the temperature, and three tensors of that size in the backward pass."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model that determine its memory: numbers of weights, and widths."""

    parameters: int
    trained_parameters: int
    largest_tensor: int
    """The number of weights in the largest trained tensor."""
    layers: int
    hidden_width: int
    mlp_width: int
    query_width: int
    """Query heads times their dimension."""
    key_width: int
    """Key heads times their dimension."""
    vocabulary_size: int

    @classmethod
    def from_model(cls, model: Any) -> ModelSizes:
        """Return the sizes of a causal language model of transformers, on any device, including "meta"."""
        config = model.config.get_text_config()
        head_count = config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or config.hidden_size // head_count
        trained_sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trained_parameters=sum(trained_sizes),
            largest_tensor=max(trained_sizes, default=0),
            layers=config.num_hidden_layers,
            hidden_width=config.hidden_size,
            mlp_width=config.intermediate_size,
            query_width=head_count * head_width,
            key_width=(getattr(config, "num_key_value_heads", None) or head_count) * head_width,
            vocabulary_size=config.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory of each rank, in bytes."""

    sizes: ModelSizes
    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    """Activations of the largest micro-batch."""
    shards: int = 1
    """The ranks that share weights, gradients, optimizer and reference."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.compute_total(self.shards)

    def compute_total(self, shards: int) -> int:
        """Return the sum of all parts if `shards` ranks shared everything except the activations."""
        sharded_bytes = self.weights + self.gradients + self.optimizer + self.reference
        return sharded_bytes * self.shards // shards + self.activations


def estimate_memory(
    sizes: ModelSizes,
    micro_batch: MicroBatch,
    *,
    weight_bytes: int = 4,
    mixed_precision: bool = False,
    checkpointing: bool,
    optimizer: str = "adamw_torch_fused",
    with_reference: bool = False,
    shards: int = 1,
) -> MemoryEstimate:
    """Estimate a rank's memory with the formulas of the module's docstring.

    Args:
        sizes: of the model.
        micro_batch: the largest one that a rank forwards.
        weight_bytes: bytes per weight.
        mixed_precision: whether matrix products are computed in 16 bit while weights have 32.
        checkpointing: whether gradient checkpointing is on.
        optimizer: its name, as in the setting `optim`.
        with_reference: whether a second model is kept as the reference of the KL penalty.
        shards: ranks that share weights, gradients, optimizer and reference; 1 if each rank has all of them.
    """
    weight_total = sizes.parameters * weight_bytes
    copy_bytes = 2 * sizes.parameters if mixed_precision else 0
    return MemoryEstimate(
        sizes=sizes,
        weights=(weight_total + copy_bytes) // shards,
        gradients=(sizes.trained_parameters + sizes.largest_tensor) * weight_bytes // shards,
        optimizer=sizes.trained_parameters * _count_state_bytes(optimizer, weight_bytes) // shards,
        reference=(weight_total if with_reference else 0) // shards,
        activations=_estimate_activations(
            sizes,
            micro_batch,
            residual_bytes=4 if mixed_precision else weight_bytes,
            product_bytes=2 if mixed_precision else weight_bytes,
            checkpointing=checkpointing,
        ),
        shards=shards,
    )


def _estimate_activations(
    sizes: ModelSizes, micro_batch: MicroBatch, *, residual_bytes: int, product_bytes: int, checkpointing: bool
) -> int:
    """Return bytes, from those per number of the residual stream and per number of a matrix product."""
    sequences, width = micro_batch.input_ids_SN.shape
    token_count = sequences * width
    mask_entries = 0 if micro_batch.nodes else token_count * width
    stream_bytes = token_count * residual_bytes * sizes.hidden_width
    product_width = 3 * sizes.query_width + 2 * sizes.key_width + 4 * sizes.mlp_width + 2 * sizes.hidden_width
    layer_bytes = 4 * stream_bytes + token_count * product_bytes * product_width + mask_entries * product_bytes
    scored_count = min(len(micro_batch.scored_ids_C), LOGITS_CHUNK)
    head_bytes = 3 * stream_bytes + _LOGITS_COPIES * scored_count * sizes.vocabulary_size * 4
    backward_bytes = 2 * token_count * product_bytes * sizes.mlp_width
    if checkpointing:
        return sizes.layers * stream_bytes + mask_entries + max(layer_bytes + backward_bytes, head_bytes)
    return sizes.layers * layer_bytes + mask_entries + max(head_bytes, backward_bytes)


def _count_state_bytes(optimizer: str, weight_bytes: int) -> int:
    """Return the bytes of optimizer state per trained weight; those of AdamW for an unknown optimizer."""
    if "8bit" in optimizer or "4bit" in optimizer:
        return 2
    return 0 if optimizer in {"sgd", "adafactor"} else 2 * weight_bytes


_MAX_PLANNED_TOKENS: Final = 12_000_000
"""Row tokens to plan at most; planning as many takes some seconds."""
GPU_COUNTS: Final = (2, 6, 8)
"""GPU counts of the launch files in training/configs/accelerate; the plan has the memory of a rank for each."""


def plan_training(prepared: PreparedJob) -> dict[str, Any]:
    """Plan the first pass over the runs, or as much of it as can be planned in a few seconds.

    Returns:
        `report` on the runs; `dropped` groups, by id, with the reason; `schedule`, whose tokens are counted over
        `planned_steps` and all ranks; `memory` of a rank in bytes, None if the model's shape is unknown.

    Raises:
        TrainingError: a row exceeds the token budget, or the model is not a causal language model.
    """
    report, schedule = prepared.replay.report, prepared.schedule
    newest = prepared.checkpoints.newest
    planned_steps = list(_iter_first_steps(prepared))
    plans = [step.plan for step in planned_steps]
    forwarded_tokens = sum(plan.forwarded_tokens for plan in plans)
    memory = _estimate_rank_memory(prepared, planned_steps)
    return {
        "report": {
            **asdict(report),
            "refused": {reason.value: list(runs) for reason, runs in report.refused.items()},
            "remedies": {reason.value: reason.remedy for reason in report.refused},
        },
        "dropped": {group: reason.value for group, reason in schedule.batch.drop_reasons.items()},
        "model_version": prepared.base.weights_hash,
        "schedule": {
            "groups": len(schedule.kept_groups),
            "steps_per_pass": schedule.steps_per_pass,
            "total_steps": prepared.total_steps,
            "resumes_from": None if newest is None else newest.name,
            "ranks": schedule.ranks,
            "layout": prepared.config.layout,
            "planned_steps": len(planned_steps),
            "row_tokens": sum(plan.row_tokens for plan in plans),
            "learned_tokens": sum(step.batch.learned_tokens for step in planned_steps),
            "forwarded_tokens": forwarded_tokens,
            "padding_share": sum(plan.padding_tokens for plan in plans) / forwarded_tokens,
            "idle_share": 1 - forwarded_tokens / (schedule.ranks * sum(plan.critical_tokens for plan in plans)),
            "micro_batches_per_rank": sum(len(plan.micro_batches[0]) for plan in plans),
            "largest_micro_batch": max(batch.tokens for plan in plans for rank in plan.micro_batches for batch in rank),
        },
        "memory": None if memory is None else _list_memory_parts(memory),
    }


def iter_plan_lines(prepared: PreparedJob, plan: dict[str, Any]) -> Iterator[str]:
    """Yield the plan as lines of text."""
    yield from prepared.replay.report.format_lines()
    if plan["dropped"]:
        groups = [f"{group} ({reason})" for group, reason in plan["dropped"].items()]
        yield f"groups without a training signal: {len(groups)}: {list_names(groups, MAX_LISTED)}"
    if plan["model_version"]:
        yield f"the model is {plan['model_version']}"
    for name, value in plan["schedule"].items():
        if value is not None:
            value_text = (
                value if isinstance(value, str) else f"{value:.1%}" if isinstance(value, float) else f"{value:,}"
            )
            yield f"{name.replace('_', ' ')}: {value_text}"
    if plan["memory"] is None:
        yield "memory: not estimated for a model of this shape"
    else:
        sizes = [f"{name.replace('_', ' ')} {decimal(size)}" for name, size in plan["memory"].items()]
        yield f"memory of a rank, estimated: {', '.join(sizes)}"


def _iter_first_steps(prepared: PreparedJob) -> Iterator[ScheduledStep]:
    tokens = 0
    for index in range(min(prepared.schedule.steps_per_pass, prepared.total_steps) or 1):
        step = prepared.schedule.get_step(index)
        tokens += step.plan.row_tokens
        if index and tokens > _MAX_PLANNED_TOKENS:
            return
        yield step


def _list_memory_parts(memory: MemoryEstimate) -> dict[str, int]:
    parts = ("weights", "gradients", "optimizer", "reference", "activations", "total")
    sharded_totals = {f"total_sharded_over_{ranks}": memory.compute_total(ranks) for ranks in GPU_COUNTS}
    return {part: getattr(memory, part) for part in parts} | sharded_totals


def _estimate_rank_memory(prepared: PreparedJob, steps: list[ScheduledStep]) -> MemoryEstimate | None:
    """Estimate the memory for the largest planned micro-batch; None if the model has an unknown shape."""
    config, job = prepared.config, prepared.job
    try:
        sizes = ModelSizes.from_model(build_empty_model(prepared.base.source, lora_rank=job.lora_rank))
    except AttributeError:  # another architecture, for example a recurrent one
        return None
    planned_batches = ((step, batch) for step in steps for rank in step.plan.micro_batches for batch in rank)
    step, largest_batch = max(planned_batches, key=lambda pair: pair[1].tokens)
    init_kwargs: Any = config.model_init_kwargs or {}
    is_half_precision = str(init_kwargs.get("dtype", "float32")).removeprefix("torch.") in {"bfloat16", "float16"}
    return estimate_memory(
        sizes,
        lay_out([step.rows[index].conversation for index in largest_batch.rows], config.layout),
        weight_bytes=2 if is_half_precision else 4,
        mixed_precision=not is_half_precision and config.mixed_precision != "no",
        checkpointing=bool(config.gradient_checkpointing),
        optimizer=str(getattr(config.optim, "value", config.optim)),
        with_reference=config.beta != 0 and job.lora_rank is None,
        shards=_count_shards(prepared),
    )


def _count_shards(prepared: PreparedJob) -> int:
    """Return how many ranks share weights and optimizer states: all with FSDP and ZeRO's stage 3, otherwise 1.

    ZeRO's lower stages share some states, but count as sharing nothing: the estimate is too high rather than too low.
    """
    is_zero_3 = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    is_sharded = parse_flag_from_env("ACCELERATE_USE_FSDP") or (
        is_zero_3 and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    )
    return prepared.schedule.ranks if is_sharded and not prepared.config.use_cpu else 1
