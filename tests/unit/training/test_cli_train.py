"""`memagent train` as a user calls it: dry runs, trainings, refusals, and killed trainings."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from made_rollouts import find_changes
from safetensors.torch import load_file
from step_from_rows import take_step
from support.command_line import memagent
from support.programs import Program
from support.training_log import select_comparable, write_log

from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.errors import make_install_command
from memagent_graph.tokenizers import load_tokenizer
from memagent_training.commands import training_process
from memagent_training.forward import recomputed_logprobs
from memagent_training.job.row_export import COLUMNS

ROOT = Path(__file__).parents[3]
ACCELERATE_CONFIGS = ROOT / "training" / "configs" / "accelerate"
SETTINGS = {
    "use_cpu": "true", "groups_per_step": "1", "warmup_steps": "0", "learning_rate": "0.02", "save_strategy": "steps",
    "save_steps": "1", "report_to": "none", "max_logprob_gap": "9",
}  # fmt: skip


def build_arguments(world, out: Path, *options: str, runs: Any = None, model: Any = None, **settings: str) -> list[str]:
    """Build the arguments of the command, by default for the shared runs and model."""
    arguments = ["train", str(runs or world.runs), "--model", str(model or world.model), "--preset", "dapo"]
    arguments += ["--out", str(out), *options]
    for name, value in (SETTINGS | settings).items():
        arguments += ["--set", f"{name}={value}"]
    return arguments


@pytest.fixture
def arguments(world, tmp_path):
    return partial(build_arguments, world, tmp_path / "out")


# Plans


def test_dry_run_prints_the_plan_without_loading_weights_or_writing(arguments, world, tmp_path) -> None:
    model_without_weights = tmp_path / "bare"
    shutil.copytree(world.model, model_without_weights)
    (model_without_weights / "model.safetensors").write_bytes(b"no weights at all")
    text = memagent(*arguments("--dry-run", model=model_without_weights)).stdout
    for expected_text in (
        "(equal_rewards)", "total steps", "layout: prefix_tree", "weights 78.5 kB", "activations", "policy versions",
        "micro batches per rank",
    ):  # fmt: skip
        assert expected_text in text, expected_text
    options = arguments("--dry-run", "--json", model=model_without_weights, groups_per_step="2")
    plan = json.loads(memagent(*options).stdout)
    schedule, groups = plan["schedule"], len(select_comparable(world.groups))
    assert (schedule["layout"], schedule["groups"]) == ("prefix_tree", groups - 1)
    assert schedule["steps_per_pass"] == math.ceil((groups - 1) / 2) == schedule["total_steps"]
    assert list(plan["dropped"].values()) == ["equal_rewards"]
    assert plan["memory"]["total"] > plan["memory"]["weights"] == 4 * 19_616
    assert plan["report"]["groups"] == groups
    assert [group["group_id"] for group in plan["report"]["zero_variance_groups"]] == list(plan["dropped"])
    assert plan["report"]["versions"] == {"v1": plan["report"]["conversations"]}
    assert not (tmp_path / "out").exists()
    for changes in ({"model": model_without_weights}, {"lr_scheduler_type": "cosine_with_min_lr"}):
        assert "cannot be loaded: " in memagent(*arguments(**changes), code=ExitCode.USAGE).stderr


def test_training_shorter_than_its_warmup_is_refused_after_the_plan(arguments, tmp_path) -> None:
    for settings in ({"num_train_epochs": "0"}, {"warmup_steps": "50"}):
        result = memagent(*arguments("--dry-run", **settings), code=2)
        assert "total steps" in result.stdout and "warmup_steps lower" in result.stderr
    memagent(*arguments(**settings), code=2)
    assert not (tmp_path / "out" / "config.json").exists()


def test_dry_run_names_refused_runs_and_the_option_that_helps(arguments, world, tmp_path) -> None:
    groups = select_comparable(world.groups)
    first_run_id = max(groups, key=lambda group: len(group.rollouts_G)).rollouts_G[0].run_id
    runs = write_log(tmp_path / "gaps.sqlite", groups, world.model, changes_by_run={first_run_id: {"token_ids": None}})
    text = memagent(*arguments("--dry-run", runs=runs)).stdout
    assert "refused, no_token_ids" in text and first_run_id in text
    assert "--partial-groups" in text
    report = json.loads(memagent(*arguments("--dry-run", "--json", "--partial-groups", runs=runs)).stdout)["report"]
    assert list(report["refused"]) == ["no_token_ids"]


# Trainings


def test_training_writes_a_policy_folder(arguments, world, tmp_path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(world.model, model)
    (model / "memagent.json").write_text('{"context_window": 128}')
    (model / "templates").mkdir()
    (model / "templates" / "update.txt").write_text("an update prompt")
    result = memagent(*arguments("--resume", model=model, save_strategy="no", max_steps="2"))
    assert "no complete checkpoint" in result.stderr
    assert result.stdout == f"{out}\n"
    assert "memagent read" in result.stderr and str(out) in result.stderr
    step_lines = [line for line in result.stderr.splitlines() if line.startswith("step ")]
    assert [line.split(": loss ")[0] for line in step_lines] == ["step 1 of 2", "step 2 of 2"]
    assert "{'loss'" not in result.stderr
    old_weights, new_weights = (load_file(folder / "model.safetensors") for folder in (model, out))
    assert find_changes(old_weights, new_weights)
    assert load_tokenizer(out).fingerprint == load_tokenizer(model).fingerprint
    assert (out / "memagent.json").is_file()
    assert json.loads((out / "config.json").read_text())["use_cache"]  # training turns it off
    assert (out / "templates" / "update.txt").read_text() == "an update prompt"
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode, "others can read it"
    assert not list(out.glob("*.bin")), "no pickles"
    refusal = memagent(*arguments(), code=ExitCode.USAGE).stderr
    assert "would be overwritten" in refusal and "--resume" in refusal


def test_adapters_are_saved_separately_and_merged(arguments, world, tmp_path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    policy = json.loads(memagent(*arguments("--lora", "2", "--json", save_strategy="no", max_steps="2")).stdout)
    assert (policy["folder"], policy["adapter"], policy["steps"]) == (str(out), str(out / "adapter"), 2)
    assert policy["metrics"]["tokens/learned"] > 0
    base, policy_model = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (world.model, out))
    token_ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        base_logits, policy_logits = base(token_ids).logits, policy_model(token_ids).logits
        adapter_logits = PeftModel.from_pretrained(base, out / "adapter").eval()(token_ids).logits
    assert torch.allclose(adapter_logits, policy_logits, atol=1e-5)
    assert not torch.allclose(base_logits, policy_logits, atol=1e-3)


def test_user_reward_function_determines_the_trained_groups(arguments, world, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("judging.py").write_text("def by_place(run):\n    return float(run.run_id.endswith('-0'))\n")
    plan = json.loads(memagent(*arguments("--dry-run", "--json", "--reward", "judging.py:by_place")).stdout)
    run_ids = [[rollout.run_id for rollout in group.rollouts_G] for group in select_comparable(world.groups)]
    varied_count = sum(any(run_id.endswith("-0") for run_id in group_run_ids) for group_run_ids in run_ids)
    assert 0 < plan["schedule"]["groups"] == varied_count < len(run_ids)


SGD_STEP = {
    "optim": "sgd", "learning_rate": "1.0", "weight_decay": "0.0", "max_grad_norm": "0.0", "max_steps": "1",
    "groups_per_step": "3", "save_strategy": "no", "gradient_checkpointing": "false",
}  # fmt: skip


def test_pytorch_step_on_exported_rows_equals_the_trainer_step(arguments, world, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    for rows, message in ((tmp_path / "no/r", "cannot be written"), (world.runs, "would be replaced")):
        assert message in memagent(*arguments("--rows", rows, **SGD_STEP), code=2).stderr
    memagent(*arguments("--rows", str(tmp_path / "rows.parquet"), **SGD_STEP))
    assert not (tmp_path / "out").exists()
    memagent(*arguments(**SGD_STEP))
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.schema.names == [name for name, _, _ in COLUMNS]
    model = AutoModelForCausalLM.from_pretrained(world.model).eval()
    take_step(model, [row for row in table.to_pylist() if row["step"] == 0])
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, weights[name], rtol=0, atol=1e-6), name


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy-versions", "v7, v8"], "stale"),
        (["--reward", "no_such_reward"], "no_reward"),
        (["--gold", os.devnull], "Choose one (--reward): exact_match"),
    ],
)
def test_invalid_options_are_refused_with_a_hint(arguments, options, message) -> None:
    refusal = memagent(*arguments("--dry-run", *options), code=ExitCode.USAGE).stderr
    assert message in refusal and "what to do:" in refusal


def test_missing_extra_error_names_the_install_command(arguments, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "trl" else find(name, *more))
    assert make_install_command("train") in memagent(*arguments(), code=ExitCode.SETTINGS).stderr


# Killed trainings


THREE_PASSES = {"num_train_epochs": "3"}


def test_resumed_killed_training_ends_with_the_same_weights(arguments, world, tmp_path) -> None:
    out = tmp_path / "out"
    command_line = [sys.executable, "-m", "memagent_graph", *arguments(**THREE_PASSES)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "training")}
    program = Program(command_line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 100
    while not (out / "checkpoint-2" / recomputed_logprobs.FILE_NAME).exists():
        assert program.poll() is None and time.monotonic() < deadline, program.communicate()
        time.sleep(0.005)
    program.send_signal(signal.SIGKILL)
    program.communicate()
    assert program.returncode == -signal.SIGKILL
    assert not (out / "model.safetensors").exists()

    # Make the newest checkpoint incomplete, as a kill may leave it.
    newest_checkpoint = max(out.glob("checkpoint-*"), key=lambda folder: int(folder.name.removeprefix("checkpoint-")))
    (newest_checkpoint / recomputed_logprobs.FILE_NAME).unlink(missing_ok=True)
    for name, value in (("learning_rate", "0.5"), ("beta", "0.1")):
        refusal = memagent(*arguments("--resume", **THREE_PASSES, **{name: value}), code=ExitCode.USAGE).stderr
        assert f"{name} was" in refusal and "Resume with the same" in refusal

    stderr = memagent(*arguments("--resume", **THREE_PASSES)).stderr
    assert f"skipped the incomplete checkpoint {newest_checkpoint}" in stderr
    assert "continuing from" in stderr
    memagent(*build_arguments(world, tmp_path / "whole", **THREE_PASSES, save_strategy="no"))
    expected, weights = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert not find_changes(expected, weights)


# Under accelerate


@pytest.mark.parametrize("path", sorted(ACCELERATE_CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_knows_every_key_of_our_configurations(path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(path))
    options_of_launcher = vars(launch_command_parser().parse_args(["script"]))
    assert set(config.fsdp_config) | set(config.deepspeed_config) <= set(options_of_launcher)
    kinds = {"single": "NO", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}
    assert config.distributed_type.value == kinds[path.stem.partition("-")[0]]


def test_dry_run_under_the_accelerate_launcher_prints_the_plan(arguments, monkeypatch) -> None:
    from accelerate.commands import launch

    programs: list[Program] = []

    def start_program(build_arguments: list[str], env: dict[str, str]) -> Program:
        environment = {**env, "PYTHONPATH": str(ROOT / "training")}
        programs.append(  # forked with its imports
            Program(build_arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        return programs[-1]

    monkeypatch.setattr(launch.subprocess, "Popen", start_program)
    options = ["--config_file", str(ACCELERATE_CONFIGS / "single.yaml"), "-m", "memagent_graph"]
    launch.launch_command(launch.launch_command_parser().parse_args(options + arguments("--dry-run", "--json")))
    stdout, _ = programs[0].communicate()
    assert json.loads(stdout)["schedule"]["ranks"] == 1


def test_only_the_main_process_prints(arguments, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    result = memagent(*arguments("--dry-run"))
    assert result.stdout == "" and "error" not in result.stderr


def test_other_processes_report_a_failure_after_a_delay(monkeypatch) -> None:
    delays: list[float] = []
    monkeypatch.setattr(time, "sleep", delays.append)
    arguments = ["train", "runs.sqlite", "--model", "model", "--gold", "nowhere.jsonl"]
    assert "cannot be read" in memagent(*arguments, code=ExitCode.USAGE).stderr
    assert not delays
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "cannot be read" in memagent(*arguments, code=ExitCode.USAGE).stderr
    assert delays == [training_process.FAILURE_DELAY_SECONDS]
