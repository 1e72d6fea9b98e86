"""Stores conversations as token ids: conversations with a common beginning form a tree, and trees fill sequences.

Suffixes: N all tokens, S segments or the tokens of a sequence, B sequences, C scored tokens, K conversations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

CATEGORIES: Final = tuple(
    f"{role} {reply}" for role in ("gated_update", "update", "answer") for reply in ("keeps", "writes")
)
"""The categories that are counted separately: a role, and whether the reply adds something."""
DECISION_TOKENS, DECISION_WEIGHT = 2, 3.0
"""The first tokens of a reply, which decide between keeping and writing, and their weight in the loss."""


@dataclass(frozen=True, slots=True)
class EncodedTrees:
    """Trees of conversations, one after the other.

    Attributes:
        ids_N: the token ids of all segments.
        segments_S4: one row per segment: tree index, prompt length, reply length, category index. A tree's first
            segment is the beginning that its conversations share, and has no reply.
    """

    ids_N: NDArray[numpy.uint32]
    segments_S4: NDArray[numpy.int32]

    @classmethod
    def load(cls, path: Path) -> EncodedTrees:
        """Read a file."""
        with numpy.load(path) as arrays:
            return cls(arrays["ids_N"], arrays["segments_S4"])

    def save(self, path: Path) -> None:
        """Write a file."""
        numpy.savez(path, ids_N=self.ids_N, segments_S4=self.segments_S4)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B sequences of S tokens, and the C tokens of replies that are scored."""

    ids_BS: Tensor
    positions_BS: Tensor
    trees_BS: Tensor
    branches_BS: Tensor
    predictor_positions_C: Tensor
    """The position in the flattened sequences of the token before each scored token."""
    targets_C: Tensor
    weights_C: Tensor
    conversations_C: Tensor
    category_ids_K: tuple[int, ...]
    """The index in `CATEGORIES` of each conversation."""
    tokens: int

    def to(self, device: str) -> TrainingBatch:
        """Return the batch on a device."""
        tensors = {
            name: value.to(device, non_blocking=True)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return TrainingBatch(**tensors, category_ids_K=self.category_ids_K, tokens=self.tokens)


def make_batches(trees: EncodedTrees, length: int, rows: int) -> Iterator[TrainingBatch]:
    """Yield all trees in order, in batches of `rows` sequences of `length` tokens; a single sequence is not padded.

    Conversations that do not fit into a sequence are dropped; so is a tree if none of its conversations fits.
    """
    packer = _SequencePacker(length)
    sequences: list[_SequencePacker] = []
    segment_ends = numpy.cumsum(trees.segments_S4[:, 1] + trees.segments_S4[:, 2])
    first_segments = numpy.flatnonzero(numpy.diff(trees.segments_S4[:, 0], prepend=-1))
    for first, last in zip(first_segments, [*first_segments[1:], len(segment_ends)], strict=True):
        token_start = int(segment_ends[first - 1]) if first else 0
        tree = trees.ids_N[token_start : segment_ends[last - 1]], trees.segments_S4[first:last]
        if not packer.add(*tree):
            sequences.append(packer)
            packer = _SequencePacker(length)
            packer.add(*tree)
        if len(sequences) == rows:
            yield _make_batch(sequences)
            sequences = []
    if packer.size:
        sequences.append(packer)
    if sequences:
        yield _make_batch(sequences + [_SequencePacker(length) for _ in range(rows - len(sequences))])


class _SequencePacker:
    """Packs trees into one sequence; its padding has the tree index -1."""

    def __init__(self, length: int) -> None:
        self.size = 0
        self.ids, self.positions, self.branches = (numpy.zeros(length, numpy.int64) for _ in range(3))
        self.trees = numpy.full(length, -1)
        self.scored: list[tuple[int, int]] = []
        """The start and end of each conversation's reply."""
        self.category_ids: list[int] = []

    def add(self, ids: NDArray[numpy.uint32], segments: NDArray[numpy.int32]) -> bool:
        """Add a tree, or to an empty sequence as much of it as fits; return False if it does not fit behind others."""
        sizes = segments[:, 1] + segments[:, 2]
        fitting_count = int((numpy.cumsum(sizes) <= len(self.ids) - self.size).sum())
        if fitting_count < len(segments) and self.size:
            return False
        if fitting_count < 2:
            return True
        trunk, start = int(sizes[0]), 0
        for branch, (tree, prompt, _, category) in enumerate(segments[:fitting_count].tolist()):
            segment_size = int(sizes[branch])
            target = slice(self.size, self.size + segment_size)
            first_position = trunk if branch else 0
            self.ids[target] = ids[start : start + segment_size]
            self.positions[target] = numpy.arange(first_position, first_position + segment_size)
            self.trees[target] = tree
            self.branches[target] = branch
            if branch:
                self.scored.append((self.size + prompt, self.size + segment_size))
                self.category_ids.append(category)
            self.size, start = self.size + segment_size, start + segment_size
        return True


def _make_batch(sequences: Sequence[_SequencePacker]) -> TrainingBatch:
    length = len(sequences[0].ids) if len(sequences) > 1 else sequences[0].size
    reply_spans = [
        (row * length + start, row * length + end)
        for row, sequence in enumerate(sequences)
        for start, end in sequence.scored
    ]
    scored_positions = numpy.concatenate([numpy.arange(start, end) for start, end in reply_spans])
    reply_positions = numpy.concatenate([numpy.arange(end - start) for start, end in reply_spans])
    ids_BS, positions_BS, trees_BS, branches_BS = (
        numpy.stack([getattr(sequence, name)[:length] for sequence in sequences])
        for name in ("ids", "positions", "trees", "branches")
    )
    return TrainingBatch(
        ids_BS=torch.from_numpy(ids_BS),
        positions_BS=torch.from_numpy(positions_BS),
        trees_BS=torch.from_numpy(trees_BS),
        branches_BS=torch.from_numpy(branches_BS),
        predictor_positions_C=torch.from_numpy(scored_positions - 1),
        targets_C=torch.from_numpy(ids_BS.reshape(-1)[scored_positions]),
        weights_C=torch.from_numpy(numpy.where(reply_positions < DECISION_TOKENS, DECISION_WEIGHT, 1.0)).float(),
        conversations_C=torch.from_numpy(
            numpy.repeat(numpy.arange(len(reply_spans)), [end - start for start, end in reply_spans])
        ),
        category_ids_K=tuple(category for sequence in sequences for category in sequence.category_ids),
        tokens=sum(sequence.size for sequence in sequences),
    )
