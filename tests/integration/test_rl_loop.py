"""A closed loop on a real vLLM server, undisturbed and with kills of each process.

Needs four server starts; most loops share the first server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_server import HELLO
from support.rl_loops import SETTINGS, StatusRecorder, make_job

from memagent_graph import LocalPolicy, RunLog, SamplingParams
from memagent_graph.policies.profile import EMBEDDED_FOLDER
from memagent_training.job.collect import CollectSettings
from memagent_training.job.training_output import find_checkpoints
from memagent_training.rl import RLJob, run
from memagent_training.rl.loop_journal import LoopJournal
from memagent_training.rl.loop_status import Phase
from memagent_training.serving.vllm_server import VLLMServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    log_file = tmp_path_factory.mktemp("vllm") / "server.log"
    with VLLMServer(EMBEDDED_FOLDER, log_file=log_file, dev_mode=True) as server:
        yield server


def find_versions(out: Path) -> dict[str, set[str]]:
    """Return by run the policy versions of its conversations."""
    log = RunLog(out / "runs.sqlite")
    return {
        record.run_id: {conversation.policy_version for conversation in log.conversations(record.run_id)}
        for record in log.runs()
    }


def check_versions(out: Path) -> None:
    """Check that each run has the version of its collection; an iteration with too few groups has several of them."""
    records = LoopJournal(out / "journal.jsonl").records
    for run_id, versions in find_versions(out).items():
        # A run without a reply before a kill, which no group needed afterwards, has no version.
        assert versions <= {f"iteration-{records[int(run_id.split('-')[1])].version}"}, run_id


def check_loop(out: Path, iterations: int = 3, gap: float = 1e-2) -> None:
    """Check that each iteration is in the journal once, each step was taken once, and each run trained on once.

    Args:
        out: the folder of a loop with one optimizer step per iteration.
        iterations: the expected number of iterations.
        gap: the largest allowed mean difference between log-probs of server and trainer, in nats.
    """
    journal = LoopJournal(out / "journal.jsonl")
    assert [record.iteration for record in journal.records if record.is_enough] == list(range(iterations))
    assert [record.number for record in journal.records] == list(range(len(journal.records)))
    trained = Counter(run_id for record in journal.records if record.is_enough for run_id in record.group_of)
    assert set(trained.values()) == {1}
    versions_by_run = find_versions(out)
    assert all(versions_by_run[run_id] for run_id in trained)
    newest = find_checkpoints(out).newest
    assert newest is not None
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == list(range(1, iterations + 1))
    assert all(entry["sampling/sampling_logp_difference/mean"] < gap for entry in history if "loss" in entry)


def test_a_loop_finishes_all_iterations(server, tmp_path) -> None:
    recorder = StatusRecorder()
    measure_options = {"measure_every": 2, "measure_lengths": (500,), "measure_count": 4}
    loop = run(make_job(tmp_path / "rl", base_url=server.base_url, **measure_options), recorder)
    assert (loop.steps, loop.policy) == (3, tmp_path / "rl")
    check_loop(loop.policy)

    journal = LoopJournal(loop.policy / "journal.jsonl")
    assert {record.iteration: record.version for record in journal.records} == {0: 0, 1: 1, 2: 2}
    check_versions(loop.policy)
    assert {path.name for path in loop.policy.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2, 3)}
    ways = [(measurement.iteration, measurement.as_deployed) for measurement in loop.measurements]
    assert ways == [
        (iteration, as_deployed) for iteration in (0, 2, 3) for as_deployed in (True, False)
    ]  # it has a guard
    assert all(
        set(measurement.accuracy) == {500} and measurement.accuracy[500].n == 4 for measurement in loop.measurements
    )
    assert loop.best is not None
    assert recorder.steps == [1, 2, 3]
    phases = [Phase.SYNC, Phase.MEASURE, Phase.COLLECT, Phase.TRAIN]
    assert [phase for iteration, phase in recorder.phases if iteration == 0] == phases
    assert recorder.reason == loop.reason == "all 3 iterations are done"

    finished, original = load_weights(loop.policy), load_weights(EMBEDDED_FOLDER)
    assert finished.keys() == original.keys()
    assert any((finished[name] != original[name]).any() for name in original)
    completion = asyncio.run(LocalPolicy(loop.policy).complete(HELLO, SamplingParams(max_tokens=2)))
    assert completion.usage.completion_tokens > 0


def load_weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def test_a_server_killed_during_a_collection_is_restarted(vllm_python, tmp_path) -> None:
    out = tmp_path / "rl"
    killed_pids: list[int] = []
    other_pids = set(list_children(os.getpid()))

    class KillServer(StatusRecorder):
        def on_phase(self, iteration: int, phase: Phase) -> None:
            super().on_phase(iteration, phase)
            if (iteration, phase) == (1, Phase.COLLECT) and not killed_pids:
                threading.Timer(0.3, lambda: killed_pids.append(kill_server(other_pids))).start()

    collect_settings = CollectSettings(rollouts=4, groups=4, max_questions=64, concurrency=32)
    loop = run(make_job(out, iterations=2, collect_settings=collect_settings), KillServer())
    assert killed_pids
    assert loop.steps == 2
    check_loop(out, 2)
    check_versions(out)
    log = (out / "server.log").read_text(errors="replace")
    assert log.count("ending the session") == 1
    assert log.count("Application startup complete") == 2


def kill_server(other_pids: set[int]) -> int:
    """Kill the process that answers requests: the child of the watchdog, which is a child of this process."""
    pids = set(list_children(os.getpid())) - other_pids
    (watchdog,) = [pid for pid in pids if "session_watchdog" in Path(f"/proc/{pid}/cmdline").read_text()]
    (server,) = list_children(watchdog)
    os.kill(server, signal.SIGKILL)
    return server


def list_children(pid: int) -> list[int]:
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        pids += map(int, (task / "children").read_text().split())
    return pids


def run_loop_process(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, "-m", "support.rl_loops", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_two_processes_train_as_one_and_one_of_them_collects(server, tmp_path) -> None:
    out = tmp_path / "rl"
    launcher = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = run_loop_process(str(out), server.base_url, "never", "0", launcher=launcher)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]
    assert process.stdout.split("\n").count("all 3 iterations are done") == 2
    check_loop(out)
    assert (out / "model.safetensors").is_file()


def test_a_loop_killed_during_a_collection_and_during_a_step_continues(server, tmp_path) -> None:
    out = tmp_path / "rl"

    def run_loop(kill: str, number: int) -> subprocess.CompletedProcess[str]:
        return run_loop_process(str(out), server.base_url, kill, str(number))

    process = run_loop("collect", 2)
    assert process.returncode == -signal.SIGKILL, process.stderr[-3000:]
    log = RunLog(out / "runs.sqlite")
    first_rewards = {run.run_id: log.rewards(run.run_id) for run in log.runs()}
    assert not LoopJournal(out / "journal.jsonl").records

    process = run_loop("step", 2)
    assert process.returncode == -signal.SIGKILL, process.stderr[-3000:]
    assert [record.iteration for record in LoopJournal(out / "journal.jsonl").records if record.is_enough] == [0, 1]
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-1"}
    # A group whose rewards were being written at the kill is rewarded again.
    partial_groups = {run_id.rpartition("-")[0] for run_id, rewards in first_rewards.items() if not rewards}
    run_ids = [run_id for run_id in first_rewards if run_id.rpartition("-")[0] not in partial_groups]
    assert len(run_ids) >= 8
    assert all(log.rewards(run_id) == first_rewards[run_id] for run_id in run_ids)

    process = run_loop("never", 0)
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.strip() == "all 3 iterations are done"
    check_loop(out)
    assert (out / "model.safetensors").is_file()


def test_rollouts_may_be_one_version_behind(server, tmp_path) -> None:
    step_gap = 1.5  # the mean change of log-probs, in nats, that one step at a learning rate of 1e-4 may cause
    changes = SETTINGS | {"max_logprob_gap": step_gap}
    job: RLJob = make_job(tmp_path / "rl", base_url=server.base_url, steps_behind=1, settings=changes)
    assert run(job).steps == 3
    check_loop(job.out, gap=step_gap)
    records = LoopJournal(job.out / "journal.jsonl").records
    versions = {record.iteration: record.version for record in records if record.is_enough}
    assert versions == {0: 0, 1: 0, 2: 1}
    check_versions(job.out)


@pytest.mark.parametrize("is_merged", [False, True])
def test_adapters_are_trained_and_served_beside_the_base_or_merged_into_it(vllm_python, tmp_path, is_merged) -> None:
    loop = run(make_job(tmp_path / "rl", iterations=2, lora_rank=4, serve_merged=is_merged))
    check_loop(loop.policy, 2)
    log = (loop.policy / "server.log").read_text(errors="replace")
    assert log.count("Application startup complete") == 1
    assert set.union(*find_versions(loop.policy).values()) == {"iteration-0", "iteration-1"}
    version = loop.policy / "policies" / "1"
    assert (version / "model.safetensors").exists() == is_merged, "a version has only its adapter, or also all weights"
    assert (version / "adapter" / "adapter_model.safetensors").exists() or not is_merged
    finished, original = load_weights(loop.policy), load_weights(EMBEDDED_FOLDER)
    assert finished.keys() == original.keys()
    changed_names = {name for name in original if (finished[name] != original[name]).any()}
    assert changed_names and all("_proj.weight" in name for name in changed_names)
