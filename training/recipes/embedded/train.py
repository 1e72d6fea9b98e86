"""Supervised training of the embedded policy, on two CPU cores or one GPU; it can be killed and resumed at any time.

    python -m recipes.embedded.train --corpus corpus --out work/embedded --steps 2400 --decay-steps 800

The learning rate is constant until the last `--decay-steps`, and then falls to zero. Batches depend only on seed and
step, so a resumed run gets the same batches as an uninterrupted one.
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
from recipes.embedded.policy_network import Batch, Network, load_policy, make_policy
from recipes.embedded.structured_start import give_structure, measure_rarity
from recipes.embedded.tokenizer import VOCABULARY_SIZE, load_encoding
from recipes.embedded.training_examples import EMPTY, PromptFormat, Prose, Row, RowBuilder

SHIPPED_FOLDER = Path(__file__).resolve().parents[3] / "memagent_graph" / "embedded"
BRANCHES_PER_SECTION = 14
"""The number of update prompts on one section."""


def collate(rows: list[Row]) -> Batch:
    """Return a batch of rows with equal numbers of branches, laid end to end."""
    trunk_length = max(len(row.trunk) for row in rows)
    branch_count = len(rows[0].branches)
    branch_length = max(len(branch.tokens) for row in rows for branch in row.branches)
    trunks = torch.zeros(len(rows), trunk_length, dtype=torch.long)
    branches = torch.zeros(len(rows), branch_count, branch_length, dtype=torch.long)
    branch_masks = torch.zeros(len(rows), branch_count, branch_length, trunk_length + branch_length, dtype=torch.bool)
    branch_masks[..., trunk_length:] = torch.ones(branch_length, branch_length, dtype=torch.bool).tril()
    tokens: list[int] = []
    positions: list[int] = []
    padded_indices: list[int] = []
    learned_tokens: list[tuple[int, int, float]] = []
    first_branch_index = len(rows) * trunk_length
    for index, row in enumerate(rows):
        row_trunk_length = len(row.trunk)
        trunks[index, :row_trunk_length] = torch.arange(len(tokens), len(tokens) + row_trunk_length)
        padded_indices += range(index * trunk_length, index * trunk_length + row_trunk_length)
        tokens += row.trunk
        positions += range(row_trunk_length)
        for branch_index, branch in enumerate(row.branches):
            first_token, token_count = len(tokens), len(branch.tokens)
            first_position = row_trunk_length if branch.sees_trunk else 0
            branches[index, branch_index, :token_count] = torch.arange(first_token, first_token + token_count)
            branch_masks[index, branch_index, :, :first_position] = True
            first_index = first_branch_index + (index * branch_count + branch_index) * branch_length
            padded_indices += range(first_index, first_index + token_count)
            tokens += branch.tokens
            positions += range(first_position, first_position + token_count)
            learned_tokens += [(first_token + offset, token, weight) for offset, token, weight in branch.learned_tokens]
    learned_indices, targets, weights = (torch.tensor(column) for column in zip(*learned_tokens, strict=True))
    return Batch(
        torch.tensor(tokens), torch.tensor(positions),
        trunks, branches, branch_masks.flatten(0, 1)[:, None], torch.tensor(padded_indices),
        learned_indices, targets, weights,
    )  # fmt: skip


def draw_section_length(rng: random.Random, ramp: float, longest: int = 288) -> int:
    """Return a section's length in tokens: short at a `ramp` of 0, and at 1 the longest in a third of the rows."""
    if rng.random() < 0.3 * ramp:
        return longest if rng.random() < 0.85 else int(longest * rng.uniform(1.0, 1.3))
    upper_bound = 60 + (longest - 60) * ramp
    return int(24 * (upper_bound / 24) ** rng.random())


def make_batch(builder: RowBuilder, seed: int, step: int, ramp: float, tokens: int) -> Batch:
    """Return the batch of this step: about `tokens` tokens in sections of mixed lengths."""
    rng = random.Random(f"{seed}/{step}")
    rows: list[Row] = []
    while sum(row.size for row in rows) < tokens:
        rows.append(builder.draw_row(rng, draw_section_length(rng, ramp), BRANCHES_PER_SECTION, hardness=ramp))
    return collate(rows)


