"""Muon and AdamW as one optimizer: what each of them moves, and that a checkpoint brings both back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from support import training_world  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback  # noqa: E402

from memagent_training.algorithm.muon import MuonWithAdamW  # noqa: E402
from memagent_training.data.rollouts import RolloutGroup  # noqa: E402
from memagent_training.job.job_settings import load_preset  # noqa: E402
from memagent_training.job.trainer import MultiConvDAPOTrainer  # noqa: E402
from memagent_training.training_errors import TrainingError  # noqa: E402

IDS = torch.arange(12).reshape(2, 6)


def small_llama(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        attention_bias=True, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def optimizer_of(model: Any) -> MuonWithAdamW:
    return MuonWithAdamW(model, lr=3e-3, muon_lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))


def train(model: Any, steps: int, step: Callable[[], Any]) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        step()


def weights_of(model: Any) -> dict[str, Any]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def same_bits(one: Any, other: Any) -> bool:
    others = weights_of(other)
    return all(torch.equal(each, others[name]) for name, each in weights_of(one).items())


@pytest.mark.parametrize("tied", [False, True])
def test_it_takes_the_steps_of_both_optimizers(tied: bool) -> None:
    together, apart = small_llama(tied=tied), small_llama(tied=tied)
    train(together, 3, optimizer_of(together).step)

    named = dict(apart.named_parameters())
    tables = [each for name, each in named.items() if "embed_tokens" in name or "lm_head" in name]
    assert len(tables) == (1 if tied else 2)
    vectors = [tensor for tensor in named.values() if tensor.ndim == 1]
    matrices = [each for name, each in named.items() if each.ndim == 2 and "layers" in name]
    assert len(tables) + len(vectors) + len(matrices) == len(named)
    groups = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1)
    train(apart, 3, lambda: (adamw.step(), muon.step()))
    assert same_bits(together, apart)


def test_a_schedule_moves_both_rates_and_what_is_not_trained_stays() -> None:
    model = small_llama()
    model.model.layers[0].requires_grad_(requires_grad=False)
    before = weights_of(model)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    train(model, 1, lambda: (optimizer.step(), schedule.step()))
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0, 0.0]
    middle = weights_of(model)
    moved = {name for name, each in middle.items() if not torch.equal(each, before[name])}
    assert moved == {name for name in before if "layers.0." not in name}
    train(model, 1, optimizer.step)
    assert all(torch.equal(each, middle[name]) for name, each in weights_of(model).items())


def test_a_saved_state_goes_on_with_the_same_bits() -> None:
    whole, parts = small_llama(), small_llama()
    train(whole, 4, optimizer_of(whole).step)
    first = optimizer_of(parts)
    train(parts, 2, first.step)
    resumed = copy.deepcopy(parts)
    second = optimizer_of(resumed)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(resumed, 2, second.step)
    assert same_bits(whole, resumed)


def test_matrices_alone_as_adapters_are() -> None:
    model = small_llama()
    for name, each in model.named_parameters():
        each.requires_grad_(name.endswith("q_proj.weight"))
    optimizer = optimizer_of(model)
    assert len(optimizer.param_groups) == 1
    before = weights_of(model)
    train(model, 1, optimizer.step)
    moved = {name for name, each in weights_of(model).items() if not torch.equal(each, before[name])}
    assert moved == {name for name in before if name.endswith("q_proj.weight")}


# In a training


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RolloutGroup]]:
    folder = tmp_path_factory.mktemp("world")
    return folder, training_world.make_world(folder)


def trainer_of(world: tuple[Path, list[RolloutGroup]], output: Path, **changes: Any) -> MultiConvDAPOTrainer:
    machine = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    small = {
        "max_logprob_gap": 9,
        "groups_per_step": 2,
        "token_budget": 200,
        "gradient_checkpointing": False,
        "save_strategy": "no",
    }
    settings = load_preset("dapo", output_dir=str(output), **(machine | small | changes))
    return MultiConvDAPOTrainer(str(world[0] / "model"), world[1], settings)


class _Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= 2


def test_a_training_with_muon_resumes_with_the_same_bits(
    world: tuple[Path, list[RolloutGroup]], tmp_path: Path
) -> None:
    rest = {"muon_learning_rate": 1e-3, "num_train_epochs": 2, "warmup_steps": 1}
    whole = trainer_of(world, tmp_path / "whole", **rest)
    whole.train()
    first = trainer_of(world, tmp_path / "parts", **(rest | {"save_strategy": "steps", "save_steps": 1}))
    first.add_callback(_Stop())
    first.train()
    assert not same_bits(first.model, whole.model)
    second = trainer_of(world, tmp_path / "parts", **rest)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert second.state.global_step == whole.state.global_step > 2
    assert same_bits(second.model, whole.model)


def test_matrices_that_are_spread_over_ranks_are_refused(
    world: tuple[Path, list[RolloutGroup]], tmp_path: Path
) -> None:
    trainer = trainer_of(world, tmp_path, muon_learning_rate=1e-3)
    trainer.is_fsdp_enabled = True
    with pytest.raises(TrainingError, match="each matrix whole") as refusal:
        trainer.create_optimizer()
    assert "muon_learning_rate" in (refusal.value.hint or "")


def test_a_rate_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="muon_learning_rate must be at least 0, got -1"):
        load_preset("dapo", output_dir=str(tmp_path), muon_learning_rate=-1.0)
