"""Supervised training of the adapter of `english`: on a GPU in minutes, on a processor in days.

    python -m recipes.english.supervision --base FOLDER --lessons lessons.npz --check check.npz --out FOLDER

It needs only torch, safetensors and numpy. `encoded_lessons.py` writes the conversations. Each conversation is learned
once, in order, so a batch is determined by the file and the step. A run that was killed continues from its checkpoint.
At the end the adapter is written to the folder, with a record of its settings.

The loss is the mean over reply tokens of all conversations of a batch, in which the first tokens of a reply, which
decide between keeping and writing, weigh more. The base is in bfloat16, the adapter in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from recipes.english.encoded_trees import CATEGORIES, EncodedTrees, TrainingBatch, make_batches
from recipes.english.network import BASE, AdaptedNetwork

WARM_UP_STEPS: Final = 20
"""The number of steps in which the rate rises; a tenth of all steps if that is less."""
FINAL_RATE_SHARE: Final = 0.05
"""The fraction of the rate at the last step."""
SAVE_SECONDS: Final = 600.0
"""The time between two checkpoints."""


@dataclass(slots=True)
class TrainingProgress:
    """The progress of a run, with the tokens and the time that it has taken."""

    step: int = 0
    steps: int = 0
    conversations: int = 0
    tokens: int = 0
    seconds: float = 0.0


def score(network: AdaptedNetwork, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the scored tokens, and whether greedy decoding writes each conversation's reply."""
    hidden_BSW = network(batch.ids_BS, batch.positions_BS, batch.trees_BS, batch.branches_BS)
    logits_CV = functional.linear(hidden_BSW.flatten(0, 1)[batch.predictor_positions_C], network.head)
    logprobs_C = -functional.cross_entropy(logits_CV.float(), batch.targets_C, reduction="none")
    hits_C = logits_CV.detach().argmax(-1) == batch.targets_C
    exact_K = torch.ones(len(batch.category_ids_K), device=hits_C.device)
    return logprobs_C, exact_K.scatter_reduce(0, batch.conversations_C, hits_C.float(), "amin")


@torch.no_grad()
def count_exact_replies(network: AdaptedNetwork, trees: EncodedTrees, length: int, rows: int) -> dict[str, str]:
    """Return how many replies greedy decoding writes exactly, as text by category, such as "7/9"."""
    exact: dict[str, list[float]] = {}
    for batch in make_batches(trees, length, rows):
        _, exact_K = score(network, batch.to(str(network.head.device)))
        for category, value in zip(batch.category_ids_K, exact_K.tolist(), strict=True):
            exact.setdefault(CATEGORIES[category], []).append(value)
            exact.setdefault("all", []).append(value)
    return {name: f"{sum(values):.0f}/{len(values)}" for name, values in sorted(exact.items())}


def compute_rate_fraction(step: int, steps: int) -> float:
    """Return the fraction of the rate at a step; it rises linearly, then falls along a cosine."""
    warm_up_steps = max(1, min(WARM_UP_STEPS, steps // 10))
    if step < warm_up_steps:
        return (step + 1) / warm_up_steps
    decay_progress = (step - warm_up_steps) / max(1, steps - warm_up_steps)
    return FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * min(1.0, decay_progress))) / 2


