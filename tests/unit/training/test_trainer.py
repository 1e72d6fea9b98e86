"""A training run as its user sees it: resumes, adapters, metrics, and what is refused."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from safetensors.torch import load_file  # noqa: E402
from support import training_world  # noqa: E402

from memagent_graph.errors import MemAgentError  # noqa: E402
from memagent_training.data.rollouts import RolloutGroup  # noqa: E402
from memagent_training.forward import recomputed  # noqa: E402
from memagent_training.job.config import MultiConvDAPOConfig  # noqa: E402
from memagent_training.job.job_settings import list_presets, load_preset  # noqa: E402
from memagent_training.job.trainer import MultiConvDAPOTrainer  # noqa: E402
from memagent_training.training_errors import TrainingError  # noqa: E402

QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
STRANGE = {"max_logprob_gap": 9}
"""The runs of the world have made-up log-probs, .23 nats off."""
SMALL = {"groups_per_step": 2, "token_budget": 200, "learning_rate": 0.005, "warmup_steps": 0}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RolloutGroup]]:
    folder = tmp_path_factory.mktemp("world")
    return folder, training_world.make_world(folder)


def settings(output: Path, preset: str = "memagent-paper", **changes: Any) -> MultiConvDAPOConfig:
    return load_preset(preset, output_dir=str(output), **(QUIET | STRANGE | SMALL | {"save_strategy": "no"} | changes))


def trainer_of(
    world: tuple[Path, list[RolloutGroup]], output: Path, preset: str = "memagent-paper", **changes: Any
) -> MultiConvDAPOTrainer:
    return MultiConvDAPOTrainer(str(world[0] / "model"), world[1], settings(output, preset, **changes))


def weights_of(trainer: MultiConvDAPOTrainer) -> dict[str, Any]:
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


# Going on


@pytest.mark.parametrize("preset", ["memagent-paper", "dapo"])
def test_a_resumed_run_ends_with_the_same_bits(
    preset: str, world: tuple[Path, list[RolloutGroup]], tmp_path: Path
) -> None:
    """Weights, optimizer, schedule and the log-probs of the first weights, in the middle of the second pass."""
    rest = {"num_train_epochs": 2, "warmup_steps": 2}
    whole = trainer_of(world, tmp_path / "whole", preset, **rest)
    whole.train()
    first = trainer_of(world, tmp_path / "parts", preset, save_strategy="steps", save_steps=1, **rest)
    stop_after = 4
    first.add_callback(_Stop(stop_after))
    first.train()
    second = trainer_of(world, tmp_path / "parts", preset, **rest)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / f"checkpoint-{stop_after}"))
    assert second.state.global_step == whole.state.global_step == 6
    expected = weights_of(whole)
    assert all(torch.equal(each, expected[name]) for name, each in weights_of(second).items())
    last, again = whole.state.log_history[-2], second.state.log_history[-2]
    volatile = {"step_time", "train/tokens_per_second", "memory/peak_gib", "mfu"}
    assert {k: v for k, v in last.items() if k not in volatile} == {k: v for k, v in again.items() if k not in volatile}


class _Stop(training_world.TrainerCallback):  # type: ignore[name-defined]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def test_a_checkpoint_of_other_runs_is_refused(world: tuple[Path, list[RolloutGroup]], tmp_path: Path) -> None:
    trainer_of(world, tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    others = (world[0], world[1][:-1])
    with pytest.raises(TrainingError, match="other runs, rewards or settings"):
        trainer_of(others, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_half_a_checkpoint_is_refused(damage: str, world: tuple[Path, list[RolloutGroup]], tmp_path: Path) -> None:
    trainer_of(world, tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    file = tmp_path / "checkpoint-1" / recomputed.FILE_NAME
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(TrainingError, match=r"not a complete checkpoint.*Resume from an earlier checkpoint"):
        trainer_of(world, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_old_checkpoints_go_only_after_the_new_one_is_whole(
    world: tuple[Path, list[RolloutGroup]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(world, tmp_path, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=3)
    saved: list[set[str]] = []
    original = recomputed.save

    def save(path: Path, *rest: Any) -> None:
        saved.append({path.parent.name for path in tmp_path.glob(f"checkpoint-*/{recomputed.FILE_NAME}")})
        original(path, *rest)

    monkeypatch.setattr(recomputed, "save", save)
    trainer.train()
    assert saved == [set(), {"checkpoint-1"}, {"checkpoint-2"}]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_passes_have_different_orders_and_the_same_groups(
    world: tuple[Path, list[RolloutGroup]], tmp_path: Path
) -> None:
    schedule = trainer_of(world, tmp_path).schedule
    passes = [
        [[row.run_id for row in schedule.step(which * schedule.steps_per_pass + place).rows] for place in range(3)]
        for which in range(2)
    ]
    assert passes[0] != passes[1]
    assert sorted(chain.from_iterable(passes[0])) == sorted(chain.from_iterable(passes[1]))


# Adapters and memory


def test_an_adapter_learns_and_its_base_is_the_reference(
    world: tuple[Path, list[RolloutGroup]], tmp_path: Path
) -> None:
    from peft import LoraConfig

    args = settings(tmp_path, learning_rate=0.05, num_train_epochs=2, beta=0.1)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = MultiConvDAPOTrainer(str(world[0] / "model"), world[1], args, peft_config=lora)
    before = weights_of(trainer)
    trainer.train()
    changed = {name for name, each in weights_of(trainer).items() if not torch.equal(each, before[name])}
    assert changed
    assert all("lora" in name for name in changed)
    logs = [entry for entry in trainer.state.log_history if "kl" in entry]
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert logs[-1]["kl"] > 1e-3


# Metrics


def test_what_is_logged_is_over_tokens_and_not_over_micro_batches(
    world: tuple[Path, list[RolloutGroup]], tmp_path: Path
) -> None:
    """The same step in one micro-batch and in many logs the same numbers."""
    logs = []
    for budget in (45, 4000):
        trainer = trainer_of(world, tmp_path, "dapo", token_budget=budget, layout="packed", max_steps=2)
        trainer.train()
        logs.append(trainer.state.log_history[1])
    splitting = {
        "step_time",
        "train/tokens_per_second",
        "memory/peak_gib",
        "tokens/padding_fraction",
        "tokens/forwarded",
        "num_tokens",
    }
    assert logs[0].keys() == logs[1].keys()
    for name in logs[0].keys() - splitting:
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-4, abs=1e-5), name
    wanted = {
        "reward", "groups/dropped_fraction", "clip_ratio/low_mean", "clip_ratio/high_mean", "entropy", "ratio/mean",
        "completions/mean_length", "completions/update/mean_length", "sampling/sampling_logp_difference/mean",
        "importance/mean", "grad_norm",
    }  # fmt: skip
    assert wanted <= logs[0].keys()


def test_staleness_counts_versions_behind_the_newest(world: tuple[Path, list[RolloutGroup]], tmp_path: Path) -> None:
    trainer = MultiConvDAPOTrainer(
        str(world[0] / "model"), world[1], settings(tmp_path, max_steps=1), policy_versions=["v0", "v1", "v2", "v3"]
    )
    trainer.train()
    assert trainer.state.log_history[0]["staleness/mean"] == 2


def test_the_gap_between_logged_and_recomputed_is_told_before_the_first_step(
    world: tuple[Path, list[RolloutGroup]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(world, tmp_path, max_steps=2)
    trainer.train()
    gap = trainer.logprob_gap
    assert gap is not None
    assert 0.1 < gap.mean < 0.5 < gap.largest
    assert gap.worst_mean >= gap.mean
    told = capsys.readouterr().out
    assert str(gap) in told and "another number format" in told and "importance_cap=2" in told


def test_the_samplers_distribution_is_compared_by_hand(world: tuple[Path, list[RolloutGroup]], tmp_path: Path) -> None:
    """From the initial weights, whatever the step: the policy's own drift is in `ratio`."""
    trainer = trainer_of(world, tmp_path, max_steps=2, groups_per_step=99, learning_rate=0.1)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    pairs = [
        (logged, old)
        for row in trainer.schedule.all_groups_step().rows
        for logged, old, is_learned in zip(
            torch.tensor(row.conversation.logprobs_T),
            trainer._recomputed[row.run_id, row.conversation_index],
            row.conversation.loss_mask_T or [True] * len(row.conversation.logprobs_T),
            strict=True,
        )
        if is_learned
    ]
    logged, old = torch.tensor(pairs, dtype=torch.float64).T
    ratios = (old - logged).exp()
    by_hand = {
        "sampling_logp_difference/mean": (old - logged).abs().mean(),
        "sampling_logp_difference/max": (old - logged).abs().max(),
        "importance_sampling_ratio/min": ratios.min(),
        "importance_sampling_ratio/mean": ratios.mean(),
        "importance_sampling_ratio/max": ratios.max(),
        "kl_k1": (logged - old).mean(),
        "kl_k3": (ratios - 1 - (old - logged)).mean(),
        "effective_sample_size": ratios.sum() ** 2 / (ratios**2).sum() / len(ratios),
    }
    for entry in logs:
        for name, value in by_hand.items():
            assert entry[f"sampling/{name}"] == pytest.approx(float(value), rel=1e-9), name
    assert logs[1]["ratio/mean"] != pytest.approx(1, abs=1e-3)


