"""The online trainer on the groups of `training_world`, and a program that runs it, once per rank.

    python -m torch.distributed.run --nproc-per-node 2 online_world.py FOLDER OUT CASE...

CASE is a key of `FAILURES`, which the source raises before its second iteration. OUT/RANK.pt then has, for each case,
the iterations that the trainer asked for, the saved policies, the error, and the final weights.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from memagent_training.data.rollouts import RolloutGroup
from memagent_training.job.config import MultiConvDAPOConfig
from memagent_training.job.job_settings import load_preset
from memagent_training.rl.online_trainer import EndOfLoop, IterationGroups, OnlineTrainer
from memagent_training.training_errors import TrainingError
from support import training_world

ITERATIONS = 3
GROUPS = 3
"""The number of groups in an iteration."""
SMALL_SETTINGS = training_world.SMALL_SETTINGS | {"weight_decay": 0.0}


def make_world(folder: Path) -> list[list[RolloutGroup]]:
    """Write a model, and return for each iteration its groups, whose rewards all vary."""
    training_world.make_world(folder, groups=ITERATIONS * GROUPS + 1)
    return load_world(folder)


def load_world(folder: Path) -> list[list[RolloutGroup]]:
    """Return the groups that `make_world` wrote, by iteration."""
    groups: list[RolloutGroup] = pickle.loads((folder / "groups.pkl").read_bytes())
    groups = [group for group in groups if group.group_id != "group-2"]  # all its rewards are 0
    return [groups[start : start + GROUPS] for start in range(0, len(groups), GROUPS)]


@dataclass
class ScriptedSource:
    """A source of groups that records the iterations that the trainer asks for."""

    groups: list[list[RolloutGroup]]
    failure: Exception | None = None
    """Raised before the second iteration."""
    saved: list[int] = field(default_factory=list)
    """The iterations whose policies have been saved."""
    iterations: list[int] = field(default_factory=list)
    saved_before: list[list[int]] = field(default_factory=list)
    """The value of `saved` at each request."""

    def get_groups(self, iteration: int) -> IterationGroups:
        self.iterations.append(iteration)
        self.saved_before.append(list(self.saved))
        if iteration == 1 and self.failure is not None:
            raise self.failure
        versions = [f"v{index}" for index in range(iteration + 1)]
        return IterationGroups(self.groups[iteration], versions, {"collect/reward": float(iteration)})


class StepRecorder(TrainerCallback):
    """Records the ids of the groups of each step, and the old log-probs of its ratios."""

    trainer: OnlineTrainer

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.old_logprobs: list[dict[tuple[str, int], torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.groups.append([group.group_id for group in self.trainer._get_scheduled_step().groups])
        self.old_logprobs.append(dict(self.trainer._recomputed_logprobs))


@dataclass
class Training:
    """An online trainer with its source, its recorded steps and its saved policies."""

    trainer: OnlineTrainer
    source: ScriptedSource
    steps: StepRecorder
    policies: dict[int, dict[str, torch.Tensor]]
    """By iteration, the weights that were saved before it."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the current weights."""
        return copy_weights(self.trainer)


def copy_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the weights of the trainer's model."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def make_config(output: Path, steps: int, iterations: int = ITERATIONS, **changes: Any) -> MultiConvDAPOConfig:
    """Return settings with `steps` optimizer steps per iteration."""
    schedule = {
        "max_steps": iterations * steps,
        "save_strategy": "steps",
        "save_steps": steps,
        "save_total_limit": None,
    }
    return load_preset("dapo", output_dir=str(output), **(SMALL_SETTINGS | schedule | changes))


def make_training(
    folder: Path, output: Path, steps: int, *, failure: Exception | None = None, **changes: Any
) -> Training:
    """Return a trainer with `steps` optimizer steps per iteration."""
    source = ScriptedSource(load_world(folder), failure)
    recorder = StepRecorder()
    policies: dict[int, dict[str, torch.Tensor]] = {}

    def save_policy(trainer: OnlineTrainer, iteration: int) -> None:
        policies[iteration] = copy_weights(trainer)
        source.saved.append(iteration)

    trainer = OnlineTrainer(
        str(folder / "model"),
        source.get_groups,
        make_config(output, steps, **changes),
        steps_per_iteration=steps,
        save_policy=save_policy,
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    return Training(trainer, source, recorder, policies)


FAILURES: dict[str, Exception | None] = {
    "whole": None,
    "end": EndOfLoop("all is learnt"),
    "error": TrainingError("the server is gone", hint="Start it.", run_id="run-7"),
    "defect": KeyError("of the source's own"),
}


def main() -> None:
    """Run cases on this rank."""
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    outcomes: dict[str, Any] = {}
    for case in sys.argv[3:]:
        training = make_training(folder, output / case, 1, failure=FAILURES[case])
        outcome = None
        try:
            training.trainer.train()
        except (EndOfLoop, TrainingError, KeyError) as error:
            outcome = error
        outcomes[case] = {
            "iterations": training.source.iterations,
            "saved": sorted(training.policies),
            "error": outcome,
            "steps": training.trainer.state.global_step,
            "weights": training.weights(),
        }
    training_world.end_rank(outcomes, output)


if __name__ == "__main__":
    main()
