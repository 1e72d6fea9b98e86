"""Small closed loops: their settings, and a process of its own for one.

    python -m support.rl_loops OUT BASE_URL KILL NUMBER

begins a loop in OUT or goes on with it, and kills itself. KILL is "collect": in the first collection, once NUMBER
groups are whole; "step": before the checkpoint of that step is there; or "never".
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


def small_job(out: Path, **changes: Any) -> RLJob:
    """The embedded policy on a task that it gets right now and then, 4 groups of 4 rollouts an iteration."""
    values: dict[str, Any] = {
        "tasks": ("niah_multikey_2",),
        "lengths": (500,),
        "iterations": 3,
        "settings": SETTINGS,
        "collect": CollectSettings(rollouts=4, groups=4, max_questions=64, concurrency=32),
        "measure_every": 0,
        "small": True,
    }
    return RLJob(out=out, **(values | changes))


def record(number: int = 0, **changes: Any) -> CollectionRecord:
    """What a collection came to."""
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


def measurement(iteration: int = 0, mean: float = 0.5, **changes: Any) -> Measurement:
    """How right questions were answered."""
    values: dict[str, Any] = {
        "iteration": iteration,
        "temperature": 0.0,
        "accuracy": {500: Estimate(mean=mean, low=0.2, high=0.8, n=8)},
        "failed": 0,
        "seconds": 2.0,
    }
    return Measurement(**(values | changes))


class Recorder(LoopStatus):
    """Keeps what the loop reports."""

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


class _Fatal(Recorder):
    """Kills its process when a step has been taken and its checkpoint is not yet there."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_step(self, step: int, metrics: Any) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """See above."""
    out, base_url, kill, number = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])

    def reward(run: TrainingRun) -> float | None:
        """Of the question after those that are to be whole, it does not come before they are."""
        if kill == "collect" and int(run.run_id.split("-")[-2]) == number:
            while any(not is_whole(out, f"collection-0-{place}") for place in range(number)):
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        return ExactMatch()(run)

    job = small_job(out, base_url=base_url, reward=reward, resume=True)
    reason = run(job, _Fatal(number) if kill == "step" else None).reason
    # In one piece: torchrun's processes share a pipe and are unbuffered, and print() writes the newline on its own.
    sys.stdout.write(f"{reason}\n")


def is_whole(out: Path, group: str) -> bool:
    """Whether all rewards of a group of four are logged."""
    totals = RunLog(out / RUN_LOG).totals(f"{group}-{place}" for place in range(4))
    return all(total.rewards for total in totals.values())


if __name__ == "__main__":
    main()
