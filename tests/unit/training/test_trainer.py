"""Trainings: resuming, adapters, metrics, refusals, non-finite values, and faults that once were silent."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import shutil
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from made_rollouts import MACHINE_METRICS, copy_weights, edit_rollout, find_changes, read_logs  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from support import training_world  # noqa: E402
from support.programs import run_ranks  # noqa: E402

from memagent_graph.errors import MemAgentError  # noqa: E402
from memagent_training.algorithm.advantages import AdvantageSettings, OverlongPenalty, prepare_batch  # noqa: E402
from memagent_training.algorithm.step_metrics import compute_device_metrics, compute_row_metrics  # noqa: E402
from memagent_training.data.rollouts import RolloutGroup  # noqa: E402
from memagent_training.forward import recomputed_logprobs  # noqa: E402
from memagent_training.job.config import FIXED_OPTIONS, MultiConvDAPOConfig  # noqa: E402
from memagent_training.job.job_settings import list_presets, load_preset  # noqa: E402
from memagent_training.job.trainer import MultiConvDAPOTrainer  # noqa: E402
from memagent_training.training_errors import TrainingError  # noqa: E402

TWO_PASSES = {
    "num_train_epochs": 2,
    "warmup_steps": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": None,
}


@pytest.fixture(scope="module")
def two_passes(make_trainer, tmp_path_factory) -> tuple[Any, Path]:
    """A training of six steps, with a checkpoint after each."""
    output = tmp_path_factory.mktemp("two-passes")
    trainer = make_trainer(output, **TWO_PASSES)
    trainer.train()
    return trainer, output


@pytest.fixture(scope="module")
def two_steps(make_trainer, tmp_path_factory) -> tuple[Any, Path, str]:
    """A training of two steps, each on all groups, with a table of completions; and what it printed."""
    output = tmp_path_factory.mktemp("two-steps")
    trainer = make_trainer(output, max_steps=2, groups_per_step=99, learning_rate=0.1, log_completions=True)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        trainer.train()
    return trainer, output, text.getvalue()


def has_finite_weights(trainer: Any) -> bool:
    return all(bool(torch.isfinite(weight).all()) for weight in trainer.model.parameters())


# Resuming


def test_resumed_training_ends_with_the_same_bits(two_passes, make_trainer, tmp_path) -> None:
    """Weights, optimizer, schedule and the log-probs of the first weights, in the middle of the second pass."""
    first_trainer, output = two_passes
    resumed_trainer = make_trainer(tmp_path, **TWO_PASSES)
    resumed_trainer.train(resume_from_checkpoint=str(output / "checkpoint-4"))
    assert resumed_trainer.state.global_step == first_trainer.state.global_step == 6
    assert not find_changes(copy_weights(first_trainer.model), copy_weights(resumed_trainer.model))
    last_log = read_logs(first_trainer, without=MACHINE_METRICS)[-1]
    assert read_logs(resumed_trainer, without=MACHINE_METRICS)[-1] == last_log


# Once, a training of one step saved no log-probs of the first weights, and resumed with a ratio of 1.
def test_short_training_saves_the_same_log_probs_as_a_longer_one(two_passes, make_trainer, tmp_path) -> None:
    make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    short_logprobs, long_logprobs = (
        load_file(out / "checkpoint-1" / recomputed_logprobs.FILE_NAME) for out in (tmp_path, two_passes[1])
    )
    assert short_logprobs and not find_changes(short_logprobs, long_logprobs)


def test_checkpoint_of_other_runs_is_refused(two_passes, world, make_trainer, tmp_path) -> None:
    trainer = make_trainer(tmp_path, groups=world.groups[:-1])
    with pytest.raises(TrainingError, match="other runs, rewards or settings"):
        trainer.train(resume_from_checkpoint=str(two_passes[1] / "checkpoint-1"))


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_incomplete_checkpoint_is_refused(damage: str, two_passes, make_trainer, tmp_path) -> None:
    shutil.copytree(two_passes[1] / "checkpoint-1", tmp_path / "checkpoint-1")
    logprob_path = tmp_path / "checkpoint-1" / recomputed_logprobs.FILE_NAME
    if damage == "missing":
        logprob_path.unlink()
    else:
        logprob_path.write_bytes(logprob_path.read_bytes()[:-9])
    with pytest.raises(TrainingError, match=r"not a complete checkpoint.*Resume from an earlier checkpoint"):
        make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_old_checkpoints_are_deleted_only_after_the_new_one_is_complete(make_trainer, tmp_path, monkeypatch) -> None:
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=3)
    complete_before_save: list[set[str]] = []
    original = recomputed_logprobs.save

    def record_and_save(path: Path, *rest: Any) -> None:
        complete_before_save.append(
            {path.parent.name for path in tmp_path.glob(f"checkpoint-*/{recomputed_logprobs.FILE_NAME}")}
        )
        original(path, *rest)

    monkeypatch.setattr(recomputed_logprobs, "save", record_and_save)
    trainer.train()
    assert complete_before_save == [set(), {"checkpoint-1"}, {"checkpoint-2"}]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_adapter_is_trained_with_its_base_as_the_reference(world, small_settings, tmp_path) -> None:
    from peft import LoraConfig

    args = small_settings(tmp_path, learning_rate=0.05, max_steps=3, beta=0.1)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = MultiConvDAPOTrainer(str(world.model), world.groups, args, peft_config=lora)
    initial_weights = copy_weights(trainer.model)
    trainer.train()
    changed_names = find_changes(initial_weights, copy_weights(trainer.model))
    assert changed_names
    assert all("lora" in name for name in changed_names)
    logs = read_logs(trainer)
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert logs[-1]["kl"] > 1e-3


# Metrics


def test_metrics_are_means_over_tokens_not_micro_batches(make_trainer, tmp_path) -> None:
    """A step has the same metrics in one micro-batch and in many."""
    logs = []
    for budget in (45, 4000):
        trainer = make_trainer(tmp_path, "dapo", token_budget=budget, layout="packed", max_steps=2)
        trainer.train()
        logs.append(trainer.state.log_history[1])
    split_metrics = MACHINE_METRICS | {"tokens/padding_fraction", "tokens/forwarded", "num_tokens"}
    assert logs[0].keys() == logs[1].keys()
    for name in logs[0].keys() - split_metrics:
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-4, abs=1e-5), name
    names = {
        "reward", "groups/dropped_fraction", "clip_ratio/low_mean", "clip_ratio/high_mean", "entropy", "ratio/mean",
        "completions/mean_length", "completions/update/mean_length", "sampling/sampling_logp_difference/mean",
        "importance/mean", "grad_norm",
    }  # fmt: skip
    assert names <= logs[0].keys()


# Once, _log_step cleared what TRL averages, so metrics were those of the last step, beside a mean loss.
def test_metrics_are_means_over_the_steps_between_two_logs(two_passes, make_trainer, tmp_path) -> None:
    step_logs = read_logs(two_passes[0])[:3]
    trainer = make_trainer(tmp_path, warmup_steps=2, max_steps=3, logging_steps=3)
    trainer.train()
    for name in ("loss", "reward"):
        mean = sum(entry[name] for entry in step_logs) / 3
        assert read_logs(trainer)[0][name] == pytest.approx(mean, abs=1e-5)


# Once, compute_row_metrics counted only learned rows, without truncated ones, while penalties counted all rollouts.
def test_fractions_of_a_step_count_all_its_rollouts(world) -> None:
    def truncate_all_but_the_first(group: RolloutGroup) -> RolloutGroup:
        rollouts = [
            replace(
                rollout, conversations_K=tuple(replace(row, truncated=index > 0) for row in rollout.conversations_K)
            )
            for index, rollout in enumerate(group.rollouts_G)
        ]
        return replace(group, rollouts_G=tuple(rollouts))

    settings = AdvantageSettings(mask_truncated=True, overlong_penalty=OverlongPenalty(4, 3))
    groups = [truncate_all_but_the_first(group) for group in world.groups]
    batch = prepare_batch(groups, settings)
    assert len(batch.rows) < sum(len(rollout.conversations_K) for group in groups for rollout in group.rollouts_G)
    metrics = compute_row_metrics(groups, batch, ())
    assert metrics["penalised_fraction"] <= 1
    assert metrics["completions/clipped_ratio"] > 0


# Once, logged log-probs before temperature were compared with computed ones after it.
def test_log_prob_gaps_compare_equal_temperatures(two_passes, make_trainer, tmp_path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1, temperature=0.5)
    trainer.train()
    at_one, at_half = (read_logs(run)[0]["sampling/sampling_logp_difference/mean"] for run in (two_passes[0], trainer))
    assert 0 < at_half <= 2 * at_one


def test_log_prob_gap_is_printed_before_the_first_step(two_steps) -> None:
    trainer, _, output = two_steps
    gap = trainer.logprob_gap
    assert 0.1 < gap.mean < 0.5 < gap.largest
    assert gap.worst_mean >= gap.mean
    assert str(gap) in output and "another number format" in output and "importance_cap=2" in output


def test_sampling_metrics_equal_their_formulas(two_steps) -> None:
    """They use log-probs of the initial weights at every step; the drift of the policy is in `ratio`."""
    trainer, *_ = two_steps
    pairs = [
        (logged, initial)
        for row in trainer.schedule.plan_groups(trainer.schedule.kept_groups).rows
        for logged, initial, is_learned in zip(
            torch.tensor(row.conversation.logprobs_T),
            trainer._recomputed_logprobs[row.run_id, row.conversation_index],
            row.conversation.loss_mask_T or [True] * len(row.conversation.logprobs_T),
            strict=True,
        )
        if is_learned
    ]
    logged, initial = torch.tensor(pairs, dtype=torch.float64).T
    ratios = (initial - logged).exp()
    expected = {
        "sampling_logp_difference/mean": (initial - logged).abs().mean(),
        "sampling_logp_difference/max": (initial - logged).abs().max(),
        "importance_sampling_ratio/min": ratios.min(),
        "importance_sampling_ratio/mean": ratios.mean(),
        "importance_sampling_ratio/max": ratios.max(),
        "kl_k1": (logged - initial).mean(),
        "kl_k3": (ratios - 1 - (initial - logged)).mean(),
        "effective_sample_size": ratios.sum() ** 2 / (ratios**2).sum() / len(ratios),
    }
    logs = read_logs(trainer)
    for entry in logs:
        for name, value in expected.items():
            assert entry[f"sampling/{name}"] == pytest.approx(float(value), rel=1e-9), name
    assert logs[1]["ratio/mean"] != pytest.approx(1, abs=1e-3)
    assert trainer.state.total_flos == 6 * trainer._weight_count * sum(entry["tokens/forwarded"] for entry in logs)


@pytest.mark.parametrize(("name", "mfu"), [("NVIDIA H200", 6 * 10 * 500 / (4 * 989e12)), ("another GPU", None)])
def test_mfu_is_known_only_for_known_gpus(name: str, mfu: float | None, monkeypatch) -> None:
    values = {"is_available": True, "max_memory_allocated": 2**31, "get_device_name": name}
    for function, value in values.items():
        monkeypatch.setattr(torch.cuda, function, lambda value=value: value)
    metrics = compute_device_metrics(tokens=1000, seconds=2.0, weights=10, processes=4)
    assert (metrics["train/tokens_per_second"], metrics["memory/peak_gib"]) == (500, 2)
    assert metrics.get("mfu") == (None if mfu is None else pytest.approx(mfu))


def test_table_of_completions_has_one_rollout_per_step(two_steps, world) -> None:
    trainer, output, _ = two_steps
    for step in (1, 2):
        table = pq.read_table(output / "completions" / f"completions_{step:05}.parquet").to_pylist()
        run_ids = {row["run_id"] for row in table}
        rollout = next(rollout for group in world.groups for rollout in group.rollouts_G if {rollout.run_id} == run_ids)
        assert {row["role"] for row in table} <= {conversation.role for conversation in rollout.conversations_K}
        assert {row["reward"] for row in table} == {rollout.reward}
        texts = {trainer.processing_class.decode(row.completion_ids_T.tolist()) for row in rollout.conversations_K}
        assert {row["completion"] for row in table} <= texts


# Refusals


def equalize_rewards(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    return [replace(group, rollouts_G=tuple(replace(run, reward=1.0) for run in group.rollouts_G)) for group in groups]


@pytest.mark.parametrize(
    ("change_groups", "message"),
    [
        (lambda groups: edit_rollout(groups, prompt_ids_P=array("I", [999])), r"token id 999.*wrote the runs"),
        (lambda groups: edit_rollout(groups, reward=1e39), r"32 bits.*run-0-0"),
        (equalize_rewards, r"none of the 6 groups.*6 equal_rewards"),
    ],
    ids=["foreign ids", "huge", "equal"],
)
def test_invalid_groups_are_refused(change_groups: Any, message: str, world, make_trainer, tmp_path) -> None:
    with pytest.raises(MemAgentError, match=message):
        make_trainer(tmp_path, "dapo", groups=change_groups(world.groups)).train()


def test_wrong_base_model_is_refused_before_the_first_step(make_trainer, tmp_path) -> None:
    training_world.make_model(tmp_path, seed=1)
    limit = MultiConvDAPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False).max_logprob_gap
    trainer = make_trainer(tmp_path, model=tmp_path / "model", max_logprob_gap=limit)
    initial_weights = copy_weights(trainer.model)
    with pytest.raises(TrainingError, match=r"not sampled by this model.*Give the model that wrote them") as error:
        trainer.train()
    assert error.value.run_id is not None
    assert not find_changes(initial_weights, copy_weights(trainer.model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delta": 1.1}, "upper clipping bound"),
        ({"importance_cap": 0.5}, "importance_cap"),
        ({"temperature": 0.7, "importance_cap": 2.0}, "before temperature"),
        ({"temperature": 0.7, "old_logprobs": "logged"}, "before temperature"),
        ({"temperature": 0.7, "importance_cap": None, "skip_certain": 0.1, "beta": 0.0}, "log-probs as sampled"),
        ({"layout": "spiral"}, "padded, packed, prefix_tree"),
        ({"loss_weights": "sum"}, "token_mean"),
        ({"groups_per_step": 0}, "groups_per_step"),
        ({"overlong_max_length": 100}, "both"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0, got -1"),
        ({"muon_learning_rate": float("nan")}, "muon_learning_rate must be at least 0, got nan"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str, small_settings, tmp_path) -> None:
    with pytest.raises(TrainingError, match=message):
        small_settings(tmp_path, **settings)


@pytest.mark.parametrize("name", sorted(FIXED_OPTIONS))
def test_fixed_trl_options_cannot_be_changed(name: str, tmp_path) -> None:
    """Once, checkpoints without an optimizer were accepted, and TRL divided by steps_per_generation."""
    with pytest.raises(TrainingError, match=rf"{name}='another' is not supported: {re.escape(FIXED_OPTIONS[name][1])}"):
        MultiConvDAPOConfig(output_dir=str(tmp_path), **{name: "another"})


def test_log_probs_after_temperature_can_be_used_at_any_temperature(small_settings, tmp_path) -> None:
    uses = {"importance_cap": 2.0, "old_logprobs": "logged", "skip_certain": 0.1, "beta": 0.0}
    assert small_settings(tmp_path, temperature=1.3, logged_after_temperature=True, **uses).logged_is_sampled
    assert not small_settings(tmp_path, temperature=1.3, importance_cap=None).logged_is_sampled
    assert small_settings(tmp_path, temperature=1.0).logged_is_sampled


# Once, ranks with other rewards (of a judge, a random function, another copy of the log) trained on silently.
def test_ranks_with_other_rewards_are_refused(world, tmp_path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, pickle, sys\n"
        "from support.training_world import make_config\n"
        "from memagent_training.job.trainer import MultiConvDAPOTrainer\n"
        "folder, groups, out = map(pathlib.Path, sys.argv[1:])\n"
        "groups = pickle.loads((groups / os.environ['RANK']).read_bytes())\n"
        "config = make_config({'preset': 'memagent-paper', 'changes': {'max_steps': 1}}, out)\n"
        "MultiConvDAPOTrainer(str(folder / 'model'), groups, config).train()\n"
    )
    for rank, groups in enumerate((world.groups, edit_rollout(world.groups, reward=0.5))):
        (tmp_path / str(rank)).write_bytes(pickle.dumps(groups))
    ranks = run_ranks([sys.executable, script, world.folder, tmp_path, tmp_path / "out"], 2)
    assert any(process.returncode > 0 for process in ranks)
    assert any("TrainingError" in process.stderr for process in ranks)


# Non-finite values


# Once, a log-prob of -120 made every weight NaN, and the logged loss was 0.
def test_very_unlikely_logged_token_leaves_the_weights_finite(world, make_trainer, tmp_path) -> None:
    groups = [edit_rollout([group], **change_first_logprob(group, -120.0))[0] for group in world.groups]
    trainer = make_trainer(
        tmp_path, "dapo", groups=groups, old_logprobs="logged", max_logprob_gap=1e9, max_steps=2
    )  # fmt: skip
    trainer.train()
    assert has_finite_weights(trainer)
    assert not any(log_entry.get("skipped") for log_entry in trainer.state.log_history)


def change_first_logprob(group: RolloutGroup, value: float) -> dict[str, Any]:
    """Return the log-probs of the first conversation with another value for its first token."""
    logprobs_T = group.rollouts_G[0].conversations_K[0].logprobs_T
    return {"logprobs_T": array("f", [value, *logprobs_T[1:]])}


def test_non_finite_steps_are_skipped_up_to_a_limit(make_trainer, tmp_path) -> None:
    class NanTrainer(MultiConvDAPOTrainer):
        def _forward_backward(self, *rest: Any) -> Any:
            loss = super()._forward_backward(*rest)
            if self.state.global_step in {1, 3, 4}:
                next(iter(self.model.parameters())).grad[0, 0] = float("nan")
            return loss

    trainer = make_trainer(tmp_path, kind=NanTrainer, max_steps=9, max_grad_norm=1.0, max_skipped_steps=1)
    with pytest.raises(TrainingError, match=r"not finite in 2 steps in a row, most recently step 5.*max_skipped_steps"):
        trainer.train()
    assert [entry["skipped"] for entry in read_logs(trainer)][:3] == [0.0, 1.0, 0.0]
    assert has_finite_weights(trainer)


# Presets


def test_presets_state_every_choice_of_the_algorithm() -> None:
    """Otherwise a preset would change with a default."""
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
        assert names <= yaml.safe_load((job_settings._PRESET_FOLDER / f"{name}.yaml").read_text()).keys()


def test_preset_may_be_a_user_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("beta: 0.5\nlearning_rate: 1e-5\n")
    config = load_preset(path, output_dir=str(tmp_path), use_cpu=True, bf16=False)
    assert (config.beta, config.learning_rate) == (0.5, 1e-5)
    for text, message in (
        ("learning_rate: small\n", r"must be a number, got 'small'"),
        ("- beta\n", "not a mapping"),
        ("beta: [1\n", "not valid YAML"),
    ):
        path.write_text(text)
        with pytest.raises(TrainingError, match=message):
            load_preset(path, output_dir=str(tmp_path))
