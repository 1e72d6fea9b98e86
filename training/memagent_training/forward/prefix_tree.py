"""Rows of token ids in one sequence: one after the other, or as a token trie that has a shared prefix once.

No torch here. A row is the token ids of one conversation, prompt and completion. Sorting puts rows
with a common prefix next to each other, so a row adds only the tokens after the prefix that it shares with the previous
row. In this order, which is depth first, a token is attended to by the tokens up to the end of its subtree, and by no
others. Rows one after the other are such a trie too, without shared prefixes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from memagent_training.algorithm.planner import shared_prefix


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens from `start` to `end` that follow each other without a branch, each seeing those before it."""

    start: int
    end: int
    subtree_end: int
    """The tokens from `end` to here come after this node in some row: each sees all of the node."""


@dataclass(slots=True)
class Trie:
    """Rows in one sequence. Lists have one entry per token of the sequence."""

    ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """How many tokens come before it in its row: its position."""
    ends: list[int] = field(default_factory=list)
    """Where its subtree ends: token j sees token i where i <= j < ends[i]."""
    paths: dict[int, list[int]] = field(default_factory=dict)
    """By row number: the indices in the sequence of the row's tokens, in order."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The sequence in parts, in its order. Adjacent tokens with the same subtree end are one node."""
        nodes: list[Node] = []
        start = 0
        for subtree_end, tokens in groupby(self.ends):
            end = start + sum(1 for _ in tokens)
            nodes.append(Node(start, end, subtree_end))
            start = end
        return tuple(nodes)


def one_after_another(rows: Sequence[array[int]]) -> Trie:
    """Every row by itself, in the rows' order."""
    return _lay_out(rows, range(len(rows)), [0] * len(rows))


def as_tree(rows: Sequence[array[int]]) -> Trie:
    """Every prefix once, however many rows begin with it; each row has at least one token."""
    order = sorted(range(len(rows)), key=lambda number: rows[number])
    return _lay_out(rows, order, [0, *(shared_prefix(rows[a], rows[b]) for a, b in pairwise(order))])


def _lay_out(rows: Sequence[array[int]], order: Sequence[int], shared: Sequence[int]) -> Trie:
    """Rows in an order; `shared` is the length of the prefix that each row shares with the previous one."""
    trie = Trie()
    path: list[int] = []
    for number, common in zip(order, shared, strict=True):
        row, start = rows[number], len(trie.ids)
        for place in path[common:]:
            trie.ends[place] = start
        path = path[:common] + list(range(start, start + len(row) - common))
        trie.ids += row[common:]
        trie.depths += range(common, len(row))
        trie.ends += [0] * (len(row) - common)
        trie.paths[number] = path
    for place in path:
        trie.ends[place] = len(trie.ids)
    return trie
