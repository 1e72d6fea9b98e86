"""Where a closed loop's time goes: seconds and tokens per second of each phase, from what the loop itself wrote down.

    python -m benchmarks.loop_phases rl-policy

Iterations that began with a start of the server are left out, as are those whose checkpoints are gone from the history.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.figures import Figure, print_table

PHASES = ("sync", "collect", "measure", "train")
STARTED_SECONDS = 5.0
"""A sync that takes longer started a server."""


def iterations_in(folder: Path) -> list[dict[str, float]]:
    """One entry per iteration: seconds of each phase, and what was read and trained on meanwhile."""
    from memagent_training.rl.job import JOURNAL
    from memagent_training.rl.journal import Journal
    from memagent_training.training_output import find_checkpoints

    newest = find_checkpoints(folder).newest
    if newest is None:
        raise SystemExit(f"{folder} has no checkpoint; name the folder that memagent rl --out wrote")
    history: Sequence[Mapping[str, Any]] = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    records = {each.iteration: each for each in Journal(folder / JOURNAL).records if each.is_enough}
    found: list[dict[str, float]] = []
    for entry in history:
        if "collect/seconds" in entry:  # the first step of an iteration
            found.append({name: entry.get(f"{name}/seconds", 0.0) for name in PHASES})
            record = records[len(found) - 1]
            found[-1] |= {"turns": record.turns, "computed": record.prompt_tokens - record.cached_tokens}
            found[-1] |= {"prompt": record.prompt_tokens, "sampled": record.completion_tokens, "forwarded": 0.0}
        if found and "step_time" in entry:
            found[-1]["train"] += entry["step_time"]
            found[-1]["forwarded"] += entry["tokens/forwarded"]
    return [each for each in found if each["sync"] < STARTED_SECONDS]


def figures_of(iterations: Sequence[Mapping[str, float]]) -> list[Figure]:
    """Means over iterations."""
    mean = {name: fmean(each[name] for each in iterations) for name in iterations[0]}
    whole = sum(mean[name] for name in PHASES)
    told = [Figure(f"{name}: seconds an iteration", mean[name], "s", "", True) for name in PHASES if mean[name]]
    told += [Figure(f"{name}: share", mean[name] / whole, "", "", True) for name in PHASES if mean[name]]
    told += [
        Figure("collect: conversations a second", mean["turns"] / mean["collect"], "", "", True),
        Figure("collect: prompt tokens a second", mean["prompt"] / mean["collect"], "", "", True),
        Figure("collect: of them computed", mean["computed"] / mean["prompt"], "", "", True),
        Figure("collect: sampled tokens a second", mean["sampled"] / mean["collect"], "", "", True),
        Figure("train: forwarded tokens a second", mean["forwarded"] / mean["train"], "", "", True),
    ]
    return told


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a loop that has run for two iterations or more")
    iterations = iterations_in(parser.parse_args().folder)
    if not iterations:
        raise SystemExit("every iteration began with a start of the server; let it run for longer")
    print(f"means of {len(iterations)} iterations")
    print_table(figures_of(iterations))


if __name__ == "__main__":
    main()
