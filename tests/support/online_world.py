"""The online trainer on the groups of `training_world`, which a script hands out: run by itself once per rank.

    python -m torch.distributed.run --nproc-per-node 2 online_world.py FOLDER OUT CASE...

CASE is "whole", "end" or "error": the source goes on, ends, or fails before its second iteration. OUT/RANK.pt then has
of each case what the source was asked for, what was saved, how it ended, and the final weights.
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
"""Of each iteration."""
SMALL = training_world.SMALL | {"weight_decay": 0.0}


def make_world(folder: Path) -> list[list[RolloutGroup]]:
    """A model, and groups for each iteration, all with variance."""
    training_world.make_world(folder, groups=ITERATIONS * GROUPS + 1)
    return load_world(folder)


def load_world(folder: Path) -> list[list[RolloutGroup]]:
    """What `make_world` made."""
    groups: list[RolloutGroup] = pickle.loads((folder / "groups.pkl").read_bytes())
    groups = [group for group in groups if group.group_id != "group-2"]  # it earns nothing anywhere
    return [groups[start : start + GROUPS] for start in range(0, len(groups), GROUPS)]


@dataclass
class ScriptedSource:
    """Hands out groups, and remembers what it was asked for."""

    groups: list[list[RolloutGroup]]
    failure: Exception | None = None
    """Raised before the second iteration."""
    saved: list[int] = field(default_factory=list)
    """The policies that are there, by iteration."""
    iterations: list[int] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)
    """The policies that were there when it was asked."""

    def groups_of(self, iteration: int) -> IterationGroups:
        self.iterations.append(iteration)
        self.seen.append(list(self.saved))
        if iteration == 1 and self.failure is not None:
            raise self.failure
        versions = [f"v{index}" for index in range(iteration + 1)]
        return IterationGroups(self.groups[iteration], versions, {"collect/reward": float(iteration)})


class Steps(TrainerCallback):
    """Keeps the groups of each step, and the log-probs that its ratios compare with."""

    trainer: OnlineTrainer

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.old: list[dict[tuple[str, int], torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.groups.append([group.group_id for group in self.trainer._get_scheduled_step().groups])
        self.old.append(dict(self.trainer._recomputed_logprobs))


@dataclass
class Training:
    """An online trainer with its source, and what it did."""

    trainer: OnlineTrainer
    source: ScriptedSource
    steps: Steps
    policies: dict[int, dict[str, torch.Tensor]]
    """The weights as they were saved before each iteration."""

    def weights(self) -> dict[str, torch.Tensor]:
        """As they are now."""
        return weights_of(self.trainer)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """A copy."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def config_of(output: Path, steps: int, iterations: int = ITERATIONS, **changes: Any) -> MultiConvDAPOConfig:
    """Settings of `steps` optimizer steps an iteration."""
    schedule = {
        "max_steps": iterations * steps,
        "save_strategy": "steps",
        "save_steps": steps,
        "save_total_limit": None,
    }
    return load_preset("dapo", output_dir=str(output), **(SMALL | schedule | changes))


def make_training(
    folder: Path, output: Path, steps: int, *, failure: Exception | None = None, **changes: Any
) -> Training:
    """A trainer of `steps` optimizer steps an iteration."""
    source = ScriptedSource(load_world(folder), failure)
    callback = Steps()
    policies: dict[int, dict[str, torch.Tensor]] = {}

    def save_policy(trainer: OnlineTrainer, iteration: int) -> None:
        policies[iteration] = weights_of(trainer)
        source.saved.append(iteration)

    trainer = OnlineTrainer(
        str(folder / "model"),
        source.groups_of,
        config_of(output, steps, **changes),
        steps_per_iteration=steps,
        save_policy=save_policy,
        callbacks=[callback],
    )
    callback.trainer = trainer
    return Training(trainer, source, callback, policies)


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
        ended = None
        try:
            training.trainer.train()
        except (EndOfLoop, TrainingError, KeyError) as error:
            ended = error
        outcomes[case] = {
            "iterations": training.source.iterations,
            "saved": sorted(training.policies),
            "ended": ended,
            "steps": training.trainer.state.global_step,
            "weights": training.weights(),
        }
    training_world.end_rank(outcomes, output)


if __name__ == "__main__":
    main()
