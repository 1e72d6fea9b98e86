"""Print the seconds and tokens per second of each phase of a training loop, from the loop's own logs.

    python -m benchmarks.loop_phases rl-policy

The phase "train" includes forwards and backwards, log-probs recomputed before an iteration's first step, the optimizer
and checkpoints. Iterations are left out if they began with a start of the server, or if their reads were collected
before a resume or during the previous training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.figures import Figure, print_table

PHASES = ("sync", "collect", "measure", "train")
SERVER_START_SECONDS = 5.0
"""A sync that takes longer than this, and at least twice the median, includes a start of the server."""


def load_iterations(folder: Path) -> list[dict[str, float]]:
    """Return one entry per iteration: the seconds of each phase, and the tokens that were read and trained on."""
    from memagent_training.job.training_output import RECORD, find_checkpoints
    from memagent_training.rl.loop_journal import LoopJournal
    from memagent_training.rl.rl_job import JOURNAL

    newest_checkpoint = find_checkpoints(folder).newest
    if newest_checkpoint is None:
        raise SystemExit(f"{folder} has no checkpoint; name the folder of memagent rl --out")
    history: Sequence[Mapping[str, Any]] = json.loads((newest_checkpoint / "trainer_state.json").read_text())[
        "log_history"
    ]
    settings = json.loads((folder / RECORD).read_text())
    steps_per_iteration = -(-settings["loop"]["groups"] // settings["settings"]["groups_per_step"])
    records = {record.iteration: record for record in LoopJournal(folder / JOURNAL).records if record.is_enough}
    iterations: dict[int, dict[str, float]] = {}
    for entry in history:
        if "step_time" not in entry:
            continue
        iteration = (entry["step"] - 1) // steps_per_iteration
        iteration_sums = iterations.setdefault(iteration, dict.fromkeys((*PHASES, "forwarded"), 0.0))
        for name in PHASES:
            iteration_sums[name] += entry.get(f"{name}/seconds", 0.0)
        iteration_sums["train"] += entry["step_time"]
        iteration_sums["forwarded"] += entry["tokens/forwarded"]
        if "collect/reward" in entry:  # the first step of an iteration
            record = records[iteration]
            iteration_sums |= {"turns": record.turns, "computed": record.prompt_tokens - record.cached_tokens}
            iteration_sums |= {
                "prompt": record.prompt_tokens,
                "sampled": record.completion_tokens,
                "reading": record.seconds,
            }
    max_sync_seconds = (
        max(SERVER_START_SECONDS, 2 * median(sums["sync"] for sums in iterations.values())) if iterations else 0.0
    )
    return [
        sums
        for sums in iterations.values()
        if sums["sync"] < max_sync_seconds and sums["collect"] > sums["reading"] / 2
    ]


def make_figures(iterations: Sequence[Mapping[str, float]]) -> list[Figure]:
    """Return the means over the iterations as figures."""
    means = {name: fmean(iteration[name] for iteration in iterations) for name in iterations[0]}
    total_seconds = sum(means[name] for name in PHASES)
    figures = [Figure(f"{name}: seconds an iteration", means[name], "s") for name in PHASES if means[name]]
    figures += [Figure(f"{name}: share", means[name] / total_seconds) for name in PHASES if means[name]]
    figures += [
        Figure("collect: conversations a second", means["turns"] / means["reading"]),
        Figure("collect: prompt tokens a second", means["prompt"] / means["reading"]),
        Figure("collect: of them computed", means["computed"] / means["prompt"]),
        Figure("collect: sampled tokens a second", means["sampled"] / means["reading"]),
        Figure("train: forwarded tokens a second", means["forwarded"] / means["train"]),
    ]
    return figures


def main() -> None:
    """Print the figures of the loop that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of a loop with two iterations or more")
    iterations = load_iterations(parser.parse_args().folder)
    if not iterations:
        raise SystemExit("No iteration can be measured yet: let the loop run for longer.")
    print(f"means of {len(iterations)} iterations")
    print_table(make_figures(iterations))


if __name__ == "__main__":
    main()
