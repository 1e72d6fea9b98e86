"""Muon and AdamW in one optimizer: the weights that each updates, and resuming from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from made_rollouts import copy_weights, find_changes  # noqa: E402
from support.small_models import make_model  # noqa: E402

from memagent_training.algorithm.muon import MuonWithAdamW  # noqa: E402
from memagent_training.training_errors import TrainingError  # noqa: E402

INPUT_IDS = torch.arange(12).reshape(2, 6)


def make_small_llama(*, tied: bool = False) -> Any:
    return make_model(
        dtype=torch.float32, vocab_size=32, hidden_size=16, num_attention_heads=2, attention_bias=True,
        tie_word_embeddings=tied,
    )  # fmt: skip


def make_optimizer(model: Any) -> MuonWithAdamW:
    return MuonWithAdamW(model, lr=3e-3, muon_lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))


def train(model: Any, steps: int, step: Callable[[], Any]) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss.backward()
        step()


@pytest.mark.parametrize("tied", [False, True])
def test_steps_equal_separate_muon_and_adamw_steps(tied: bool) -> None:
    combined_model, separate_model = make_small_llama(tied=tied), make_small_llama(tied=tied)
    train(combined_model, 3, make_optimizer(combined_model).step)

    weights = dict(separate_model.named_parameters())
    embeddings = [embedding for name, embedding in weights.items() if "embed_tokens" in name or "lm_head" in name]
    assert len(embeddings) == (1 if tied else 2)
    vectors = [vector for vector in weights.values() if vector.ndim == 1]
    matrices = [matrix for name, matrix in weights.items() if matrix.ndim == 2 and "layers" in name]
    assert len(embeddings) + len(vectors) + len(matrices) == len(weights)
    groups = [{"params": embeddings, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1)
    train(separate_model, 3, lambda: (adamw.step(), muon.step()))
    assert not find_changes(copy_weights(combined_model), copy_weights(separate_model))


def test_schedule_scales_both_rates_and_frozen_weights_stay() -> None:
    model = make_small_llama()
    model.model.layers[0].requires_grad_(requires_grad=False)
    initial_weights = copy_weights(model)
    optimizer = make_optimizer(model)
    optimizer.load_state_dict(optimizer.state_dict())  # as a resumed training does
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    train(model, 1, lambda: (optimizer.step(), schedule.step()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0, 0.0]
    weights_after_step = copy_weights(model)
    trained_names = {name for name in initial_weights if "layers.0." not in name}
    assert find_changes(initial_weights, weights_after_step) == trained_names
    train(model, 1, optimizer.step)
    assert not find_changes(weights_after_step, copy_weights(model))


def test_model_with_only_matrices_is_trained_by_muon() -> None:
    model = make_small_llama()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.endswith("q_proj.weight"))
    optimizer = make_optimizer(model)
    assert len(optimizer.param_groups) == 1
    initial_weights = copy_weights(model)
    train(model, 1, optimizer.step)
    trained_names = {name for name in initial_weights if name.endswith("q_proj.weight")}
    assert find_changes(initial_weights, copy_weights(model)) == trained_names


# In a training


def test_a_training_with_muon_resumes_with_the_same_bits(make_trainer, tmp_path: Path) -> None:
    settings = {"muon_learning_rate": 1e-3, "max_steps": 3, "warmup_steps": 1}
    save_settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    first_trainer = make_trainer(tmp_path, "dapo", **settings, **save_settings)
    first_trainer.train()
    resumed_trainer = make_trainer(tmp_path, "dapo", **settings)
    assert find_changes(copy_weights(resumed_trainer.model), copy_weights(first_trainer.model))
    resumed_trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed_trainer.state.global_step == first_trainer.state.global_step == 3
    assert not find_changes(copy_weights(resumed_trainer.model), copy_weights(first_trainer.model))


def test_muon_refuses_sharded_matrices(make_trainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, muon_learning_rate=1e-3)
    trainer.is_fsdp_enabled = True
    with pytest.raises(TrainingError, match="each matrix whole") as error:
        trainer.create_optimizer()
    assert "muon_learning_rate" in (error.value.hint or "")
