"""Measure what SIGKILL costs a training loop, by comparing loops with and without kills.

    python -m benchmarks.rl_kills work/rl-kills     # continues where it was stopped

1. Some loops of the embedded policy run without kills, each with another seed. They show how much rewards differ by
   chance.
2. For each victim one more loop runs, in which the victim is killed repeatedly, at random moments:
   - server: the vLLM process that answers requests, in any phase; the loop has to notice by itself;
   - trainer: the loop's process while it trains; it is started again with resume=True;
   - collector: the loop's process while it reads questions; it is started again in the same way.
3. The journal, the run log and the newest checkpoint show which groups were trained on, and how often.

Loops run one after the other, each as a separate process with its own vLLM server.
`memagent_training.serving.vllm_server.find_vllm_python` finds vLLM's interpreter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, print_table
from memagent_graph.run_log import RunLog

if TYPE_CHECKING:
    from memagent_training.rl import RLJob

MAX_FAILURES = 3
"""The number of unexpected ends of one loop after which the benchmark stops."""
POLL_SECONDS = 0.02
SETTINGS = {"warmup_steps": 0, "token_budget": 8192, "gradient_checkpointing": False, "report_to": "none"}


class Victim(StrEnum):
    """The process that is killed."""

    SERVER = "server"
    TRAINER = "trainer"
    COLLECTOR = "collector"


PHASES = {Victim.SERVER: ("sync", "collect", "train"), Victim.TRAINER: ("train",), Victim.COLLECTOR: ("collect",)}
"""The phases in which each victim is killed."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment of a kill."""

    iteration: int
    """The iteration. If its phase ends before the moment, the kill is at the beginning of the next such phase."""
    phase: str
    share: float
    """The share of the phase's minimum duration that passes before the kill."""


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """The start of a phase."""

    pid: int
    time: float
    iteration: int
    phase: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a training loop."""

    rewards: tuple[float, ...]
    """The mean reward of each iteration's reads."""
    repeated_groups: int
    """The number of groups that were trained on more than once."""
    lost_groups: int
    """The number of groups with variance that no iteration used, and of groups that training missed."""
    iterations: int
    """The number of iterations in the journal that had enough groups."""
    trained_iterations: int
    """The number of iterations in the newest checkpoint's history."""
    kills: int
    seconds: float

    @property
    def final_reward(self) -> float:
        """The mean reward of the last third of the iterations."""
        return fmean(self.rewards[-math.ceil(len(self.rewards) / 3) :])


