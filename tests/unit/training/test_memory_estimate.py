"""The estimate of memory, held against the peak that training's own steps are measured to take."""

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
from memagent_training.job.base_model import build_unloaded_model, make_lora_config
from memagent_training.job.dry_run import ModelSizes, estimate_memory

WITHIN = 1.2
"""The factor between estimate and measurement, as dry_run.py states it."""

SHAPES = {
    "llama": ("Llama", 192, 4, 3000),
    "qwen2, grouped queries": ("Qwen2", 128, 2, 1000),
}


def make_model(shape: str) -> torch.nn.Module:
    kind, width, key_heads, vocabulary = SHAPES[shape]
    return small_models.make_model(
        kind, dtype=torch.float32, vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width + 64,
        num_hidden_layers=4, num_key_value_heads=key_heads, max_position_embeddings=4096,
    ).train()  # fmt: skip


def make_batch(layout: str) -> MicroBatch:
    source = random.Random(0)
    shared = [source.randrange(1000) for _ in range(96)]
    rows = []
    for _ in range(6):
        ids = [shared + [source.randrange(1000) for _ in range(source.randint(64, 96))], [5] * source.randint(32, 64)]
        rows.append(IdRow(*map(tuple, ids)))
    return lay_out(rows, layout, pad_id=0)


def peak_of(work: Callable[[], None]) -> int:
    """Bytes that tensors took at once, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    present = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        present += event.nbytes()
        highest = max(highest, present)
    return highest


@pytest.mark.parametrize(
    ("shape", "layout", "checkpointing"),
    [
        ("llama", "prefix_tree", True),
        ("qwen2, grouped queries", "padded", True),
        ("qwen2, grouped queries", "packed", False),
    ],
)
def test_activations_are_estimated_as_they_are_measured(shape, checkpointing, layout) -> None:
    model = make_model(shape)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    micro_batch = make_batch(layout)
    sizes = ModelSizes.from_model(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def work() -> None:
        score_completions(model, micro_batch, with_entropy=True).logprobs_BT.sum().backward()

    work()
    estimate = estimate_memory(sizes, micro_batch, checkpointing=checkpointing)
    added_up = 4 * sizes.largest_tensor  # the largest gradient, before it is added to what is there
    assert (estimate.activations + added_up) / peak_of(work) == pytest.approx(1, abs=WITHIN - 1)


@pytest.mark.parametrize("mixed", [False, True])
def test_whole_steps_are_estimated_as_they_are_measured(mixed) -> None:
    model = make_model("llama")
    micro_batch = make_batch("prefix_tree")
    sizes = ModelSizes.from_model(model)

    def work() -> None:
        copy = make_model("llama")
        optimizer = torch.optim.AdamW(copy.parameters(), fused=True)
        for _ in range(2):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
                    logprobs_BT = score_completions(copy, micro_batch, with_entropy=True).logprobs_BT
                logprobs_BT.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    estimate = estimate_memory(sizes, micro_batch, mixed_precision=mixed, checkpointing=False)
    assert estimate.total / peak_of(work) == pytest.approx(1, abs=WITHIN - 1)


def test_an_unloaded_model_has_the_sizes_of_the_loaded_one(tmp_path) -> None:
    model = make_model("qwen2, grouped queries")
    model.config.save_pretrained(tmp_path)
    unloaded = build_unloaded_model(str(tmp_path))
    assert {parameter.device.type for parameter in unloaded.parameters()} == {"meta"}
    assert ModelSizes.from_model(unloaded) == ModelSizes.from_model(model)


def test_adapters_are_counted_as_they_are_trained(tmp_path) -> None:
    from peft import get_peft_model

    model = make_model("llama")
    model.config.save_pretrained(tmp_path)
    assert ModelSizes.from_model(build_unloaded_model(str(tmp_path), lora_rank=4)) == ModelSizes.from_model(
        get_peft_model(model, make_lora_config(4))
    )


def test_shards_divide_what_is_kept_and_a_reference_is_a_second_model() -> None:
    model = make_model("llama")
    micro_batch = make_batch("packed")
    sizes = ModelSizes.from_model(model)
    alone = estimate_memory(sizes, micro_batch, checkpointing=True, with_reference=True)
    shared = estimate_memory(sizes, micro_batch, checkpointing=True, with_reference=True, shards=4)
    assert alone.reference == alone.weights == 4 * sizes.parameters
    for name in ("weights", "gradients", "optimizer", "reference"):
        assert getattr(shared, name) == getattr(alone, name) // 4
    assert shared.activations == alone.activations
    narrow = estimate_memory(sizes, micro_batch, checkpointing=True, optimizer="adamw_bnb_8bit")
    assert narrow.optimizer == alone.optimizer / 4
