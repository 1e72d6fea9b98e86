"""Preparing a training: plans, refusals before weights are loaded, output folders, and settings."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.training_log import select_comparable, write_log

from memagent_graph.errors import TokenizerError
from memagent_training.algorithm.planner import Layout
from memagent_training.data.rollouts import RolloutGroup
from memagent_training.data.training_runs import Gold
from memagent_training.forward import recomputed_logprobs
from memagent_training.job import training_job
from memagent_training.job.config import MultiConvDAPOConfig
from memagent_training.job.dry_run import plan_training
from memagent_training.job.job_settings import DECISIVE_SETTINGS, make_config, parse_settings
from memagent_training.job.training_job import PreparedJob, TrainingJob, prepare, read_groups
from memagent_training.job.training_output import find_checkpoints, require_same_inputs, write_record
from memagent_training.rewards.gold_answers import GoldAnswers
from memagent_training.rewards.reward_names import OUTCOME_REWARDS, choose_reward
from memagent_training.training_errors import RewardError, TrainingError

CPU_SETTINGS = {"use_cpu": True, "groups_per_step": 2, "warmup_steps": 0}


@pytest.fixture(scope="module")
def groups(world) -> list[RolloutGroup]:
    """The groups of the shared log."""
    return select_comparable(world.groups)


@pytest.fixture
def make_job(world, tmp_path):
    def make(runs: Path | str | None = None, **fields: Any) -> TrainingJob:
        settings = CPU_SETTINGS | fields.pop("settings", {})
        values = {"preset": "dapo", "model": str(world.model), "out": tmp_path / "out", **fields}
        return TrainingJob(runs=runs or world.runs, settings=settings, **values)

    return make


@pytest.fixture
def change_log(world, groups, tmp_path):
    """A function that writes a log of the same runs with changes."""

    def write(**changes: Any) -> Path:
        return write_log(tmp_path / "changed.sqlite", changes.pop("groups", groups), world.model, **changes)

    return write


def get_refusal(job: TrainingJob) -> str:
    with pytest.raises(TrainingError) as error:
        prepare(job)
    return str(error.value)


# Plans


def test_plan_has_the_tokens_of_its_layout(make_job) -> None:
    plans = [plan_training(prepare(make_job(settings={"layout": layout}))) for layout in reversed(Layout)]
    tree, packed, padded = (plan["schedule"]["forwarded_tokens"] for plan in plans)
    assert tree < packed == plans[0]["schedule"]["row_tokens"] < padded
    assert json.loads(json.dumps(plans[0]))["schedule"]["layout"] == "prefix_tree"


def test_total_steps_follow_from_passes_or_max_steps(make_job) -> None:
    one_pass, three_passes = prepare(make_job()), prepare(make_job(settings={"num_train_epochs": 3}))
    assert three_passes.total_steps == 3 * one_pass.total_steps
    assert prepare(make_job(settings={"max_steps": 2})).total_steps == 2


def test_adapters_need_less_optimizer_memory_and_no_reference(make_job) -> None:
    full_memory = plan_training(prepare(make_job(preset="memagent-paper")))["memory"]
    adapter_memory = plan_training(prepare(make_job(preset="memagent-paper", lora_rank=4)))["memory"]
    assert full_memory["reference"] == full_memory["weights"] and adapter_memory["reference"] == 0
    assert adapter_memory["optimizer"] < full_memory["optimizer"]


# Runs that cannot be trained on


@pytest.mark.parametrize("mixed_field", ["tokenizer", "template"])
def test_logs_with_two_tokenizers_or_templates_need_a_choice(groups, make_job, change_log, mixed_field) -> None:
    changes = {rollout.run_id: {mixed_field: "another"} for rollout in groups[0].rollouts_G}
    path = change_log(changes_by_run=changes)
    message = get_refusal(make_job(path))
    assert f"2 {mixed_field}s" in message and f"as in {mixed_field}" in message
    choice = prepare(make_job()).base.tokenizer_fingerprint if mixed_field == "tokenizer" else "another"
    expected = len(groups) - 1 if mixed_field == "tokenizer" else 1
    assert len(prepare(make_job(path, **{mixed_field: choice})).replay.groups) == expected


@pytest.mark.parametrize("preset", ["dapo", "memagent-paper"])
def test_runs_with_equal_rewards_are_refused(groups, make_job, change_log, preset) -> None:
    equal_rewards = {rollout.run_id: 1.0 for group in groups for rollout in group.rollouts_G}
    message = get_refusal(make_job(change_log(rewards=equal_rewards), preset=preset))
    assert "answered right only sometimes" in message
    assert f"{len(groups[0].rollouts_G)} runs, each 1" in message, "the questions are named"
    assert "no_reward" not in message


def test_runs_without_a_gold_answer_are_named_if_all_rewards_are_equal(groups, make_job) -> None:
    gold = GoldAnswers({rollout.run_id: Gold(("4711",)) for rollout in groups[0].rollouts_G})
    unknown_run_id = groups[1].rollouts_G[0].run_id
    message = get_refusal(make_job(reward=OUTCOME_REWARDS["token_f1"], gold=gold))
    assert "all rewards are equal within every group" in message
    assert f"no_reward: {unknown_run_id}" in message and "outcome: no gold answer is known in 16" in message


def test_nan_reward_is_named_before_the_groups_that_it_breaks(groups, make_job) -> None:
    run_ids = {group.rollouts_G[0].run_id for group in groups}
    message = get_refusal(make_job(reward=lambda run: math.nan if run.run_id in run_ids else 1.0))
    assert "non_finite_reward: run-" in message
    assert message.index("non_finite_reward") < message.index("incomplete_group")
    assert "correct the reward function" in message


def test_conversation_above_the_window_is_refused(world, make_job, tmp_path) -> None:
    small_window_model = tmp_path / "small"
    shutil.copytree(world.model, small_window_model)
    config = json.loads((small_window_model / "config.json").read_text())
    (small_window_model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 12}))
    message = get_refusal(make_job(model=str(small_window_model)))
    assert "too_long" in message and "smaller chunks" in message
    assert prepare(make_job()).base.context_window == 128
    assert "too_long" in get_refusal(make_job(max_tokens=12))


def test_conversation_above_the_token_budget_is_refused_before_training(make_job) -> None:
    message = get_refusal(make_job(settings={"token_budget": 20}))
    assert "token_budget" in message and "set token_budget=" in message and "run-" in message


def test_groups_file_selects_runs_and_must_be_a_json_object(groups, make_job, tmp_path) -> None:
    group_names = {rollout.run_id: "g" for rollout in groups[0].rollouts_G}
    (tmp_path / "groups.json").write_text(json.dumps(group_names))
    assert read_groups(tmp_path / "groups.json") == group_names
    assert [group.group_id for group in prepare(make_job(groups=group_names)).replay.groups] == ["g"]
    for text in ("[1]", "{"):
        (tmp_path / "groups.json").write_text(text)
        with pytest.raises(TrainingError, match="JSON"):
            read_groups(tmp_path / "groups.json")


# Models that cannot be trained


def test_model_with_another_tokenizer_is_refused_unless_trusted(make_job) -> None:
    message = get_refusal(make_job(model="embedded"))
    assert "wrong base model" in message and "trust_tokenizer" in message
    assert isinstance(prepare(make_job(model="embedded", trust_tokenizer=True)), PreparedJob)


def test_folder_that_is_not_a_model_is_refused(world, make_job, tmp_path) -> None:
    assert "there is no model" in get_refusal(make_job(model=str(tmp_path / "nothing")))
    assert "config.json" in get_refusal(make_job(model=str(world.folder)))
    model_folder = tmp_path / "adapters"
    model_folder.mkdir()
    (model_folder / "adapter_config.json").write_text("{}")
    assert "only adapters" in get_refusal(make_job(model=str(model_folder)))
    shutil.copy(world.model / "config.json", model_folder)
    assert "no weights" in get_refusal(make_job(model=str(model_folder)))
    (model_folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        prepare(make_job(model=str(model_folder)))
    (model_folder / "config.json").write_text('{"model_type": "no such type"}')
    assert "cannot be parsed" in get_refusal(make_job(model=str(model_folder)))


def test_unconnected_processes_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    training_job._require_one_process_per_device(SimpleNamespace(n_gpu=1, world_size=2))
    with pytest.raises(TrainingError, match="train by itself"):
        training_job._require_one_process_per_device(SimpleNamespace(n_gpu=1, world_size=1))


def test_several_gpus_without_a_launcher_are_refused_with_a_hint(make_job, monkeypatch) -> None:
    monkeypatch.setattr(MultiConvDAPOConfig, "n_gpu", property(lambda _: 4))
    with pytest.raises(TrainingError, match="accelerate launch"):
        prepare(make_job())


# The output folder


def test_folder_with_a_training_is_refused_without_resume(make_job, tmp_path) -> None:
    (tmp_path / "out" / "checkpoint-3").mkdir(parents=True)
    message = get_refusal(make_job())
    assert "checkpoint-3" in message and "(resume)" in message and "(out)" in message


def test_model_folder_and_file_are_refused_as_output(world, make_job, tmp_path) -> None:
    assert "overwritten" in get_refusal(make_job(out=world.model))
    (tmp_path / "file").write_text("")
    assert "not a writable folder" in get_refusal(make_job(out=tmp_path / "file" / "below"))


def test_incomplete_checkpoints_are_skipped(tmp_path) -> None:
    for number in (1, 2, 9, 10, 11):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
        if number < 10:
            (folder / recomputed_logprobs.FILE_NAME).write_bytes(b"")
    (tmp_path / "checkpoint-9" / "trainer_state.json").unlink()
    checkpoints = find_checkpoints(tmp_path)
    assert checkpoints.newest == tmp_path / "checkpoint-2"
    assert [folder.name for folder in checkpoints.incomplete] == ["checkpoint-11", "checkpoint-10", "checkpoint-9"]
    assert find_checkpoints(tmp_path / "nowhere").newest is None


def test_training_resumes_only_with_the_same_inputs(tmp_path) -> None:
    record = {"settings": {"beta": 0.0, "seed": 1}, "model": {"weights": "abc", "lora_rank": None}}
    require_same_inputs(tmp_path, record)  # there is no record yet
    write_record(tmp_path, record)
    require_same_inputs(tmp_path, {**record, "loop": {}})
    with pytest.raises(TrainingError, match=r"beta was 0\.0 and is 0\.1"):
        require_same_inputs(tmp_path, {**record, "settings": {"beta": 0.1, "seed": 1}})
    with pytest.raises(TrainingError, match="weights was 'abc' and is 'def'"):
        require_same_inputs(tmp_path, {**record, "model": {"weights": "def", "lora_rank": None}})
    require_same_inputs(tmp_path, {**record, "model": {"weights": "", "lora_rank": None}})  # not yet downloaded
    with pytest.raises(TrainingError, match="strategy was None and is 'gated'"):
        require_same_inputs(tmp_path, {**record, "loop": {"strategy": "gated"}})
    with pytest.raises(TrainingError, match="seed was 1 and is None"):
        require_same_inputs(tmp_path, {**record, "settings": {"beta": 0.0}})
    for damaged_text in ("{", "[]", '{"settings": 1}'):
        (tmp_path / "training.json").write_text(damaged_text)
        with pytest.raises(TrainingError, match="cannot be read"):
            require_same_inputs(tmp_path, record)


def test_step_count_is_recorded_if_the_learning_rate_depends_on_it(make_job) -> None:
    for settings, is_recorded in (
        ({"lr_scheduler_type": "constant_with_warmup"}, False),
        ({"lr_scheduler_type": "linear"}, True),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}, True),  # a share of all steps
    ):
        records = [prepare(make_job(settings={**settings, "max_steps": steps})).decisive_inputs for steps in (2, 3)]
        assert (records[0] != records[1]) is is_recorded


# Settings


def test_settings_are_parsed_by_their_declared_types() -> None:
    texts = [
        "groups_per_step=4", "learning_rate=1e-5", "divide_by_std=yes", "delta=none", "layout=packed", "max_steps=-1",
        "report_to=none", "lr_scheduler_type=linear", 'model_init_kwargs={"dtype": "bfloat16"}', "importance_cap=2",
        "bf16=false", "warmup_steps=0.1", 'lr_scheduler_kwargs={"min_lr": 1e-7}',
    ]  # fmt: skip
    assert parse_settings(texts) == {
        "groups_per_step": 4, "learning_rate": 1e-5, "divide_by_std": True, "delta": None, "layout": "packed",
        "max_steps": -1, "report_to": "none", "lr_scheduler_type": "linear", "importance_cap": 2.0, "bf16": False,
        "model_init_kwargs": {"dtype": "bfloat16"}, "warmup_steps": 0.1, "lr_scheduler_kwargs": {"min_lr": 1e-7},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("groups_per_step", "NAME=VALUE"),
        ("=4", "NAME=VALUE"),
        ("groups_per_step=four", "a whole number"),
        ("groups_per_step=1.5", "a whole number"),
        ("learning_rate=fast", "a number"),
        ("divide_by_std=maybe", "true or false"),
        ("model_init_kwargs={", "JSON"),
        ("output_dir=here", "with out"),
        ("resume_from_checkpoint=true", "with resume"),
    ],
)
def test_invalid_settings_texts_are_refused(text, message) -> None:
    with pytest.raises(TrainingError, match=message):
        parse_settings([text])


def test_unknown_presets_and_settings_are_refused_with_suggestions(tmp_path) -> None:
    with pytest.raises(TrainingError, match=r"dapo or .*memagent-paper"):
        make_config("grpo", {}, tmp_path)
    with pytest.raises(TrainingError, match="Did you mean groups_per_step"):
        make_config("dapo", parse_settings(["group_per_step=3"]), tmp_path)
    with pytest.raises(TrainingError, match="not possible"):
        make_config("dapo", {"lr_scheduler_type": "wavy"}, tmp_path)
    trl_settings = ("num_generations=8", "top_p=0.9", "vllm_importance_sampling_cap=3", "use_liger_kernel=true")
    for setting in (*trl_settings, "torch_empty_cache_steps=5", "data_seed=3", "hub_model_id=me/mine"):
        with pytest.raises(TrainingError, match=rf"{setting.partition('=')[0]} has no effect here"):
            make_config("dapo", parse_settings([setting]), tmp_path)


def test_every_decisive_setting_exists(tmp_path) -> None:
    config = make_config("dapo", {}, tmp_path)
    assert [name for name in DECISIVE_SETTINGS if not hasattr(config, name)] == []


# Rewards


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x", "is not a function"),
        ("two", "cannot be called with a run alone"),
        ("named", "cannot be called with a run alone"),
        ("lenght", "Did you mean own.py:length"),
    ],
)
def test_user_reward_must_be_a_function_of_a_run(name, message, tmp_path, monkeypatch) -> None:
    code = ["def length(run):\n    return 1.0", "x = 3", "def two(run, gold): ...", "def named(*, run): ..."]
    code += ["def unsigned(run):\n    return 1.0", "unsigned.__signature__ = 3"]
    (tmp_path / "own.py").write_text("\n".join(code))
    monkeypatch.chdir(tmp_path)
    assert choose_reward("own.py:length")(None) == choose_reward("own.py:unsigned")(None) == 1.0
    with pytest.raises(RewardError, match=message):
        choose_reward(f"own.py:{name}")


def test_loss_uses_the_temperature_of_the_runs(make_job, change_log) -> None:
    log_path = change_log(sampling={"temperature": 0.7, "top_p": 1.0})
    settings = {"importance_cap": None}
    assert prepare(make_job(log_path, settings=settings)).config.temperature == 0.7
    assert "temperature of 0.7" in get_refusal(make_job(log_path, settings={"temperature": 1.0, **settings}))


def test_runs_of_several_temperatures_are_refused_with_a_hint(groups, make_job, change_log) -> None:
    changes = {rollout.run_id: {"sampling": {"temperature": 0.7}} for rollout in groups[0].rollouts_G}
    assert "memagent export" in get_refusal(make_job(change_log(changes_by_run=changes)))


def test_missing_tracker_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    for tracker, package in (("wandb", "wandb"), ("azure_ml", "azureml")):
        with pytest.raises(TrainingError, match=rf"{tracker}.*{package} is not installed.*pip install {package}"):
            make_config("dapo", {"report_to": tracker}, tmp_path)


def test_default_layout_with_flash_attention_on_cuda_is_packed(tmp_path, monkeypatch) -> None:
    configs = [make_config("dapo", {}, tmp_path)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn" or find_spec(name))
    for settings in ({}, {"model_init_kwargs": {"dtype": "bfloat16"}}, {"layout": "prefix_tree"}):
        configs.append(make_config("dapo", {"use_cpu": True, "bf16": True} | settings, tmp_path))
    flash_options = {"attn_implementation": "flash_attention_2"}
    assert [config.layout for config in configs] == ["prefix_tree", "packed", "packed", "prefix_tree"]
    options = [None, flash_options, flash_options | {"dtype": "bfloat16"}, None]
    assert [config.model_init_kwargs for config in configs] == options
