"""`memagent train` as a user meets it: plans, trainings, refusals, and trainings that were killed."""

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
ACCELERATE = ROOT / "training" / "configs" / "accelerate"
SETTINGS = {
    "use_cpu": "true", "groups_per_step": "1", "warmup_steps": "0", "learning_rate": "0.02", "save_strategy": "steps",
    "save_steps": "1", "report_to": "none", "max_logprob_gap": "9",
}  # fmt: skip


def command(world, out: Path, *more: str, runs: Path | None = None, model: Any = None, **settings: str) -> list[str]:
    """The command's arguments: of the world's runs and model, unless said otherwise."""
    words = ["train", str(runs or world.runs), "--model", str(model or world.model), "--preset", "dapo"]
    words += ["--out", str(out), *more]
    return words + [part for name, value in (SETTINGS | settings).items() for part in ("--set", f"{name}={value}")]


@pytest.fixture
def arguments(world, tmp_path):
    return partial(command, world, tmp_path / "out")


# Plans


def test_a_dry_run_prints_the_plan_loads_no_weights_and_writes_nothing(arguments, world, tmp_path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(world.model, bare)
    (bare / "model.safetensors").write_bytes(b"no weights at all")
    text = memagent(*arguments("--dry-run", model=bare)).stdout
    for words in (
        "(equal_rewards)", "total steps", "layout: prefix_tree", "weights 78.5 kB", "activations", "policy versions",
        "micro batches per rank",
    ):  # fmt: skip
        assert words in text, words
    plan = json.loads(memagent(*arguments("--dry-run", "--json", model=bare, groups_per_step="2")).stdout)
    schedule, groups = plan["schedule"], len(select_comparable(world.groups))
    assert (schedule["layout"], schedule["groups"]) == ("prefix_tree", groups - 1)
    assert schedule["steps_per_pass"] == math.ceil((groups - 1) / 2) == schedule["total_steps"]
    assert list(plan["dropped"].values()) == ["equal_rewards"]
    assert plan["memory"]["total"] > plan["memory"]["weights"] == 4 * 19_616
    assert plan["report"]["groups"] == groups
    assert [group["group_id"] for group in plan["report"]["zero_variance_groups"]] == list(plan["dropped"])
    assert plan["report"]["versions"] == {"v1": plan["report"]["conversations"]}
    assert not (tmp_path / "out").exists()


def test_a_training_too_short_to_warm_up_is_planned_and_not_begun(arguments, tmp_path) -> None:
    short = {"warmup_steps": "50"}
    result = memagent(*arguments("--dry-run", **short), code=2)
    assert "total steps" in result.stdout and "warmup_steps lower" in result.stderr
    memagent(*arguments(**short), code=2)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_dry_run_names_what_is_refused_and_the_option_that_helps(arguments, world, tmp_path) -> None:
    groups = select_comparable(world.groups)
    first = max(groups, key=lambda group: len(group.rollouts_G)).rollouts_G[0].run_id
    runs = write_log(tmp_path / "gaps.sqlite", groups, world.model, changes_by_run={first: {"token_ids": None}})
    text = memagent(*arguments("--dry-run", runs=runs)).stdout
    assert "refused, no_token_ids" in text and first in text
    assert "--partial-groups" in text
    report = json.loads(memagent(*arguments("--dry-run", "--json", "--partial-groups", runs=runs)).stdout)["report"]
    assert list(report["refused"]) == ["no_token_ids"]


# Trainings


def test_a_training_leaves_a_policy_folder(arguments, world, tmp_path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(world.model, model)
    (model / "memagent.json").write_text('{"context_window": 128}')
    (model / "templates").mkdir()
    (model / "templates" / "update.txt").write_text("an update prompt")
    result = memagent(*arguments("--resume", model=model, save_strategy="no", max_steps="2"))
    assert "no complete checkpoint" in result.stderr
    assert result.stdout == f"{out}\n"
    assert "memagent read" in result.stderr and str(out) in result.stderr
    steps = [line for line in result.stderr.splitlines() if line.startswith("step ")]
    assert [line.split(": loss ")[0] for line in steps] == ["step 1 of 2", "step 2 of 2"]
    assert "{'loss'" not in result.stderr
    before, after = (load_file(folder / "model.safetensors") for folder in (model, out))
    assert find_changes(before, after)
    assert load_tokenizer(out).fingerprint == load_tokenizer(model).fingerprint
    assert (out / "memagent.json").is_file()
    assert json.loads((out / "config.json").read_text())["use_cache"]  # which training turns off
    assert (out / "templates" / "update.txt").read_text() == "an update prompt"
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode, "others can read it"
    assert not list(out.glob("*.bin")), "no pickles"
    refusal = memagent(*arguments(), code=ExitCode.USAGE).stderr
    assert "would be overwritten" in refusal and "--resume" in refusal


def test_adapters_are_left_by_themselves_and_merged(arguments, world, tmp_path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    policy = json.loads(memagent(*arguments("--lora", "2", "--json", save_strategy="no", max_steps="2")).stdout)
    assert (policy["folder"], policy["adapter"], policy["steps"]) == (str(out), str(out / "adapter"), 2)
    assert policy["metrics"]["tokens/learned"] > 0
    base, policy_model = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (world.model, out))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        plain, of_policy = base(ids).logits, policy_model(ids).logits
        of_adapter = PeftModel.from_pretrained(base, out / "adapter").eval()(ids).logits
    assert torch.allclose(of_adapter, of_policy, atol=1e-5)
    assert not torch.allclose(plain, of_policy, atol=1e-3)


def test_a_reward_of_the_user_s_own_decides_what_is_learned(arguments, world, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("judging.py").write_text("def by_place(run):\n    return float(run.run_id.endswith('-0'))\n")
    plan = json.loads(memagent(*arguments("--dry-run", "--json", "--reward", "judging.py:by_place")).stdout)
    run_ids = [[rollout.run_id for rollout in group.rollouts_G] for group in select_comparable(world.groups)]
    varied = [ids for ids in run_ids if any(run_id.endswith("-0") for run_id in ids)]
    assert 0 < plan["schedule"]["groups"] == len(varied) < len(run_ids)


PLAIN_STEP = {
    "optim": "sgd", "learning_rate": "1.0", "weight_decay": "0.0", "max_grad_norm": "0.0", "max_steps": "1",
    "groups_per_step": "3", "save_strategy": "no", "gradient_checkpointing": "false",
}  # fmt: skip


def test_a_step_in_plain_pytorch_from_the_exported_rows_alone_is_the_trainers(arguments, world, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    memagent(*arguments("--rows", str(tmp_path / "rows.parquet"), **PLAIN_STEP))
    assert not (tmp_path / "out").exists()
    memagent(*arguments(**PLAIN_STEP))
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.schema.names == [name for name, _, _ in COLUMNS]
    model = AutoModelForCausalLM.from_pretrained(world.model).eval()
    take_step(model, [row for row in table.to_pylist() if row["step"] == 0])
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, weights[name], rtol=0, atol=1e-6), name


# Refusals


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--policy-versions", "v7, v8"], "stale"),
        (["--reward", "no_such_reward"], "no_reward"),
        (["--gold", os.devnull], "Name one (--reward): exact_match"),
    ],
)
def test_invalid_options_are_refused_with_a_hint(arguments, more, words) -> None:
    refusal = memagent(*arguments("--dry-run", *more), code=ExitCode.USAGE).stderr
    assert words in refusal and "what to do:" in refusal


def test_a_missing_extra_is_named(arguments, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "trl" else find(name, *more))
    assert make_install_command("train") in memagent(*arguments(), code=ExitCode.SETTINGS).stderr


# Killed trainings


PASSES = {"num_train_epochs": "3"}


def test_a_killed_training_goes_on_to_the_very_same_weights(arguments, world, tmp_path) -> None:
    out = tmp_path / "out"
    command_line = [sys.executable, "-m", "memagent_graph", *arguments(**PASSES)]
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

    # What a kill may leave of the newest checkpoint, whether or not it did so this time.
    newest = max(out.glob("checkpoint-*"), key=lambda folder: int(folder.name.removeprefix("checkpoint-")))
    (newest / recomputed_logprobs.FILE_NAME).unlink(missing_ok=True)
    for name, value in (("learning_rate", "0.5"), ("beta", "0.1")):
        refusal = memagent(*arguments("--resume", **PASSES, **{name: value}), code=ExitCode.USAGE).stderr
        assert f"{name} was" in refusal and "Resume with the same" in refusal

    lines = memagent(*arguments("--resume", **PASSES)).stderr
    assert f"passed over {newest}" in lines
    assert "continuing from" in lines
    memagent(*command(world, tmp_path / "whole", **PASSES, save_strategy="no"))
    undisturbed, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert not find_changes(undisturbed, after)


# Under accelerate


@pytest.mark.parametrize("path", sorted(ACCELERATE.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_knows_every_line_of_its_configurations(path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(path))
    options_of_launcher = vars(launch_command_parser().parse_args(["script"]))
    assert set(config.fsdp_config) | set(config.deepspeed_config) <= set(options_of_launcher)
    kinds = {"single": "NO", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}
    assert config.distributed_type.value == kinds[path.stem.partition("-")[0]]


def test_a_dry_run_under_accelerate_s_launcher_prints_the_plan(arguments, monkeypatch) -> None:
    from accelerate.commands import launch

    programs: list[Program] = []

    def begin(command: list[str], env: dict[str, str]) -> Program:
        environment = {**env, "PYTHONPATH": str(ROOT / "training")}
        programs.append(  # with what it needs imported already
            Program(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        return programs[-1]

    monkeypatch.setattr(launch.subprocess, "Popen", begin)
    options = ["--config_file", str(ACCELERATE / "single.yaml"), "-m", "memagent_graph"]
    launch.launch_command(launch.launch_command_parser().parse_args(options + arguments("--dry-run", "--json")))
    out, _ = programs[0].communicate()
    assert json.loads(out)["schedule"]["ranks"] == 1


def test_only_the_main_process_prints(arguments, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    result = memagent(*arguments("--dry-run"))
    assert result.stdout == "" and "error" not in result.stderr


def test_other_processes_report_a_failure_after_a_delay(monkeypatch) -> None:
    delays: list[float] = []
    monkeypatch.setattr(time, "sleep", delays.append)
    failing = ["train", "runs.sqlite", "--model", "model", "--gold", "nowhere.jsonl"]
    assert "cannot be read" in memagent(*failing, code=ExitCode.USAGE).stderr
    assert not delays
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "cannot be read" in memagent(*failing, code=ExitCode.USAGE).stderr
    assert delays == [training_process.FAILURE_DELAY_SECONDS]
