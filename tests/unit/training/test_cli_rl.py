"""`memagent rl` as a user calls it: options that reach the job, refusals, output and exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from support import command_line

from memagent_evaluation.score_statistics import compute_wilson_interval
from memagent_graph.cli.exit_codes import ExitCode
from memagent_graph.errors import PolicyUnreachableError
from memagent_graph.settings import WordingSettings
from memagent_training import rl
from memagent_training.commands import rl_command
from memagent_training.job.collect import CollectSettings
from memagent_training.rl.collector import CollapsedError
from memagent_training.rl.loop_journal import Measurement
from memagent_training.rl.rl_job import BEST, JOURNAL, RLJob, prepare
from memagent_training.serving.vllm_server import VLLMNotInstalledError, VLLMServerError
from memagent_training.training_errors import TrainingError

ROOT = Path(__file__).parents[3]
REQUIRED_OPTIONS = ["--task", "niah_single_1", "--lengths", "500"]
MEASUREMENT = Measurement(2, 0.0, {500: compute_wilson_interval(3, 8), 2000: compute_wilson_interval(1, 8)}, 1, 12.5)


class FakeLoop:
    """Replaces the loop: records its arguments, and returns a result or raises an error."""

    def __init__(self) -> None:
        self.job: RLJob | None = None
        self.watcher: Any = None
        self.best: Path | None = None
        self.error: BaseException | None = None

    def __call__(self, job: RLJob, watcher: Any = None) -> rl.LoopResult:
        self.job, self.watcher = job, watcher
        print("what a library prints")
        logging.getLogger("httpx").info("HTTP Request: POST")
        if self.error is not None:
            raise self.error
        return rl.LoopResult(job.out, 12, "all 3 iterations are done", (MEASUREMENT,), self.best)


@pytest.fixture
def loop(monkeypatch, tmp_path) -> FakeLoop:
    fake_loop = FakeLoop()
    monkeypatch.setattr(rl, "run", fake_loop)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return fake_loop


def run_rl(*arguments: str, exit_code: int = 0, with_required: bool = True) -> Any:
    return command_line.memagent("rl", *(REQUIRED_OPTIONS if with_required else ()), *arguments, code=exit_code)


# Options


def test_options_default_to_those_of_the_job(loop) -> None:
    run_rl()
    assert loop.job == RLJob(tasks=("niah_single_1",), lengths=(500,), out=Path("rl-policy"))


def test_every_option_sets_its_job_field(loop, tmp_path) -> None:
    run_rl(
        *("--task", "niah_multikey_2", "--task", "vt", "--task", "vt", "--lengths", "500, 1k,2000"),
        *("--model", "a/model"),
        *("--out", "somewhere", "--preset", "memagent-paper", "--set", "beta=0.5", "--set", "report_to=none"),
        *("--iterations", "7", "--rollouts", "4", "--groups", "5", "--max-questions", "33", "--concurrency", "12"),
        *("--temperature", "0.9", "--reward", "token_f1", "--steps-behind", "1"),
        *("--advance-at", "0.7", "--measure-every", "3", "--measure-lengths", "4k", "--measure-count", "9"),
        *("--measure-temperatures", "0,1", "--small", "--haystack", "hay", "--seed", "11", "--sync-tolerance", "0.5"),
        *("--base-url", "http://server/v1", "--api-key", "secret", "--lora", "8", "--serve-merged", "--resume"),
        *("--profile", "embedded", "--layout", "section_first", "--answer-format", "plain", "--empty-memory", "none"),
        *("--update-template", "u.txt", "--answer-template", "a.txt", "--context-window", "900", "--chunk-tokens", "5"),
        *("--question-tokens", "6", "--memory-tokens", "7", "--answer-tokens", "8", "--boundary", "sentence"),
        *("--strategy", "ours.py:Ours", "--engine", "vllm", "--data", "mine.csv", "--held-out", "0.2"),
        *("--server-option", "--max-model-len 4096", "--server-option=--dtype='float 32'", "--server-timeout", "30"),
        with_required=False,
    )
    assert loop.job == RLJob(
        tasks=("niah_multikey_2", "vt"), lengths=(500, 1024, 2000), out=Path("somewhere"), model="a/model",
        preset="memagent-paper", settings={"beta": 0.5, "report_to": "none"}, iterations=7,
        collect_settings=CollectSettings(rollouts=4, groups=5, max_questions=33, concurrency=12), temperature=0.9,
        reward="token_f1", steps_behind=1, advance_at=0.7,
        measure_every=3, measure_lengths=(4096,), measure_count=9, measure_temperatures=(0.0, 1.0), small=True,
        haystack=Path("hay"), seed=11, base_url="http://server/v1", api_key="secret",
        server_options=("--max-model-len", "4096", "--dtype=float 32"), server_timeout=30.0, sync_tolerance=0.5,
        lora_rank=8, serve_merged=True, resume=True, strategy="ours.py:Ours", data=Path("mine.csv"), held_out=0.2,
        reading=WordingSettings(
            profile="embedded", layout="section_first", answer_format="plain", empty_memory="none",
            update_template="u.txt", answer_template="a.txt", context_window=900, chunk_tokens=5, question_tokens=6,
            memory_tokens=7, answer_tokens=8, boundary="sentence",
        ),
    )  # fmt: skip


def test_every_job_field_has_a_command_line_option(loop) -> None:
    fields = [field for kind in (RLJob, CollectSettings, WordingSettings) for field in dataclasses.fields(kind)]
    options = {field.name for field in dataclasses.fields(rl_command.RL)}
    option_names = {"tasks": "task", "server_options": "server_option"}
    nested_fields = {"collect_settings", "reading"}
    assert {option_names.get(name, name) for name in {field.name for field in fields} - nested_fields} <= options


def test_environment_key_is_used_only_with_a_base_url(loop, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    run_rl()
    assert loop.job.api_key is None
    run_rl("--base-url", "http://server/v1")
    assert loop.job.api_key == "of the environment"


# Progress and output


def test_progress_goes_to_stderr_unless_quiet(loop, monkeypatch) -> None:
    def measure(job: RLJob, watcher: Any) -> rl.LoopResult:
        watcher.on_measurement(MEASUREMENT)
        return loop(job, watcher)

    monkeypatch.setattr(rl, "run", measure)
    result = run_rl()
    assert "accuracy after 2 iterations" in result.stderr and result.stdout == "rl-policy\n"
    result = run_rl("--quiet", "--strategy", "gated:stop=yes")
    assert "accuracy" not in result.stderr and "--model rl-policy --strategy gated:stop=yes\n" in result.stderr


def test_only_the_main_process_prints(loop, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    result = run_rl()
    loop.watcher.on_measurement(MEASUREMENT)
    assert result.stdout == "" and "policy" not in result.stderr


def test_library_output_does_not_reach_stdout(loop) -> None:
    with contextlib.ExitStack() as stack:
        handler = logging.StreamHandler(sys.stderr)
        logging.getLogger().addHandler(handler)
        stack.callback(logging.getLogger().removeHandler, handler)
        logging.getLogger("httpx").setLevel(logging.INFO)
        stack.callback(logging.getLogger("httpx").setLevel, logging.NOTSET)
        result = run_rl()
        assert logging.getLogger("httpx").level == logging.INFO, "as it was before"
    assert result.stdout == "rl-policy\n"
    assert "what a library prints" in result.stderr
    assert "HTTP Request" not in result.stderr


def test_library_progress_bars_and_warnings_are_off_during_the_loop(loop, monkeypatch) -> None:
    import transformers.utils.logging as transformers_log

    bar_states: list[bool] = []

    def warn(job: RLJob, watcher: Any) -> rl.LoopResult:
        bar_states.append(transformers_log.is_progress_bar_enabled())
        for module in ("transformers.trainer", "trl.trainer.utils", "my_code"):
            warnings.warn_explicit(f"from {module}", FutureWarning, "file.py", 1, module=module)
        return loop(job, watcher)

    monkeypatch.setattr(rl, "run", warn)
    transformers_log.enable_progress_bar()
    with pytest.warns(FutureWarning) as own_warnings:
        run_rl()
    assert [str(warning.message) for warning in own_warnings] == ["from my_code"]
    assert bar_states == [False] and transformers_log.is_progress_bar_enabled()


# Results and errors


def test_finished_loop_prints_the_policy_and_the_next_command(loop) -> None:
    loop.best = Path("rl-policy/best")
    result = run_rl()
    assert result.stdout == "rl-policy\n"
    assert "all 3 iterations are done; trained for 12 steps" in result.stderr
    assert "measured best is in rl-policy/best" in result.stderr and "memagent read" in result.stderr


@pytest.mark.parametrize("best", [None, Path("rl-policy/best")])
def test_json_output_is_one_object(loop, best) -> None:
    loop.best = best
    result = json.loads(run_rl("--json").stdout)
    assert result.keys() == {"policy", "steps", "reason", "best", "measurements"}
    assert (result["policy"], result["steps"], result["reason"]) == ("rl-policy", 12, "all 3 iterations are done")
    assert result["best"] == (None if best is None else str(best))
    [measurement] = result["measurements"]
    assert measurement["accuracy"]["2000"]["mean"] == 0.125 and measurement["mean"] == 0.25
    assert (measurement["iteration"], measurement["temperature"], measurement["failed"]) == (2, 0.0, 1)


def test_interrupt_names_the_option_that_resumes(loop) -> None:
    loop.error = KeyboardInterrupt()
    stderr = run_rl("--out", "mine", exit_code=ExitCode.INTERRUPTED).stderr
    assert "interrupted" in stderr and "mine" in stderr and "--resume" in stderr


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (TrainingError("no", hint="do"), ExitCode.USAGE),
        (CollapsedError("the policy collapsed", hint="do"), ExitCode.COLLAPSED),
        (VLLMNotInstalledError("vLLM is not installed here", hint="do"), ExitCode.SETTINGS),
        (VLLMServerError("the vLLM server ended while starting", hint="do"), ExitCode.POLICY),
        (PolicyUnreachableError("nobody answers", hint="do"), ExitCode.POLICY),
    ],
)
def test_error_is_printed_and_sets_its_exit_code(loop, error, exit_code) -> None:
    loop.error = error
    result = run_rl(exit_code=exit_code)
    assert error.message in result.stderr and "what to do:" in result.stderr and result.stdout == ""
    assert json.loads(run_rl("--json", exit_code=exit_code).stdout)["error"]["type"] == type(error).__name__


@pytest.mark.parametrize(
    ("error", "exit_code", "file_name", "message"),
    [
        (CollapsedError("the policy collapsed"), ExitCode.COLLAPSED, BEST, f"--model rl-policy/{BEST}"),
        (PolicyUnreachableError("nobody answers"), ExitCode.POLICY, JOURNAL, "--resume"),
    ],
)
def test_error_names_the_best_policy_or_resume_if_available(loop, error, exit_code, file_name, message) -> None:
    loop.error = error
    assert message not in run_rl(exit_code=exit_code).stderr
    Path("rl-policy", file_name).mkdir(parents=True)
    assert message in run_rl(exit_code=exit_code).stderr


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rollouts", "1"], "--rollouts"),
        (["--steps-behind", "2"], "--steps-behind"),
        (["--learning-rate", "1"], "--learning-rate"),
        (["--groups", "100"], "--max-questions"),
        (["--measure-temperatures", "hot"], "--measure-temperatures 0,1"),
        (["--measure-temperatures", "inf"], "--measure-temperatures 0,1"),
        (["--server-option", "'open"], "--server-option"),
        (["--set", "output_dir=elsewhere"], "--out"),
        (["--reward", "judging.py:short"], "judging.py"),
    ],
)
def test_invalid_values_are_refused_with_a_hint(loop, options, message) -> None:
    result = run_rl(*options, exit_code=ExitCode.USAGE)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert loop.job is None


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        (["--lengths", "long"], ExitCode.SETTINGS, "500,8k"),
        (["--lengths", "1000,500"], ExitCode.USAGE, "--lengths that grow"),
        (["--set", "temperature=2"], ExitCode.USAGE, "memagent rl --help"),
    ],
)
def test_invalid_loop_is_refused_before_its_folder_is_created(loop, monkeypatch, options, exit_code, message) -> None:
    monkeypatch.setattr(rl, "run", lambda job, watcher: prepare(job))
    refusal = run_rl(*options, exit_code=exit_code).stderr
    assert message in refusal and "what to do:" in refusal
    assert not Path("rl-policy").exists()


def test_task_with_lengths_or_data_is_required(loop, monkeypatch) -> None:
    monkeypatch.setattr(rl, "run", lambda job, watcher: prepare(job))
    for options in (["--lengths", "500"], ["--task", "vt"], []):
        refusal = run_rl(*options, with_required=False, exit_code=ExitCode.USAGE).stderr
        assert "--task" in refusal and "--lengths" in refusal and "--data" in refusal
    run_rl("--data", "none.jsonl", with_required=False, exit_code=ExitCode.SETTINGS)
