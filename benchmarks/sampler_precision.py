"""Measure the error of the gradient when the sampler uses another number format, with and without importance weights.

    python -m benchmarks.sampler_precision work/precision [--model english --formats bfloat16]

For each format the policy reads questions in this process, at temperature 1, until some groups have reads with
different rewards. Then one step of `dapo` is taken on the same weights in float32: without importance weights, with
the preset's cap of 2, and without a cap. The gradient without a cap is the exact one for the sampled tokens; the
relative errors of the others are their distances to it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from memagent_evaluation.tasks import TaskSettings, load_task
from memagent_graph import LocalPolicy, MemAgent, RunLog
from memagent_graph.tokenizers import load_tokenizer
from memagent_training.data.replay import load_groups
from memagent_training.data.rollouts import RolloutGroup
from memagent_training.job.base_model import find_base_model
from memagent_training.job.collect import CollectSettings, collect
from memagent_training.job.job_settings import make_config
from memagent_training.job.trainer import MultiConvDAPOTrainer

IMPORTANCE_CAPS = {"not corrected": None, "cap 2": 2.0, "no cap": 1e9}
SETTINGS: dict[str, Any] = {
    "warmup_steps": 0, "max_grad_norm": 0.0, "max_steps": 1, "report_to": "none", "save_strategy": "no",
    "gradient_checkpointing": False, "token_budget": 4096, "disable_tqdm": True, "max_logprob_gap": 1e9,
}  # fmt: skip


class GradientRecorder(TrainerCallback):
    """Stores the gradient that the optimizer gets."""

    def __init__(self) -> None:
        self.gradient = torch.zeros(0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Copy the gradient; the Trainer calls this."""
        gradients = [parameter.grad for parameter in parts["model"].parameters() if parameter.grad is not None]
        self.gradient = torch.cat([gradient.flatten().double() for gradient in gradients])


async def read_groups(
    model: str, base: Path, dtype: str, folder: Path, settings: CollectSettings, *, task: str, length: int, small: bool
) -> list[RolloutGroup]:
    """Return groups of reads by a policy in a number format."""
    log = RunLog(folder / f"{dtype}.sqlite")
    policy = LocalPolicy(model, dtype=dtype)
    generated_task = load_task(task, TaskSettings(load_tokenizer(base), seed=1, small=small))
    async with MemAgent(
        policy, run_log=log, logprobs=True, temperature=1.0, on_invented="accept", store=folder / "documents"
    ) as agent:
        samples = (generated_task.sample(length, index) for index in range(settings.max_questions))
        collection = await collect(agent, samples, settings, name=dtype, reward="lenient_match")
    return list(load_groups(log, reward="lenient_match", groups=collection.groups_by_run_id).groups)


def compute_gradients(groups: Sequence[RolloutGroup], model: Path, folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the gradient of one step for each correction, and the gap of the log-probs."""
    gradients_by_correction, logprob_gap = {}, None
    for name, cap in IMPORTANCE_CAPS.items():
        recorder = GradientRecorder()
        options = {**SETTINGS, "importance_cap": cap, "groups_per_step": len(groups)}
        config = make_config("dapo", options, folder / "training")
        trainer = MultiConvDAPOTrainer(str(model), groups, config, callbacks=[recorder])
        with contextlib.redirect_stdout(sys.stderr):  # where the Trainer prints its log
            trainer.train()
        gradients_by_correction[name], logprob_gap = recorder.gradient, trainer.logprob_gap
    return gradients_by_correction, logprob_gap


def measure_formats(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a row of the Markdown table for each format."""
    settings = CollectSettings(rollouts=arguments.rollouts, groups=arguments.groups, max_questions=64, concurrency=8)
    base = find_base_model(arguments.model).folder
    for dtype in arguments.formats:
        pending_groups = read_groups(
            arguments.model, base, dtype, arguments.out, settings,
            task=arguments.task, length=arguments.length, small=arguments.small,
        )  # fmt: skip
        gradients, logprob_gap = compute_gradients(asyncio.run(pending_groups), base, arguments.out)
        exact_gradient = gradients["no cap"]
        errors = {
            name: float((gradient - exact_gradient).norm() / exact_gradient.norm())
            for name, gradient in gradients.items()
        }
        cosine = float(
            torch.dot(gradients["not corrected"], exact_gradient)
            / gradients["not corrected"].norm()
            / exact_gradient.norm()
        )
        metric_names = (
            "sampling_logp_difference/mean", "sampling_logp_difference/max", "kl_k1", "kl_k3",
            "importance_sampling_ratio/min", "importance_sampling_ratio/max", "effective_sample_size",
        )  # fmt: skip
        metric_values = [logprob_gap.metrics[f"sampling/{name}"] for name in metric_names]
        cells = [dtype, f"{logprob_gap.tokens:,}", *(f"{value:.2g}" for value in metric_values)]
        cells += [f"{errors['not corrected']:.2%}", f"{cosine:.4f}", f"{errors['cap 2']:.2%}"]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure the formats that the command line names, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="english")
    parser.add_argument("--formats", nargs="+", default=["bfloat16"])
    parser.add_argument("--task", default="english_fact")
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--groups", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    column_titles = ["sampler", "tokens", "mean gap", "largest", "k1", "k3", "ratio min", "max", "ESS"]
    column_titles += ["gradient's error, not corrected", "cosine", "cap 2"]
    print(f"| {' | '.join(column_titles)} |\n|{' --- |' * len(column_titles)}")
    for row in measure_formats(arguments):
        print(row, flush=True)


if __name__ == "__main__":
    main()