def test_runs_of_other_weights_are_refused_by_default(world: tuple[Path, list[RolloutGroup]], tmp_path: Path) -> None:
    """Its log-probs are .23 nats off on average."""
    limit = MultiConvDAPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False).max_logprob_gap
    with pytest.raises(TrainingError, match="not sampled by this model"):
        trainer_of(world, tmp_path, max_steps=1, max_logprob_gap=limit).train()


# What is refused


def edited(groups: list[RolloutGroup], **changes: Any) -> list[RolloutGroup]:
    """The groups with other values in the second conversation that has any tokens."""
    first = groups[0]
    rollout = first.rollouts_G[0]
    conversation = replace(rollout.conversations_K[0], **changes)
    rollout = replace(rollout, conversations_K=(conversation, *rollout.conversations_K[1:]))
    return [replace(first, rollouts_G=(rollout, *first.rollouts_G[1:])), *groups[1:]]


def with_rewards(groups: list[RolloutGroup], reward: float) -> list[RolloutGroup]:
    return [replace(g, rollouts_G=tuple(replace(each, reward=reward) for each in g.rollouts_G)) for g in groups]


@pytest.mark.parametrize(
    ("change", "preset", "message"),
    [
        (lambda groups: edited(groups, prompt_ids_P=array("I", [999])), "dapo", r"token id 999.*wrote the runs"),
        (lambda groups: edited(groups, prompt_ids_P=array("I", [5] * 110)), "dapo", r"exceeds token_budget, 100"),
        (lambda groups: with_rewards(groups, 1.0), "dapo", r"None of the 6 groups.*6 equal_rewards"),
        (lambda groups: with_rewards(groups, float("nan")), "memagent-paper", r"nan"),
        (lambda groups: [replace(g, rollouts_G=g.rollouts_G[:1]) for g in groups], "memagent-paper", r"6 alone"),
        (lambda groups: [groups[0], groups[0]], "memagent-paper", r"2 groups are named group-0"),
        (lambda groups: [], "dapo", r"None of the 0 groups"),
    ],
    ids=["foreign ids", "beyond the budget", "equal", "nan", "alone", "twice", "none"],
)
def test_groups_that_cannot_be_trained_on(
    change: Any, preset: str, message: str, world: tuple[Path, list[RolloutGroup]], tmp_path: Path
) -> None:
    with pytest.raises(MemAgentError, match=message):
        trainer = MultiConvDAPOTrainer(
            str(world[0] / "model"), change(world[1]), settings(tmp_path, preset, token_budget=100)
        )
        trainer.train()