def run_step(
    network: AdaptedNetwork, optimizer: torch.optim.Optimizer, micro_batches: Sequence[TrainingBatch]
) -> dict[str, float]:
    """Take an optimizer step on some micro-batches; return the loss, fraction of exact replies and gradient norm."""
    parameters = [weights for group in optimizer.param_groups for weights in group["params"]]
    total_weight = sum(float(batch.weights_C.sum()) for batch in micro_batches)
    losses, exact_replies = [], []
    for batch in micro_batches:
        device_batch = batch.to(str(network.head.device))
        logprobs_C, exact_K = score(network, device_batch)
        loss = -(logprobs_C * device_batch.weights_C).sum() / total_weight
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        exact_replies.append(exact_K)
    gradient_norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    if torch.isfinite(gradient_norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": float(sum(losses)), "exact": float(torch.cat(exact_replies).mean()), "norm": float(gradient_norm)}


def train(arguments: argparse.Namespace) -> None:
    """Learn from all conversations, or until the time limit, and write the adapter."""
    torch.manual_seed(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    started_at = time.monotonic()
    trees = EncodedTrees.load(arguments.lessons)
    held_out = EncodedTrees.load(arguments.check)
    all_batches = list(make_batches(trees, arguments.length, arguments.rows))
    steps = min(len(all_batches) // arguments.accumulated, arguments.steps)
    network = AdaptedNetwork(arguments.base, arguments.device, compiled=arguments.compile)
    optimizer = torch.optim.AdamW(network.parameters(), lr=arguments.rate, betas=(0.9, 0.98), weight_decay=0.0)
    progress = TrainingProgress(steps=steps)
    checkpoint = arguments.out.with_name(f"{arguments.out.name}.pt")
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        network.load_adapter(state["adapter"])
        optimizer.load_state_dict(state["optimizer"])
        progress = TrainingProgress(**state["progress"])
    elif arguments.adapter:
        network.load_adapter(load_file(arguments.adapter / "adapter_model.safetensors"))
    print(f"{steps} steps, from {progress}, after {time.monotonic() - started_at:.0f} s", flush=True)
    saved_at = time.monotonic()
    while progress.step < min(steps, arguments.until_step) and time.monotonic() - started_at < 60 * arguments.minutes:
        step_started_at = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * compute_rate_fraction(progress.step, steps)
        first_batch = progress.step * arguments.accumulated
        micro_batches = all_batches[first_batch : first_batch + arguments.accumulated]
        metrics = run_step(network, optimizer, micro_batches)
        seconds, tokens = time.monotonic() - step_started_at, sum(batch.tokens for batch in micro_batches)
        progress.step += 1
        progress.conversations += sum(len(batch.category_ids_K) for batch in micro_batches)
        progress.tokens += tokens
        progress.seconds += seconds
        if progress.step % arguments.line_steps == 0:
            metric_texts = " ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            print(
                f"step {progress.step} {metric_texts} {tokens / seconds:.0f} tokens/s {progress.seconds:.0f} s",
                flush=True,
            )
        if progress.step % arguments.check_steps == 0:
            print(f"  held out: {count_exact_replies(network, held_out, arguments.length, arguments.rows)}", flush=True)
        if time.monotonic() - saved_at > SAVE_SECONDS:
            save(checkpoint, network, optimizer, progress)
            saved_at = time.monotonic()
    save(checkpoint, network, optimizer, progress)
    record: dict[str, Any] = {"held_out": count_exact_replies(network, held_out, arguments.length, arguments.rows)}
    print(f"  at the end: {record}", flush=True)
    network.save_adapter(arguments.out)
    record |= {"progress": asdict(progress), "base": BASE, "rate": arguments.rate, "seed": arguments.seed}
    record["lessons_sha256"] = sha256(trees.ids_N.tobytes() + trees.segments_S4.tobytes()).hexdigest()
    record["tokens_per_step"] = arguments.length * arguments.rows * arguments.accumulated
    (arguments.out / "progress.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")


def save(path: Path, network: AdaptedNetwork, optimizer: torch.optim.Optimizer, progress: TrainingProgress) -> None:
    """Write a checkpoint; the file appears when it is complete."""
    partial_path = path.with_suffix(".partial")
    torch.save(
        {"adapter": network.get_adapter(), "optimizer": optimizer.state_dict(), "progress": asdict(progress)},
        partial_path,
    )
    partial_path.replace(path)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="folder of the base in transformers' format")
    parser.add_argument("--lessons", type=Path, required=True, help="file written by encoded_lessons.py")
    parser.add_argument("--check", type=Path, required=True, help="file written by encoded_lessons.py --held-out")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write the adapter to; the checkpoint is beside it"
    )
    parser.add_argument("--adapter", type=Path, help="folder of an adapter to start from")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no step after this many minutes")
    parser.add_argument("--steps", type=int, default=10**9, help="steps of the schedule; at most those of the file")
    parser.add_argument("--until-step", type=int, default=10**9, help="stop before this step")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--rows", type=int, default=8, help="sequences per batch")
    parser.add_argument("--accumulated", type=int, default=2, help="batches per step")
    parser.add_argument("--line-steps", type=int, default=10)
    parser.add_argument("--check-steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse_arguments())
