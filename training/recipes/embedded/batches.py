"""Rows of similar length as tensors; every batch is a function of the seed and the step alone."""

from __future__ import annotations

import random

import torch

from recipes.embedded.policy_network import Batch
from recipes.embedded.training_examples import Row, RowBuilder

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
    places: list[int] = []
    learned: list[tuple[int, int, float]] = []
    first_own = len(rows) * trunk
    for index, row in enumerate(rows):
        width = len(row.trunk)
        trunks[index, :width] = torch.arange(len(tokens), len(tokens) + width)
        places += range(index * trunk, index * trunk + width)
        tokens += row.trunk
        positions += range(width)
        for branch_index, branch in enumerate(row.branches):
            begin, size = len(tokens), len(branch.tokens)
            start = width if branch.sees_trunk else 0
            own[index, branch_index, :size] = torch.arange(begin, begin + size)
            seen[index, branch_index, :, :start] = True
            first_place = first_own + (index * branches + branch_index) * length
            places += range(first_place, first_place + size)
            tokens += branch.tokens
            positions += range(start, start + size)
            learned += [(begin + offset, token, weight) for offset, token, weight in branch.learned]
    wanted, targets, weights = (torch.tensor(column) for column in zip(*learned, strict=True))
    return Batch(
        torch.tensor(tokens), torch.tensor(positions),
        trunks, own, seen.flatten(0, 1)[:, None], torch.tensor(places),
        wanted, targets, weights,
    )  # fmt: skip


def section_length(rng: random.Random, ramp: float, longest: int = 288) -> int:
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
        rows.append(builder.row(rng, section_length(rng, ramp), BRANCHES, hardness=ramp))
    return collate(rows)
