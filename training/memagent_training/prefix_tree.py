"""Rows of token ids as blocks that are forwarded together: each row by itself, or rows that share prefixes as a tree.

No torch here. A row is the token ids of one conversation, prompt and completion. A block is one or more rows laid out
as a token trie, depth first: a prefix that several rows begin with stands in it once. Sorting the rows does all the
work, because the rows below a trie node are then neighbours: a row adds to the block only the tokens after what it
has in common with the row before it, and the tokens that see a token are those from itself to the end of its subtree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from memagent_training.prefixes import shared_prefix


@dataclass(slots=True)
class Block:
    """Some of the rows as one trie, depth first. Lists have one entry per token of the block."""

    ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """How many tokens come before it in its row: its position."""
    ends: list[int] = field(default_factory=list)
    """Where its subtree ends: token j sees token i where i <= j < ends[i]."""
    paths: dict[int, list[int]] = field(default_factory=dict)
    """Row number -> the places in the block of the row's tokens, in order."""

    def __len__(self) -> int:
        return len(self.ids)


def single_blocks(rows: Sequence[array[int]]) -> list[Block]:
    """Every row as its own block, in the rows' order."""
    return [_trie(rows, [number], [0]) for number in range(len(rows))]


def tree_blocks(rows: Sequence[array[int]], pair_cost: float = 0.0) -> list[Block]:
    """Rows as tries whose cost is least.

    Attention over a block of n tokens is computed for all n * n pairs of them, so one trie of everything is not always
    the cheapest: where the rows share little, repeating the shared prefix in several blocks costs less than the pairs
    across them.

    Args:
        rows: token ids, at least one per row.
        pair_cost: what a pair of tokens costs in attention, in units of what a token costs in all the rest. 0 makes one
            trie of all rows, which has the fewest tokens.
    """
    order = sorted(range(len(rows)), key=lambda number: rows[number])
    shared = [0] + [shared_prefix(rows[a], rows[b]) for a, b in pairwise(order)]
    bounds = _cheapest_cuts([len(rows[number]) for number in order], shared, pair_cost)
    return [_trie(rows, order[start:end], [0, *shared[start + 1 : end]]) for start, end in bounds]


def fill_sequences(blocks: Sequence[Block], capacity: int) -> list[list[int]]:
    """Numbers of the blocks that go into each sequence of `capacity` tokens: the largest first, each where it fits.

    A block larger than the capacity has a sequence of its own.
    """
    sequences: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(blocks)), key=lambda each: -len(blocks[each])):
        size = len(blocks[number])
        index = next((index for index, left in enumerate(room) if left >= size), len(room))
        if index == len(room):
            sequences.append([])
            room.append(max(capacity, size))
        sequences[index].append(number)
        room[index] -= size
    return sequences


def _trie(rows: Sequence[array[int]], order: Sequence[int], shared: Sequence[int]) -> Block:
    """The block of sorted rows; `shared` says how many tokens each begins with that the row before it has too."""
    block = Block()
    path: list[int] = []
    for number, common in zip(order, shared, strict=True):
        for place in path[common:]:
            block.ends[place] = len(block)
        row = rows[number]
        path = path[:common] + list(range(len(block), len(block) + len(row) - common))
        block.ids += row[common:]
        block.depths += range(common, len(row))
        block.ends += [0] * (len(row) - common)
        block.paths[number] = path
    for place in path:
        block.ends[place] = len(block)
    return block


def _cheapest_cuts(lengths: Sequence[int], shared: Sequence[int], pair_cost: float) -> list[tuple[int, int]]:
    """Where to cut sorted rows into blocks so that tokens + pair_cost * tokens**2, summed over blocks, is least."""
    if pair_cost == 0:
        return [(0, len(lengths))]
    least = [0.0]
    cut = [0]
    for end in range(1, len(lengths) + 1):
        best, best_start, added = float("inf"), 0, 0
        for start in range(end - 1, -1, -1):
            tokens = lengths[start] + added
            total = least[start] + tokens + pair_cost * tokens * tokens
            if total < best:
                best, best_start = total, start
            added += lengths[start] - shared[start]
        least.append(best)
        cut.append(best_start)
    bounds: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        bounds.append((cut[end], end))
        end = cut[end]
    return bounds[::-1]
