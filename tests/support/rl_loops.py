"""The settings of small closed loops, and a program that runs one in its own process.

    python -m support.rl_loops OUT BASE_URL KILL NUMBER

starts or continues a loop in OUT. KILL says when it kills itself: "collect", in the first collection, once NUMBER
groups have all rewards; "step", after optimizer step NUMBER and before its checkpoint is saved; or "never".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from memagent_evaluation.score_statistics import Estimate
from memagent_graph import RunLog
from memagent_training.data.training_runs import TrainingRun
from memagent_training.job.collect import CollectSettings
from memagent_training.rewards.outcome_rewards import ExactMatch
from memagent_training.rl import RLJob, run
from memagent_training.rl.loop_journal import CollectionRecord, MeanReward, Measurement
from memagent_training.rl.loop_status import LoopStatus, Phase
from memagent_training.rl.rl_job import RUN_LOG

SETTINGS = {
    "learning_rate": 1e-4,
    "warmup_steps": 0,
    "token_budget": 8192,
    "gradient_checkpointing": False,
    "report_to": "none",
}


def make_job(out: Path, **changes: Any) -> RLJob:
    """Return a job of the embedded policy on a task that it solves sometimes: 4 groups of 4 rollouts per iteration."""
    values: dict[str, Any] = {
        "tasks": ("niah_multikey_2",),
        "lengths": (500,),
        "iterations": 3,
        "settings": SETTINGS,
        "collect_settings": CollectSettings(rollouts=4, groups=4, max_questions=64, concurrency=32),
        "measure_every": 0,
        "small": True,
    }
    return RLJob(out=out, **(values | changes))


def make_record(number: int = 0, **changes: Any) -> CollectionRecord:
    """Return a journal record of one collection."""
    values: dict[str, Any] = {
        "number": number,
        "iteration": number,
        "is_enough": True,
        "version": number,
        "stage": 0,
        "questions": 4,
        "group_of": {f"collection-{number}-0-{place}": f"collection-{number}-0" for place in range(2)},
        "by_length": {500: MeanReward(0.5, 8)},
        "by_task": {"niah_multikey_2": MeanReward(0.5, 8)},
        "solved_groups": 1,
        "uniform_groups": 2,
        "failed_groups": 0,
        "prompt_tokens": 1000,
        "cached_tokens": 100,
        "completion_tokens": 50,
        "turns": 20,
        "seconds": 1.5,
    }
    return CollectionRecord(**(values | changes))


def make_measurement(iteration: int = 0, mean: float = 0.5, **changes: Any) -> Measurement:
    """Return a measurement of the accuracy after an iteration."""
    values: dict[str, Any] = {
        "iteration": iteration,
        "temperature": 0.0,
        "accuracy": {500: Estimate(mean=mean, low=0.2, high=0.8, n=8)},
        "failed": 0,
        "seconds": 2.0,
    }
    return Measurement(**(values | changes))


class StatusRecorder(LoopStatus):
    """Records the reports of the loop."""

    def __init__(self) -> None:
        super().__init__(1, quiet=True)
        self.phases: list[tuple[int, Phase]] = []
        self.steps: list[int] = []
        self.reason = ""

    def on_phase(self, iteration: int, phase: Phase) -> None:
        super().on_phase(iteration, phase)
        self.phases.append((iteration, phase))

    def on_step(self, step: int, metrics: Any) -> None:
        self.steps.append(step)

    def on_end(self, reason: str) -> None:
        self.reason = reason


class _KillAfterStep(StatusRecorder):
    """Kills its process after a step, before the checkpoint is saved."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_step(self, step: int, metrics: Any) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the command of the module's docstring."""
    out, base_url, kill, number = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])

    def reward(run: TrainingRun) -> float | None:
        """Score a run; the first run after NUMBER groups waits for all their rewards, then kills the process."""
        if kill == "collect" and int(run.run_id.split("-")[-2]) == number:
            while any(not has_all_rewards(out, f"collection-0-{place}") for place in range(number)):
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        return ExactMatch()(run)

    job = make_job(out, base_url=base_url, reward=reward, resume=True)
    reason = run(job, _KillAfterStep(number) if kill == "step" else None).reason
    # One write: torchrun's processes share an unbuffered pipe, and print() writes the newline separately.
    sys.stdout.write(f"{reason}\n")


def has_all_rewards(out: Path, group: str) -> bool:
    """Return whether all rewards of a group of four are logged."""
    totals = RunLog(out / RUN_LOG).totals(f"{group}-{place}" for place in range(4))
    return all(total.rewards for total in totals.values())


if __name__ == "__main__":
    main()
