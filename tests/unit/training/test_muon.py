"""Muon and AdamW as one optimizer: what each of them moves, and that a checkpoint brings both back."""

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

IDS = torch.arange(12).reshape(2, 6)


def small_llama(*, tied: bool = False) -> Any:
    return make_model(
        dtype=torch.float32, vocab_size=32, hidden_size=16, num_attention_heads=2, attention_bias=True,
        tie_word_embeddings=tied,
    )  # fmt: skip


def optimizer_of(model: Any) -> MuonWithAdamW:
    return MuonWithAdamW(model, lr=3e-3, muon_lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))


def train(model: Any, steps: int, step: Callable[[], Any]) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        step()


@pytest.mark.parametrize("tied", [False, True])
def test_steps_are_those_of_muon_and_adamw(tied: bool) -> None:
    together, apart = small_llama(tied=tied), small_llama(tied=tied)
    train(together, 3, optimizer_of(together).step)

    weights = dict(apart.named_parameters())
    tables = [table for name, table in weights.items() if "embed_tokens" in name or "lm_head" in name]
    assert len(tables) == (1 if tied else 2)
    vectors = [vector for vector in weights.values() if vector.ndim == 1]
    matrices = [matrix for name, matrix in weights.items() if matrix.ndim == 2 and "layers" in name]
    assert len(tables) + len(vectors) + len(matrices) == len(weights)
    groups = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1)
    train(apart, 3, lambda: (adamw.step(), muon.step()))
    assert not find_changes(copy_weights(together), copy_weights(apart))


def test_a_schedule_changes_both_rates_and_frozen_weights_stay() -> None:
    model = small_llama()
    model.model.layers[0].requires_grad_(requires_grad=False)
    before = copy_weights(model)
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(optimizer.state_dict())  # as a resumed training does
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    train(model, 1, lambda: (optimizer.step(), schedule.step()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0, 0.0]
    middle = copy_weights(model)
    assert find_changes(before, middle) == {name for name in before if "layers.0." not in name}
    train(model, 1, optimizer.step)
    assert not find_changes(middle, copy_weights(model))


def test_a_model_of_matrices_alone_is_trained_by_muon() -> None:
    model = small_llama()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.endswith("q_proj.weight"))
    optimizer = optimizer_of(model)
    assert len(optimizer.param_groups) == 1
    before = copy_weights(model)
    train(model, 1, optimizer.step)
    assert find_changes(before, copy_weights(model)) == {name for name in before if name.endswith("q_proj.weight")}


# In a training


def test_a_training_with_muon_resumes_with_the_same_bits(make_trainer, tmp_path: Path) -> None:
    settings = {"muon_learning_rate": 1e-3, "max_steps": 3, "warmup_steps": 1}
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    whole = make_trainer(tmp_path, "dapo", **settings, **saving)
    whole.train()
    resumed = make_trainer(tmp_path, "dapo", **settings)
    assert find_changes(copy_weights(resumed.model), copy_weights(whole.model))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == whole.state.global_step == 3
    assert not find_changes(copy_weights(resumed.model), copy_weights(whole.model))


def test_muon_refuses_sharded_matrices(make_trainer, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, muon_learning_rate=1e-3)
    trainer.is_fsdp_enabled = True
    with pytest.raises(TrainingError, match="each matrix whole") as refusal:
        trainer.create_optimizer()
    assert "muon_learning_rate" in (refusal.value.hint or "")
