"""The plan of a training run that `memagent train --dry-run` prints: from its runs, settings and the model's shape.

The device memory of an optimizer step is estimated before any weights are loaded. For a dense decoder whose layers are
Llama's (Qwen2, Mistral, ...), per rank, in bytes:

    weights        P * w                 and 2 * P more while mixed precision holds copies in 16 bit
    gradients      (T + largest) * w     the largest is there twice while micro-batches are added up
    optimizer      2 * T * w             AdamW's two moments; one byte each in 8 bit; nothing for plain SGD
    reference      P * w                 where a KL is asked for and no adapters can be switched off

    a layer        n * (4 r h + c (3 a + 2 kv + 4 m + 2 h)) + pairs * c
    the head       3 n r h + 5 * min(C, 1024) * V * 4
    activations    without checkpointing   L * layer + pairs + max(head, 2 n c m)
                   with checkpointing      L * n r h + pairs + max(layer + 2 n c m, head)

P weights, T of them trained, w bytes of one (4, as TRL loads them by default); L layers, h, m, V the widths of the
residual stream, the MLP and the vocabulary, a and kv those of all query heads and of all key heads; r bytes of a number
of the residual stream and c of a matrix product (4 and 4; 4 and 2 in mixed precision); n tokens of a micro-batch,
padding included, C completion tokens scored, pairs the entries of the padded layout's attention mask, of which each
layer keeps a copy as numbers; the other layouts have none. The 4 r h are the inputs of two norms, each unchanged and
normalised.

It was compared with measured peaks of Llama- and Qwen2-shaped models on a CPU, see tests/unit/training: within a fifth.
Not included: memory of the device's own libraries, and fragmentation. If weights are sharded, weights, gradients,
optimizer and reference are divided by the ranks; one gathered layer is added.
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
from memagent_training.job.base_model import build_unloaded_model
from memagent_training.job.training_job import PreparedJob

_LOGITS_COPIES: Final = 5
"""Logits, logits divided by the temperature, and three tensors of that size in the backward pass."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model that determine its memory: numbers of weights, and widths."""

    parameters: int
    trained: int
    largest: int
    """Weights of the largest trained tensor."""
    layers: int
    hidden: int
    mlp: int
    queries: int
    """Heads times their dimension."""
    keys: int
    """Key heads times their dimension."""
    vocabulary: int

    @classmethod
    def of(cls, model: Any) -> ModelSizes:
        """Return the sizes of a causal language model of transformers, on any device, including "meta"."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trained=sum(trained),
            largest=max(trained, default=0),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            mlp=config.intermediate_size,
            queries=heads * head,
            keys=(getattr(config, "num_key_value_heads", None) or heads) * head,
            vocabulary=config.vocab_size,
        )


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on each rank."""

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
        """The sum of all."""
        return self.total_on(self.shards)

    def total_on(self, shards: int) -> int:
        """Return the sum if that many ranks shared all but the activations."""
        shared = self.weights + self.gradients + self.optimizer + self.reference
        return shared * self.shards // shards + self.activations


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
    """Return the estimate of the module's docstring.

    Args:
        sizes: of the model.
        micro_batch: the largest that a rank forwards at once.
        weight_bytes: of each weight.
        mixed_precision: whether matrix products are computed in 16 bit while weights have 32.
        checkpointing: whether gradient checkpointing is on.
        optimizer: its name, as in the setting `optim`.
        with_reference: whether there is a second model for the KL.
        shards: ranks that share weights, gradients, optimizer and reference; 1 if each has all.
    """
    weights = sizes.parameters * weight_bytes
    copies = 2 * sizes.parameters if mixed_precision else 0
    return MemoryEstimate(
        sizes=sizes,
        weights=(weights + copies) // shards,
        gradients=(sizes.trained + sizes.largest) * weight_bytes // shards,
        optimizer=sizes.trained * _state_bytes(optimizer, weight_bytes) // shards,
        reference=(weights if with_reference else 0) // shards,
        activations=_estimate_activations(
            sizes,
            micro_batch,
            residual=4 if mixed_precision else weight_bytes,
            product=2 if mixed_precision else weight_bytes,
            checkpointing=checkpointing,
        ),
        shards=shards,
    )


def _estimate_activations(
    sizes: ModelSizes, micro_batch: MicroBatch, *, residual: int, product: int, checkpointing: bool
) -> int:
    """Return bytes; `residual` and `product` are the bytes of one number."""
    sequences, width = micro_batch.input_ids_SN.shape
    tokens = sequences * width
    pairs = 0 if micro_batch.nodes else tokens * width
    stream = tokens * residual * sizes.hidden
    narrow = 3 * sizes.queries + 2 * sizes.keys + 4 * sizes.mlp + 2 * sizes.hidden
    layer = 4 * stream + tokens * product * narrow + pairs * product
    scored = min(len(micro_batch.scored_ids_C), LOGITS_CHUNK)
    head = 3 * stream + _LOGITS_COPIES * scored * sizes.vocabulary * 4
    backward = 2 * tokens * product * sizes.mlp
    if checkpointing:
        return sizes.layers * stream + pairs + max(layer + backward, head)
    return sizes.layers * layer + pairs + max(head, backward)


def _state_bytes(optimizer: str, weight_bytes: int) -> int:
    """Return the bytes of state per trained weight; AdamW's for an unknown optimizer."""
    if "8bit" in optimizer or "4bit" in optimizer:
        return 2
    return 0 if optimizer in {"sgd", "adafactor"} else 2 * weight_bytes


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
    steps = list(_iter_first_steps(prepared))
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
        "memory": None if memory is None else _list_bytes(memory),
    }


def plan_lines(prepared: PreparedJob, plan: dict[str, Any]) -> Iterator[str]:
    """Yield the plan as lines of text."""
    yield from prepared.replay.report.summary()
    if plan["dropped"]:
        groups = [f"{group} ({reason})" for group, reason in plan["dropped"].items()]
        yield f"groups without a training signal: {len(groups)}: {list_names(groups, MAX_LISTED)}"
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


def _iter_first_steps(prepared: PreparedJob) -> Iterator[ScheduledStep]:
    tokens = 0
    for index in range(min(prepared.schedule.steps_per_pass, prepared.total_steps)):
        step = prepared.schedule.step(index)
        tokens += step.plan.row_tokens
        if index and tokens > _MAX_PLANNED_TOKENS:
            return
        yield step


def _list_bytes(memory: MemoryEstimate) -> dict[str, int]:
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
        shards=_count_shards(prepared),
    )


def _count_shards(prepared: PreparedJob) -> int:
    """Return how many ranks share the model's weights and states: with FSDP and ZeRO's stage 3; never on CPUs.

    ZeRO's lower stages share a part; they are counted as sharing nothing, so the estimate is too high, not too low.
    """
    is_zero_3 = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    is_sharded = parse_flag_from_env("ACCELERATE_USE_FSDP") or (
        is_zero_3 and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    )
    return prepared.schedule.ranks if is_sharded and not prepared.config.use_cpu else 1