def compute_loss(policy: Network, batch: Batch, autocast: bool) -> tuple[Tensor, Tensor]:
    """Return the weighted mean loss, and the accuracy of the predicted tokens."""
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=autocast):
        logits = policy.compute_logits(batch).float()
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
    partial_path = path.with_suffix(".partial")
    torch.save(state, partial_path)
    partial_path.replace(path)


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
    prompt_format = PromptFormat.load(arguments.shipped, load_encoding(arguments.shipped))
    train_prose, held_out_prose = (Prose(arguments.corpus / name) for name in ("train.txt", "held_out.txt"))
    builder = RowBuilder(prompt_format, train_prose)
    held_out_builder = RowBuilder(prompt_format, held_out_prose, held_out=True)
    initial_weights: Path | None = arguments.weights_from
    policy = make_policy() if initial_weights is None else load_policy(initial_weights)
    if initial_weights is None:
        rarity = measure_rarity(builder.draw_question_prompts(random.Random(0), 2000), VOCABULARY_SIZE)
        give_structure(
            policy,
            rarity,
            (prompt_format.encode_trunk("")[0], prompt_format.encode_reply(EMPTY)[0]),
            prompt_format.find_question_tags(),
        )
    nn.Module.to(policy, device)
    autocast = device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "SVE"))
    optimizer = MuonWithAdamW(policy, lr=arguments.adamw_lr, muon_lr=arguments.muon_lr, betas=(0.9, 0.95))
    initial_rates = [group["lr"] for group in optimizer.param_groups]
    checkpoint: Path = arguments.out / "last.pt"
    first_step, spent = 0, {"seconds": 0.0, "tokens": 0.0}
    if arguments.resume and checkpoint.exists():
        first_step, spent = resume(checkpoint, policy, optimizer)
    plan_text = f"{arguments.steps} steps of about {arguments.tokens} tokens on {device}"
    print(f"{policy.num_parameters():,} parameters, {plan_text}", flush=True)
    started_at, tokens, accuracies = time.perf_counter(), 0, []
    for step in range(first_step, arguments.steps):
        ramp = min(1.0, step / arguments.ramp_steps)
        batch = make_batch(builder, arguments.seed, step, ramp, arguments.tokens).to(device)
        # A short warm-up, a plateau, and a linear decay to zero.
        rate_factor = min(1.0, (step + 1) / 20, (arguments.steps - step) / max(1, arguments.decay_steps))
        for group, initial_rate in zip(optimizer.param_groups, initial_rates, strict=True):
            group["lr"] = initial_rate * rate_factor
        loss, accuracy = compute_loss(policy, batch, autocast=autocast)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += batch.tokens.numel()
        accuracies.append(accuracy.item())
        if (step + 1) % arguments.log_every == 0 or step + 1 == arguments.steps:
            current_time = time.perf_counter()
            spent = {"seconds": spent["seconds"] + current_time - started_at, "tokens": spent["tokens"] + tokens}
            print(
                f"step {step + 1} loss {loss.item():.4f} accuracy {fmean(accuracies):.4f}"
                f" rate {rate_factor:.3f} {tokens / (current_time - started_at):.0f} tokens/s"
                f" {spent['tokens'] / 1e6:.2f}M tokens {spent['seconds'] / 60:.1f} min",
                flush=True,
            )
            started_at, tokens, accuracies = current_time, 0, []
        if (step + 1) % arguments.check_every == 0 or step + 1 == arguments.steps:
            save(checkpoint, policy, optimizer, step + 1, spent)
            print(f"  {count_right_replies(policy, held_out_builder, device, arguments.check_rows)}", flush=True)
            started_at = time.perf_counter()


@torch.no_grad()
def count_right_replies(policy: Network, builder: RowBuilder, device: torch.device, rows: int) -> str:
    """Return, as text by kind, how many replies to held-out sections have every token right after right tokens."""
    rng = random.Random(7)
    results_by_kind: dict[str, list[bool]] = {}
    for row in [builder.draw_row(rng, 250, 16) for _ in range(rows)]:
        batch = collate([row]).to(device)
        sizes = [len(branch.learned_tokens) for branch in row.branches]
        is_right_by_branch = torch.split(policy.compute_logits(batch).argmax(-1) == batch.targets, sizes)
        for branch, is_right_by_token in zip(row.branches, is_right_by_branch, strict=True):
            results_by_kind.setdefault(branch.kind, []).append(bool(is_right_by_token.all()))
    return ", ".join(f"{kind} {sum(results)}/{len(results)}" for kind, results in sorted(results_by_kind.items()))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--corpus", type=Path, required=True, help="folder written by recipes.embedded.corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shipped", type=Path, default=SHIPPED_FOLDER, help="folder with tokenizer and templates")
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


if __name__ == "__main__":
    main()