class Loop:
    """A training loop, and the folder with its output, starts of phases and kills."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, seed: int) -> None:
        self.folder = folder
        self.out = folder / "rl"
        self.seed = seed
        self._arguments = arguments

    @property
    def is_done(self) -> bool:
        """Whether the loop has ended."""
        return (self.folder / "seconds.json").exists()

    def load_phase_starts(self) -> list[PhaseStart]:
        """Return the starts of all phases so far."""
        return [PhaseStart(**record) for record in _read_records(self.folder / "events.jsonl")]

    def load_kills(self) -> list[dict[str, Any]]:
        """Return the records of all kills so far."""
        return list(_read_records(self.folder / "kills.jsonl"))

    def run(
        self, victim: Victim | None = None, moments: Sequence[Moment] = (), phase_seconds: Mapping[str, float] = {}
    ) -> None:
        """Run the loop to its end, kill the victim at the moments, and start the loop again after a kill.

        Raises:
            SystemExit: the loop ended unexpectedly too often.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        failures = 0
        while not self.is_done:
            process = self._start()
            is_killed = False
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                if victim is None or is_killed or (kill_count := len(self.load_kills())) >= len(moments):
                    continue
                phase_start = self._find_due_start(moments[kill_count], phase_seconds)
                if phase_start is not None and _kill(victim, phase_start.pid):
                    _append_record(
                        self.folder / "kills.jsonl", {**asdict(phase_start), "victim": victim, "time": time.time()}
                    )
                    moment_text = f"iteration {phase_start.iteration}, {phase_start.phase}"
                    print(f"{self.folder.name}: killed the {victim} in {moment_text}")
                    is_killed = victim is not Victim.SERVER
            if process.returncode and not is_killed:
                failures += 1
                if failures == MAX_FAILURES:
                    raise SystemExit(f"{self.folder} does not continue; see {self.folder / 'loop.log'}")

    def _start(self) -> subprocess.Popen[bytes]:
        from memagent_training.serving import session_watchdog

        loop_arguments = {
            key: value for key, value in vars(self._arguments).items() if key not in {"folder", "loop", "seed"}
        }
        options = [f"--{key.replace('_', '-')}={value}" for key, value in loop_arguments.items()]
        command = [sys.executable, "-m", "benchmarks.rl_kills", str(self._arguments.folder), *options]
        command += [f"--loop={self.folder.name}", f"--seed={self.seed}"]
        with (self.folder / "loop.log").open("ab") as log:
            return subprocess.Popen(  # the watchdog ends it when this process ends, also after SIGKILL
                [sys.executable, session_watchdog.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _find_due_start(self, moment: Moment, phase_seconds: Mapping[str, float]) -> PhaseStart | None:
        """Return the newest phase start if the moment to kill has come in this phase, otherwise None."""
        starts = self.load_phase_starts()
        if not starts or not Path(f"/proc/{starts[-1].pid}").exists():
            return None
        newest_start = starts[-1]
        is_due = newest_start.iteration >= moment.iteration and newest_start.phase == moment.phase
        wait_seconds = moment.share * phase_seconds[moment.phase] if newest_start.iteration == moment.iteration else 0
        return newest_start if is_due and time.time() - newest_start.time >= wait_seconds else None

    def compute_outcome(self, rollouts: int) -> Outcome:
        """Compute the outcome from journal, run log and checkpoint.

        Args:
            rollouts: the number of rollouts of a group.
        """
        from memagent_training.job.training_output import RECORD, find_checkpoints
        from memagent_training.rl.loop_journal import LoopJournal
        from memagent_training.rl.rl_job import JOURNAL, RUN_LOG

        records = LoopJournal(self.out / JOURNAL).records
        iterations = [record for record in records if record.is_enough]
        collected_groups = {group for record in iterations for group in record.group_of.values()}
        skipped_collections = {f"collection-{record.number}" for record in records if not record.is_enough}
        groups_with_variance = {
            group
            for group in _find_groups_with_variance(RunLog(self.out / RUN_LOG), rollouts)
            if group.rpartition("-")[0] not in skipped_collections
        }
        newest_checkpoint = find_checkpoints(self.out).newest
        history = (
            json.loads((newest_checkpoint / "trainer_state.json").read_text())["log_history"]
            if newest_checkpoint
            else []
        )
        settings = json.loads((self.out / RECORD).read_text())
        steps_per_iteration = -(-settings["loop"]["groups"] // settings["settings"]["groups_per_step"])
        trained_rollouts: Counter[int] = Counter()
        for step in (entry for entry in history if "loss" in entry):
            trained_rollouts[(step["step"] - 1) // steps_per_iteration] += step["rollouts"]
        groups = {record.iteration: record.groups for record in iterations}
        excess_groups = [
            trained_rollouts[iteration] / rollouts - group_count for iteration, group_count in groups.items()
        ]
        missing_groups = sum(max(-excess, 0) for excess in excess_groups)
        return Outcome(
            rewards=tuple(record.reward for record in iterations),
            repeated_groups=math.ceil(sum(max(excess, 0) for excess in excess_groups)),
            lost_groups=len(groups_with_variance - collected_groups) + math.ceil(missing_groups),
            iterations=len(groups),
            trained_iterations=len(trained_rollouts),
            kills=len(self.load_kills()),
            seconds=json.loads((self.folder / "seconds.json").read_text()),
        )


def _find_groups_with_variance(log: RunLog, rollouts: int) -> Iterator[str]:
    rewards: dict[str, list[float]] = {}
    for run_id, totals in log.totals(run.run_id for run in log.runs()).items():
        if "exact_match" in totals.rewards:
            rewards.setdefault(run_id.rpartition("-")[0], []).append(totals.rewards["exact_match"])
    for group, values in rewards.items():
        if len(values) == rollouts and not math.isclose(min(values), max(values)):
            yield group


def _kill(victim: Victim, loop_pid: int) -> bool:
    """Send SIGKILL to the victim; return False if it is not running at the moment.

    Args:
        victim: the process to kill.
        loop_pid: the id of the loop's process.
    """
    try:
        if victim is not Victim.SERVER:
            os.kill(loop_pid, signal.SIGKILL)
            return True
        watchdogs = [
            pid for pid in _list_children(loop_pid) if "session_watchdog" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        servers = [server for pid in watchdogs for server in _list_children(pid)]
        for server in servers:
            os.kill(server, signal.SIGKILL)
        return bool(servers)
    except OSError:  # the process has ended
        return False


def _list_children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines.

    A line that a killed process left incomplete is joined with the next one; both are skipped.
    """
    if path.exists():
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                yield json.loads(line)


def _append_record(path: Path, entry: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def make_job(out: Path, arguments: argparse.Namespace) -> RLJob:
    """Return the job of a loop with the options of the command line."""
    from memagent_training.job.collect import CollectSettings
    from memagent_training.rl import RLJob

    return RLJob(
        tasks=(arguments.task,),
        lengths=(arguments.length,),
        out=out,
        settings={**SETTINGS, "learning_rate": arguments.learning_rate},
        iterations=arguments.iterations,
        collect_settings=CollectSettings(
            arguments.rollouts, arguments.groups, max_questions=16 * arguments.groups, concurrency=64
        ),
        measure_every=0,
        small=True,
        seed=arguments.seed,
        resume=True,
    )


def run_loop(folder: Path, arguments: argparse.Namespace) -> None:
    """Run a loop, and record its phases and its duration; it is the main function of a loop's process."""
    from memagent_training.rl import run
    from memagent_training.rl.loop_status import LoopStatus, Phase

    class PhaseRecorder(LoopStatus):
        def on_phase(self, iteration: int, phase: Phase) -> None:
            super().on_phase(iteration, phase)
            record_start(iteration, phase.value)

        def on_end(self, reason: str) -> None:
            record_start(arguments.iterations, "end")

    def record_start(iteration: int, phase: str) -> None:
        _append_record(folder / "events.jsonl", asdict(PhaseStart(os.getpid(), time.time(), iteration, phase)))

    run(make_job(folder / "rl", arguments), PhaseRecorder(arguments.iterations, quiet=True))
    times = [PhaseStart(**record).time for record in _read_records(folder / "events.jsonl")]
    (folder / "seconds.json").write_text(json.dumps(time.time() - times[0]))


def find_minimum_seconds(loops: Sequence[Loop]) -> dict[str, float]:
    """Return the minimum duration of each phase in loops without kills.

    The first iteration does not count, because it begins with a start of the server.
    """
    seconds: dict[str, float] = {}
    for loop in loops:
        for start, next_start in pairwise(loop.load_phase_starts()):
            if start.pid == next_start.pid and start.iteration > 0:
                seconds[start.phase] = min(next_start.time - start.time, seconds.get(start.phase, math.inf))
    return seconds


def choose_moments(victim: Victim, arguments: argparse.Namespace) -> list[Moment]:
    """Return the moments of the kills; equal arguments give equal moments.

    They are spread over all iterations but the first and the last.
    """
    candidates = range(1, max(arguments.iterations - 1, 2))
    rng = random.Random(f"{victim} {arguments.kills} {arguments.iterations}")
    iterations: list[int] = []
    while len(iterations) < arguments.kills:
        missing_count = arguments.kills - len(iterations)
        iterations += rng.sample(candidates, min(missing_count, len(candidates)))
    return [Moment(iteration, rng.choice(PHASES[victim]), rng.uniform(0, 0.9)) for iteration in sorted(iterations)]


def run_all(arguments: argparse.Namespace) -> list[Figure]:
    """Run or continue all loops, and return their figures."""
    baselines = [Loop(arguments.folder / f"undisturbed-{seed}", arguments, seed) for seed in range(arguments.seeds)]
    for loop in baselines:
        loop.run()
    phase_seconds = find_minimum_seconds(baselines)
    print("seconds of a phase at least: " + ", ".join(f"{name} {value:.1f}" for name, value in phase_seconds.items()))
    killed_loops = {victim: Loop(arguments.folder / victim.value, arguments, 0) for victim in Victim}
    for victim, loop in killed_loops.items():
        loop.run(victim, choose_moments(victim, arguments), phase_seconds)
    outcomes = {
        loop.folder.name: loop.compute_outcome(arguments.rollouts) for loop in (*baselines, *killed_loops.values())
    }
    for name, outcome in outcomes.items():
        curve = " ".join(f"{reward:.3f}" for reward in outcome.rewards)
        print(f"{name}: rewards {curve}; {outcome.kills} kills, {outcome.seconds:.0f} s")
    final_rewards = [outcomes[loop.folder.name].final_reward for loop in baselines]
    return [figure for victim in Victim for figure in make_figures(victim, outcomes[victim], final_rewards, arguments)]


def make_figures(
    victim: Victim, outcome: Outcome, final_rewards: Sequence[float], arguments: argparse.Namespace
) -> Iterator[Figure]:
    counts = {
        "kills": (outcome.kills, arguments.kills),
        "groups trained twice": (outcome.repeated_groups, 0),
        "groups lost": (outcome.lost_groups, 0),
        "iterations in the journal": (outcome.iterations, arguments.iterations),
        "iterations trained": (outcome.trained_iterations, arguments.iterations),
    }
    for name, (value, goal) in counts.items():
        yield Figure.exactly(f"{victim}: {name}", value, goal)
    min_reward, max_reward = compute_prediction_interval(final_rewards)
    reward_goal = f"{min_reward:.3f} to {max_reward:.3f}" if len(final_rewards) > 1 else ""
    is_met = min_reward <= outcome.final_reward <= max_reward
    yield Figure(f"{victim}: final reward", outcome.final_reward, "", reward_goal, is_met)


def compute_prediction_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % prediction interval (Student's t) for another value, within 0 and 1.

    The range from the lowest to the highest value would be too strict: with few values, another is often outside.
    """
    if len(values) < 2:
        return 0.0, 1.0
    from scipy.stats import t

    half_width = float(t.ppf(0.975, len(values) - 1)) * stdev(values) * math.sqrt(1 + 1 / len(values))
    return max(fmean(values) - half_width, 0.0), min(fmean(values) + half_width, 1.0)


def main() -> None:
    """Run all loops and print their figures, or run the loop that `--loop` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder for the loops")
    parser.add_argument("--kills", type=int, default=5, help="kills of each victim")
    parser.add_argument("--seeds", type=int, default=3, help="loops without kills")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--groups", type=int, default=8, help="groups of an iteration")
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--task", default="niah_multikey_2")
    parser.add_argument("--length", type=int, default=500, help="tokens of document, question and answer")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.iterations < 2 or arguments.seeds < 1:
        parser.error("give 2 iterations or more, and 1 seed or more")
    if arguments.loop:
        run_loop(arguments.folder / arguments.loop, arguments)
    else:
        print_table(run_all(arguments))


if __name__ == "__main__":
    main()
