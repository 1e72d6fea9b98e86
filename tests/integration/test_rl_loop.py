"""A closed loop on a real vLLM server: through, and past the death of each part.

Four server starts in all: the first serves all loops but those that need one of their own.
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
    with VLLMServer(EMBEDDED_FOLDER, log_file=log_file, dev_mode=True) as running:
        yield running


def versions_of(out: Path) -> dict[str, set[str]]:
    """The weights that wrote each run."""
    log = RunLog(out / "runs.sqlite")
    return {
        record.run_id: {conversation.policy_version for conversation in log.conversations(record.run_id)}
        for record in log.runs()
    }


def assert_whole(out: Path, iterations: int = 3, gap: float = 1e-2) -> None:
    """Each iteration is in the journal once, each step was taken once, and no run was trained on twice.

    Args:
        out: the loop's folder, of one optimizer step an iteration.
        iterations: how many there should be.
        gap: the most that the server's log-probs may differ from the trainer's on average, in nats.
    """
    journal = LoopJournal(out / "journal.jsonl")
    assert [record.iteration for record in journal.records if record.is_enough] == list(range(iterations))
    assert [record.number for record in journal.records] == list(range(len(journal.records)))
    trained = Counter(run_id for record in journal.records if record.is_enough for run_id in record.group_of)
    assert set(trained.values()) == {1}
    assert trained.keys() <= versions_of(out).keys()
    newest = find_checkpoints(out).newest
    assert newest is not None
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == list(range(1, iterations + 1))
    assert all(entry["sampling/sampling_logp_difference/mean"] < gap for entry in history if "loss" in entry)


def test_a_loop_finishes_all_iterations(server, tmp_path) -> None:
    watcher = StatusRecorder()
    loop = run(
        make_job(tmp_path / "rl", base_url=server.base_url, measure_every=2, measure_lengths=(500,), measure_count=4),
        watcher,
    )
    assert (loop.steps, loop.policy) == (3, tmp_path / "rl")
    assert_whole(loop.policy)

    journal = LoopJournal(loop.policy / "journal.jsonl")
    assert {record.iteration: record.version for record in journal.records} == {0: 0, 1: 1, 2: 2}
    for run_id, versions in versions_of(loop.policy).items():
        assert versions == {f"iteration-{run_id.split('-')[1]}"}
    assert {path.name for path in loop.policy.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2, 3)}
    ways = [(measurement.iteration, measurement.as_deployed) for measurement in loop.measurements]
    assert ways == [
        (iteration, as_deployed) for iteration in (0, 2, 3) for as_deployed in (True, False)
    ]  # it has a guard
    assert all(
        set(measurement.accuracy) == {500} and measurement.accuracy[500].n == 4 for measurement in loop.measurements
    )
    assert loop.best is not None
    assert watcher.steps == [1, 2, 3]
    phases = [Phase.SYNC, Phase.MEASURE, Phase.COLLECT, Phase.TRAIN]
    assert [phase for iteration, phase in watcher.phases if iteration == 0] == phases
    assert watcher.reason == loop.reason == "all 3 iterations are done"

    finished, original = weights(loop.policy), weights(EMBEDDED_FOLDER)
    assert finished.keys() == original.keys()
    assert any((finished[name] != original[name]).any() for name in original)
    completion = asyncio.run(LocalPolicy(loop.policy).complete([700, 701], SamplingParams(max_tokens=2)))
    assert completion.usage.completion_tokens > 0


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def test_a_server_that_is_killed_while_it_reads_is_started_again(vllm_python, tmp_path) -> None:
    out = tmp_path / "rl"
    killed: list[int] = []
    others = set(children(os.getpid()))

    class Killer(StatusRecorder):
        def on_phase(self, iteration: int, phase: Phase) -> None:
            super().on_phase(iteration, phase)
            if (iteration, phase) == (1, Phase.COLLECT) and not killed:
                threading.Timer(0.3, lambda: killed.append(kill_server(others))).start()

    watcher = Killer()
    at_once = CollectSettings(rollouts=4, groups=4, max_questions=64, concurrency=32)
    loop = run(make_job(out, iterations=2, collect=at_once), watcher)
    assert killed
    assert loop.steps == 2
    assert_whole(out, 2)
    # A run that the server died under before its first reply, and that no group needed again, has no weights.
    weights_by_run = versions_of(out).items()
    odd = {run_id: versions for run_id, versions in weights_by_run if versions - {f"iteration-{run_id.split('-')[1]}"}}
    assert not odd
    log = (out / "server.log").read_text(errors="replace")
    assert log.count("ending the session") == 1
    assert log.count("Application startup complete") == 2


def kill_server(others: set[int]) -> int:
    """SIGKILL the process that answers requests: the child of the watchdog, which is a child of ours."""
    ours = set(children(os.getpid())) - others
    (watchdog,) = [pid for pid in ours if "session_watchdog" in Path(f"/proc/{pid}/cmdline").read_text()]
    (server,) = children(watchdog)
    os.kill(server, signal.SIGKILL)
    return server


def children(pid: int) -> list[int]:
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        pids += map(int, (task / "children").read_text().split())
    return pids


def loop_in_a_process(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, "-m", "support.rl_loops", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_two_processes_train_as_one_and_one_of_them_collects(server, tmp_path) -> None:
    out = tmp_path / "rl"
    launcher = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = loop_in_a_process(str(out), server.base_url, "never", "0", launcher=launcher)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.split("\n").count("all 3 iterations are done") == 2
    assert_whole(out)
    assert (out / "model.safetensors").is_file()


def test_a_loop_that_is_killed_while_it_reads_and_while_it_trains_goes_on(server, tmp_path) -> None:
    out = tmp_path / "rl"

    def process(kill: str, number: int) -> subprocess.CompletedProcess[str]:
        return loop_in_a_process(str(out), server.base_url, kill, str(number))

    first = process("collect", 2)
    assert first.returncode == -signal.SIGKILL, first.stderr[-3000:]
    log = RunLog(out / "runs.sqlite")
    before = {run.run_id: log.rewards(run.run_id) for run in log.runs()}
    assert not LoopJournal(out / "journal.jsonl").records

    second = process("step", 2)
    assert second.returncode == -signal.SIGKILL, second.stderr[-3000:]
    assert [record.iteration for record in LoopJournal(out / "journal.jsonl").records if record.is_enough] == [0, 1]
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-1"}
    # The kill may have come while a group's rewards were written: such a group is rewarded again.
    partial = {run_id.rpartition("-")[0] for run_id, rewards in before.items() if not rewards}
    whole = [run_id for run_id in before if run_id.rpartition("-")[0] not in partial]
    assert len(whole) >= 8
    assert {run_id: log.rewards(run_id) for run_id in whole} == {run_id: before[run_id] for run_id in whole}

    third = process("never", 0)
    assert third.returncode == 0, third.stderr[-3000:]
    assert third.stdout.strip() == "all 3 iterations are done"
    assert_whole(out)
    assert (out / "model.safetensors").is_file()


def test_rollouts_may_be_one_version_behind(server, tmp_path) -> None:
    a_step = 1.5  # nats on average over some seventy tokens: what one step at a rate of 1e-4 may change
    changes = SETTINGS | {"max_logprob_gap": a_step}
    job: RLJob = make_job(tmp_path / "rl", base_url=server.base_url, steps_behind=1, settings=changes)
    assert run(job).steps == 3
    assert_whole(job.out, gap=a_step)
    records = LoopJournal(job.out / "journal.jsonl").records
    versions = {record.iteration: record.version for record in records if record.is_enough}
    assert versions == {0: 0, 1: 0, 2: 1}
    for record in records:
        for run_id in record.group_of:
            assert versions_of(job.out)[run_id] == {f"iteration-{record.version}"}


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_trained_and_served_beside_the_version_before_or_merged_in_place(
    vllm_python, tmp_path, merged
) -> None:
    loop = run(make_job(tmp_path / "rl", iterations=2, lora_rank=4, serve_merged=merged))
    assert_whole(loop.policy, 2)
    log = (loop.policy / "server.log").read_text(errors="replace")
    assert log.count("Application startup complete") == 1
    assert set.union(*versions_of(loop.policy).values()) == {"iteration-0", "iteration-1"}
    version = loop.policy / "policies" / "1"
    assert (version / "model.safetensors").exists() == merged, "a version is its adapters alone, or all weights, too"
    assert (version / "adapter" / "adapter_model.safetensors").exists() or not merged
    finished, original = weights(loop.policy), weights(EMBEDDED_FOLDER)
    assert finished.keys() == original.keys()
    changed = {name for name in original if (finished[name] != original[name]).any()}
    assert changed and all("_proj.weight" in name for name in changed)
