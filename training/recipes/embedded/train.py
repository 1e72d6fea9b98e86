"""Supervised training of the embedded policy: it can be killed and resumed at any time, on two CPU cores or one GPU.

    python -m recipes.embedded.train --corpus corpus --out work/embedded --steps 2400 --decay-steps 800

The learning rate is flat until the last `--decay-steps`, then falls to zero. Batches depend only on seed and step, so a
resumed run gets the same ones as an uninterrupted run.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from memagent_training.algorithm.muon import MuonWithAdamW
from recipes.embedded.policy_network import Batch, Network, load_policy, new_policy
from recipes.embedded.structured_start import give_structure, measure_rarity
from recipes.embedded.tokenizer import VOCABULARY, load_encoding
from recipes.embedded.training_examples import EMPTY, PromptFormat, Prose, Row, RowBuilder

SHIPPED = Path(__file__).resolve().parents[3] / "memagent_graph" / "embedded"
BRANCHES = 14
"""Update prompts on one section."""


def collate(rows: list[Row]) -> Batch:
    """Lay rows with equally many branches end to end and work out their layout."""
    trunk = max(len(row.trunk) for row in rows)
    branches = len(rows[0].branches)
    length = max(len(branch.tokens) for row in rows for branch in row.branches)
    trunks = torch.zeros(len(rows), trunk, dtype=torch.long)
    own = torch.zeros(len(rows), branches, length, dtype=torch.long)
    seen = torch.zeros(len(rows), branches, length, trunk + length, dtype=torch.bool)
    seen[..., trunk:] = torch.ones(length, length, dtype=torch.bool).tril()
    tokens: list[int] = []
    positions: list[int] = []
    indices: list[int] = []
    learned: list[tuple[int, int, float]] = []
    first_own = len(rows) * trunk
    for index, row in enumerate(rows):
        width = len(row.trunk)
        trunks[index, :width] = torch.arange(len(tokens), len(tokens) + width)
        indices += range(index * trunk, index * trunk + width)
        tokens += row.trunk
        positions += range(width)
        for branch_index, branch in enumerate(row.branches):
            begin, size = len(tokens), len(branch.tokens)
            start = width if branch.sees_trunk else 0
            own[index, branch_index, :size] = torch.arange(begin, begin + size)
            seen[index, branch_index, :, :start] = True
            first = first_own + (index * branches + branch_index) * length
            indices += range(first, first + size)
            tokens += branch.tokens
            positions += range(start, start + size)
            learned += [(begin + offset, token, weight) for offset, token, weight in branch.learned]
    wanted, targets, weights = (torch.tensor(column) for column in zip(*learned, strict=True))
    return Batch(
        torch.tensor(tokens), torch.tensor(positions),
        trunks, own, seen.flatten(0, 1)[:, None], torch.tensor(indices),
        wanted, targets, weights,
    )  # fmt: skip


def draw_section_length(rng: random.Random, ramp: float, longest: int = 288) -> int:
    """Return the tokens of a section: short at first (ramp 0), of full length in a third of the rows at last (1)."""
    if rng.random() < 0.3 * ramp:
        return longest if rng.random() < 0.85 else int(longest * rng.uniform(1.0, 1.3))
    top = 60 + (longest - 60) * ramp
    return int(24 * (top / 24) ** rng.random())


def make_batch(builder: RowBuilder, seed: int, step: int, ramp: float, tokens: int) -> Batch:
    """Return the batch of this step: about `tokens` tokens in sections of mixed lengths."""
    rng = random.Random(f"{seed}/{step}")
    rows: list[Row] = []
    while sum(row.size for row in rows) < tokens:
        rows.append(builder.draw_row(rng, draw_section_length(rng, ramp), BRANCHES, hardness=ramp))
    return collate(rows)


def compute_loss(policy: Network, batch: Batch, autocast: bool) -> tuple[Tensor, Tensor]:
    """Return the weighted mean loss, and the accuracy of the predicted tokens."""
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=autocast):
        logits = policy.logits(batch).float()
    token_losses = F.cross_entropy(logits, batch.targets, reduction="none")
    accuracy = (logits.argmax(-1) == batch.targets).float().mean()
    return (token_losses * batch.weights).sum() / batch.weights.sum(), accuracy


def save(path: Path, policy: Network, optimizer: MuonWithAdamW, step: int, spent: dict[str, float]) -> None:
    """Write a checkpoint; the file appears when it is complete."""
    state = {
        "config": policy.config.to_dict(),
        "model": policy.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "spent": spent,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def resume(checkpoint: Path, policy: Network, optimizer: MuonWithAdamW) -> tuple[int, dict[str, float]]:
    """Load a checkpoint; return its step, and the seconds and tokens spent so far."""
    state: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    policy.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    print(f"resumed {checkpoint.name} at step {state['step']}", flush=True)
    return state["step"], state["spent"]


def train(arguments: argparse.Namespace) -> None:
    """Run the remaining steps."""
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    form = PromptFormat.load(arguments.shipped, load_encoding(arguments.shipped))
    train_prose, check_prose = (Prose(arguments.corpus / name) for name in ("train.txt", "held_out.txt"))
    builder, checker = RowBuilder(form, train_prose), RowBuilder(form, check_prose, held_out=True)
    source: Path | None = arguments.weights_from
    policy = new_policy() if source is None else load_policy(source)
    if source is None:
        rarity = measure_rarity(builder.draw_question_prompts(random.Random(0), 2000), VOCABULARY)
        give_structure(
            policy, rarity, (form.encode_trunk("")[0], form.encode_reply(EMPTY)[0]), form.find_question_tags()
        )
    nn.Module.to(policy, device)
    autocast = device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "SVE"))
    optimizer = MuonWithAdamW(policy, lr=arguments.adamw_lr, muon_lr=arguments.muon_lr, betas=(0.9, 0.95))
    rates = [group["lr"] for group in optimizer.param_groups]
    checkpoint: Path = arguments.out / "last.pt"
    first_step, spent = 0, {"seconds": 0.0, "tokens": 0.0}
    if arguments.resume and checkpoint.exists():
        first_step, spent = resume(checkpoint, policy, optimizer)
    work = f"{arguments.steps} steps of about {arguments.tokens} tokens on {device}"
    print(f"{policy.num_parameters():,} parameters, {work}", flush=True)
    began, tokens, accuracies = time.perf_counter(), 0, []
    for step in range(first_step, arguments.steps):
        ramp = min(1.0, step / arguments.ramp_steps)
        batch = make_batch(builder, arguments.seed, step, ramp, arguments.tokens).to(device)
        factor = scale_rates(step, arguments.steps, arguments.decay_steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        loss, accuracy = compute_loss(policy, batch, autocast=autocast)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += batch.tokens.numel()
        accuracies.append(accuracy.item())
        if (step + 1) % arguments.log_every == 0 or step + 1 == arguments.steps:
            now = time.perf_counter()
            spent = {"seconds": spent["seconds"] + now - began, "tokens": spent["tokens"] + tokens}
            print(
                f"step {step + 1} loss {loss.item():.4f} accuracy {fmean(accuracies):.4f}"
                f" rate {factor:.3f} {tokens / (now - began):.0f} tokens/s"
                f" {spent['tokens'] / 1e6:.2f}M tokens {spent['seconds'] / 60:.1f} min",
                flush=True,
            )
            began, tokens, accuracies = now, 0, []
        if (step + 1) % arguments.check_every == 0 or step + 1 == arguments.steps:
            save(checkpoint, policy, optimizer, step + 1, spent)
            print(f"  {check(policy, checker, device, arguments.check_rows)}", flush=True)
            began = time.perf_counter()


@torch.no_grad()
def check(policy: Network, builder: RowBuilder, device: torch.device, rows: int) -> str:
    """Return how many replies are right in every token, after right ones, on held-out sections; by kind."""
    rng = random.Random(7)
    results: dict[str, list[bool]] = {}
    for row in [builder.draw_row(rng, 250, 16) for _ in range(rows)]:
        batch = collate([row]).to(device)
        sizes = [len(branch.learned) for branch in row.branches]
        is_right = torch.split(policy.logits(batch).argmax(-1) == batch.targets, sizes)
        for branch, of_branch in zip(row.branches, is_right, strict=True):
            results.setdefault(branch.kind, []).append(bool(of_branch.all()))
    return ", ".join(f"{kind} {sum(counted)}/{len(counted)}" for kind, counted in sorted(results.items()))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--corpus", type=Path, required=True, help="folder written by recipes.embedded.corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shipped", type=Path, default=SHIPPED, help="folder with tokenizer and templates")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--weights-from", type=Path, help="a checkpoint, or a policy's folder, to start from")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--decay-steps", type=int, default=800)
    parser.add_argument("--ramp-steps", type=int, default=400, help="steps until sections have their full length")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per step")
    parser.add_argument("--muon-lr", type=float, default=0.003)
    parser.add_argument("--adamw-lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--check-every", type=int, default=100)
    parser.add_argument("--check-rows", type=int, default=24, help="held-out sections that a check reads")
    train(parser.parse_args())


def scale_rates(step: int, total: int, decay: int, warmup: int = 20) -> float:
    """Return the factor on both learning rates: a short rise, a plateau, then a straight line to zero at the end."""
    return min(1.0, (step + 1) / warmup, (total - step) / max(1, decay))


if __name__ == "__main__":
    main()