def test_the_wrong_base_model_is_found_out_before_the_first_step(
    world: tuple[Path, list[RolloutGroup]], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    training_world.make_world(other, seed=1)
    trainer = MultiConvDAPOTrainer(str(other / "model"), world[1], settings(tmp_path, max_logprob_gap=0.4))
    before = weights_of(trainer)
    with pytest.raises(TrainingError, match=r"not sampled by this model.*Name the model that wrote them") as raised:
        trainer.train()
    assert raised.value.run_id is not None
    assert all(torch.equal(each, before[name]) for name, each in weights_of(trainer).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "token_budget"),
        ({"loss_type": "grpo"}, "loss_weights"),
        ({"use_vllm": True}, "replayed"),
        ({"top_entropy_quantile": 0.2}, "split"),
        ({"delta": 1.1}, "upper clipping bound"),
        ({"importance_cap": 0.5}, "importance_cap"),
        ({"temperature": 0.7, "importance_cap": 2.0}, "before temperature"),
        ({"temperature": 0.7, "old_logprobs": "logged"}, "before temperature"),
        ({"temperature": 0.7, "importance_cap": None, "skip_certain": 0.1, "beta": 0.0}, "before a temperature"),
        ({"layout": "spiral"}, "padded, packed, prefix_tree"),
        ({"loss_weights": "sum"}, "token_mean"),
        ({"groups_per_step": 0}, "groups_per_step"),
        ({"overlong_max_length": 100}, "both"),
        ({"eval_strategy": "steps"}, "memagent eval"),
        ({"learning_rat": 1e-6}, "learning_rate"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=message):
        settings(tmp_path, **changes)


def test_log_probs_after_temperature_are_of_use_at_any_temperature(tmp_path: Path) -> None:
    wanted = {"importance_cap": 2.0, "old_logprobs": "logged", "skip_certain": 0.1, "beta": 0.0}
    assert settings(tmp_path, temperature=1.3, logged_after_temperature=True, **wanted).logged_is_sampled
    assert not settings(tmp_path, temperature=1.3, importance_cap=None).logged_is_sampled
    assert settings(tmp_path, temperature=1.0).logged_is_sampled


# Presets


def test_presets_state_every_choice_of_the_algorithm() -> None:
    """A preset that leaves something to a default would change with the default."""
    import yaml

    from memagent_training.job import job_settings

    names = {
        "baseline", "divide_by_std", "drop_zero_variance", "mask_truncated_completions",
        "loss_weights", "epsilon", "epsilon_high", "delta", "beta", "kl_clamp", "entropy_coef",
        "importance_sampling_level", "old_logprobs", "importance_cap", "temperature", "learning_rate",
        "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "groups_per_step", "num_train_epochs",
    }  # fmt: skip
    assert list_presets() == ["dapo", "gru-mem", "longrlvr", "memagent-paper", "rememr1"]
    for name in list_presets():
        assert names <= yaml.safe_load((job_settings._FOLDER / f"{name}.yaml").read_text()).keys()


def test_a_preset_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("beta: 0.5\nlearning_rate: 1.0e-4\n")
    assert load_preset(path, output_dir=str(tmp_path), **QUIET).beta == 0.5
    path.write_text("learning_rate: 1e-5\n")
    assert load_preset(path, output_dir=str(tmp_path), **QUIET).learning_rate == 1e-5
    path.write_text("learning_rate: small\n")
    with pytest.raises(TrainingError, match=r"must be a number, got 'small'"):
        load_preset(path, output_dir=str(tmp_path))
    path.write_text("- beta\n")
    with pytest.raises(TrainingError, match="not a mapping"):
        load_preset(path, output_dir=str(tmp_path))
    path.write_text("beta: [1\n")
    with pytest.raises(TrainingError, match="not valid YAML"):
        load_preset(path, output_dir=str(tmp_path))
    with pytest.raises(
        TrainingError, match=r"no preset 'dap'.*dapo or gru-mem or longrlvr or memagent-paper or rememr1"
    ):
        load_preset("dap", output_dir=str(tmp_path))


def test_the_final_model_is_a_model_folder(world: tuple[Path, list[RolloutGroup]], tmp_path: Path) -> None:
    trainer = trainer_of(world, tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    saved = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(saved[name], each) for name, each in weights_of(trainer).items())


def test_a_table_of_completions_has_a_rollout_of_each_step(
    world: tuple[Path, list[RolloutGroup]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(world, tmp_path, max_steps=2, log_completions=True)
    trainer.train()
    for number in (1, 2):
        table = pq.read_table(tmp_path / "completions" / f"completions_{number:05}.parquet").to_pylist()
        run_ids = {row["run_id"] for row in table}
        rollout = next(each for group in world[1] for each in group.rollouts_G if {each.run_id} == run_ids)
        assert {row["role"] for row in table} <= {each.role for each in rollout.conversations_K}
        assert {row["reward"] for row in table} == {rollout.reward}
        tokens = {trainer.processing_class.decode(each.completion_ids_T.tolist()) for each in rollout.conversations_K}
        assert {row["completion"] for row in table} <= tokens
