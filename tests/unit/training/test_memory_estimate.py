"""The memory estimate, compared with the measured peak of training steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from support import small_models
from torch.profiler import ProfilerActivity, profile

from memagent_training.forward.layouts import IdRow, MicroBatch, lay_out
from memagent_training.forward.scoring import score_completions
from memagent_training.job.base_model import build_empty_model, make_lora_config
from memagent_training.job.dry_run import ModelSizes, estimate_memory

MAX_FACTOR = 1.2
"""The largest factor between estimate and measurement, as stated in dry_run.py."""

SHAPES = {"llama": ("Llama", 192, 4, 3000), "qwen2, grouped queries": ("Qwen2", 128, 2, 1000)}


def make_model(shape: str) -> torch.nn.Module:
    kind, width, key_heads, vocabulary = SHAPES[shape]
    return small_models.make_model(
        kind, dtype=torch.float32, vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width + 64,
        num_hidden_layers=4, num_key_value_heads=key_heads, max_position_embeddings=4096,
    ).train()  # fmt: skip


def make_batch(layout: str) -> MicroBatch:
    rng = random.Random(0)
    shared_ids = [rng.randrange(1000) for _ in range(96)]
    rows = []
    for _ in range(6):
        own_ids = [rng.randrange(1000) for _ in range(rng.randint(64, 96))]
        rows.append(IdRow((*shared_ids, *own_ids), (5,) * rng.randint(32, 64)))
    return lay_out(rows, layout)


def measure_peak_bytes(run_step: Callable[[], None]) -> int:
    """Return the peak bytes of tensors, above those that existed before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run_step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated_bytes = peak_bytes = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, allocated_bytes)
    return peak_bytes


@pytest.mark.parametrize(
    ("shape", "layout", "checkpointing"),
    [
        ("llama", "prefix_tree", True),
        ("qwen2, grouped queries", "padded", True),
        ("qwen2, grouped queries", "packed", False),
    ],
)
def test_activation_estimate_is_close_to_the_measured_peak(shape, checkpointing, layout) -> None:
    model = make_model(shape)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    micro_batch = make_batch(layout)
    sizes = ModelSizes.from_model(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def run_step() -> None:
        score_completions(model, micro_batch, with_entropy=True).logprobs_BT.sum().backward()

    run_step()
    estimate = estimate_memory(sizes, micro_batch, checkpointing=checkpointing)
    gradient_bytes = 4 * sizes.largest_tensor  # the largest gradient, before it is accumulated
    estimated_bytes = estimate.activations + gradient_bytes
    assert 1 / MAX_FACTOR < estimated_bytes / measure_peak_bytes(run_step) < MAX_FACTOR


@pytest.mark.parametrize("mixed_precision", [False, True])
def test_step_estimate_is_close_to_the_measured_peak(mixed_precision) -> None:
    model = make_model("llama")
    micro_batch = make_batch("prefix_tree")
    sizes = ModelSizes.from_model(model)

    def run_step() -> None:
        new_model = make_model("llama")
        optimizer = torch.optim.AdamW(new_model.parameters(), fused=True)
        for _ in range(2):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16) if mixed_precision else nullcontext():
                    logprobs_BT = score_completions(new_model, micro_batch, with_entropy=True).logprobs_BT
                logprobs_BT.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    estimate = estimate_memory(sizes, micro_batch, mixed_precision=mixed_precision, checkpointing=False)
    assert 1 / MAX_FACTOR < estimate.total / measure_peak_bytes(run_step) < MAX_FACTOR


def test_empty_model_has_the_sizes_of_the_loaded_one(tmp_path) -> None:
    model = make_model("qwen2, grouped queries")
    model.config.save_pretrained(tmp_path)
    empty_model = build_empty_model(str(tmp_path))
    assert {parameter.device.type for parameter in empty_model.parameters()} == {"meta"}
    assert ModelSizes.from_model(empty_model) == ModelSizes.from_model(model)


def test_adapter_sizes_equal_those_of_the_trained_model(tmp_path) -> None:
    from peft import get_peft_model

    model = make_model("llama")
    model.config.save_pretrained(tmp_path)
    assert ModelSizes.from_model(build_empty_model(str(tmp_path), lora_rank=4)) == ModelSizes.from_model(
        get_peft_model(model, make_lora_config(4))
    )


def test_shards_divide_state_and_a_reference_is_a_second_model() -> None:
    model = make_model("llama")
    micro_batch = make_batch("packed")
    sizes = ModelSizes.from_model(model)
    full_estimate = estimate_memory(sizes, micro_batch, checkpointing=True, with_reference=True)
    sharded_estimate = estimate_memory(sizes, micro_batch, checkpointing=True, with_reference=True, shards=4)
    assert full_estimate.reference == full_estimate.weights == 4 * sizes.parameters
    for name in ("weights", "gradients", "optimizer", "reference"):
        assert getattr(sharded_estimate, name) == getattr(full_estimate, name) // 4
    assert sharded_estimate.activations == full_estimate.activations
    eight_bit_estimate = estimate_memory(sizes, micro_batch, checkpointing=True, optimizer="adamw_bnb_8bit")
    assert eight_bit_estimate.optimizer == full_estimate.optimizer / 4
