"""Lays out the rows of a micro-batch as model inputs, in three layouts with different costs and the same result.

- `padded`: prompts left-padded, completions right-padded, one sequence per row, as TRL's GRPOTrainer has them.
- `packed`: rows one after the other in one sequence, with positions that start again at each row.
- `prefix_tree`: common prefixes of rows are forwarded once, as a trie, also in one sequence.

Sorting puts rows with a common prefix next to each other, so a row adds to the trie only the tokens after the prefix
that it shares with the previous row. In this order, which is depth first, a token is attended to by the tokens up to
the end of its subtree, and by no others. Packed rows are such a trie without shared prefixes. The nodes of a
`MicroBatch` define which tokens see each other; `tree_attention.py` computes only those pairs, and `scoring.py` turns
the model's output into log-probs per row.

Letters: B rows, P and T their longest prompt and completion, S sequences of N tokens that are forwarded, C completion
tokens that are scored (rows that share a token and its whole prefix share its score).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from memagent_training.algorithm.planner import count_shared_tokens


@dataclass(frozen=True, slots=True)
class Node:
    """The tokens from `start` to `end`, a sequence without a branch in which each token sees those before it."""

    start: int
    end: int
    subtree_end: int
    """The end of the node's descendants: each token from `end` to here sees all tokens of the node."""


@dataclass(slots=True)
class Trie:
    """Rows in one sequence. Lists have one entry per token of the sequence."""

    ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """Each token's position: the number of tokens before it in its row."""
    ends: list[int] = field(default_factory=list)
    """The end of each token's subtree: token j sees token i if i <= j < ends[i]."""
    paths: dict[int, list[int]] = field(default_factory=dict)
    """By row index: the indices of the row's tokens in the sequence, in order."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes in the order of the sequence. Adjacent tokens with the same subtree end form one node."""
        nodes: list[Node] = []
        start = 0
        for subtree_end, tokens in groupby(self.ends):
            end = start + sum(1 for _ in tokens)
            nodes.append(Node(start, end, subtree_end))
            start = end
        return tuple(nodes)


def lay_out_in_sequence(rows: Sequence[array[int]]) -> Trie:
    """Lay out the rows one after the other, without shared prefixes."""
    return _make_trie(rows, range(len(rows)), [0] * len(rows))


def lay_out_as_tree(rows: Sequence[array[int]]) -> Trie:
    """Lay out each common prefix once; every row has at least one token."""
    order = sorted(range(len(rows)), key=lambda index: rows[index])
    return _make_trie(rows, order, [0, *(count_shared_tokens(rows[a], rows[b]) for a, b in pairwise(order))])


def _make_trie(rows: Sequence[array[int]], order: Sequence[int], shared_lengths: Sequence[int]) -> Trie:
    """Return the rows in this order as a trie; each shares a prefix of `shared_lengths` with the previous one."""
    trie = Trie()
    path: list[int] = []
    for row_index, shared_length in zip(order, shared_lengths, strict=True):
        row, start = rows[row_index], len(trie.ids)
        for index in path[shared_length:]:
            trie.ends[index] = start
        path = path[:shared_length] + list(range(start, start + len(row) - shared_length))
        trie.ids += row[shared_length:]
        trie.depths += range(shared_length, len(row))
        trie.ends += [0] * (len(row) - shared_length)
        trie.paths[row_index] = path
    for index in path:
        trie.ends[index] = len(trie.ids)
    return trie


class TokenRow(Protocol):
    """One conversation's token ids, for example a `TrainingConversation`. The prompt has at least one token."""

    @property
    def prompt_ids_P(self) -> Sequence[int]:  # noqa: N802  a shape, as everywhere
        """The prompt."""

    @property
    def completion_ids_T(self) -> Sequence[int]:  # noqa: N802
        """The tokens that the policy sampled; may be empty."""


@dataclass(frozen=True, slots=True)
class IdRow:
    """A `TokenRow` of token ids alone."""

    prompt_ids_P: tuple[int, ...]
    completion_ids_T: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Model inputs for some rows, and the positions at which their completion tokens are predicted."""

    layout: str
    input_ids_SN: Tensor
    position_ids_SN: Tensor
    padding_mask_SN: Tensor | None
    """1 where there is a token; None except in the padded layout."""
    nodes: tuple[Node, ...]
    """The nodes, which define the tokens of the one sequence that see each other; empty in the padded layout."""
    scored_indices_C: Tensor
    """Index into the flattened inputs of the token before each scored token."""
    scored_ids_C: Tensor
    score_index_BT: Tensor
    """The index of the scored token for each row's completion token; C if the row has none."""
    longest: int
    """Tokens of the longest row."""


def pad_rows(rows: Sequence[TokenRow], *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return left-padded prompts with their mask, and right-padded completions with theirs, as TRL's `_compute_loss`.

    Masks are 1 where there is a token.
    """
    prompts = _pad_rectangle([row.prompt_ids_P for row in rows], "left", device)
    return *prompts, *_pad_rectangle([row.completion_ids_T for row in rows], "right", device)


def lay_out(rows: Sequence[TokenRow], layout: str, *, device: torch.device | str = "cpu") -> MicroBatch:
    """Return the model inputs of a micro-batch.

    Args:
        rows: at least one row; every row has at least one prompt token.
        layout: "padded", "packed" or "prefix_tree".
        device: the device for the tensors.
    """
    if layout == "padded":
        return _lay_out_padded(rows, device)
    ids = [array("q", [*row.prompt_ids_P, *row.completion_ids_T]) for row in rows]
    return _lay_out_trie(rows, (lay_out_in_sequence if layout == "packed" else lay_out_as_tree)(ids), layout, device)


def _pad_rectangle(rows: Sequence[Sequence[int]], side: str, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return rows as ids and mask of equal width, padded on one side with zeros, which tokens of a row never see."""
    ids = [torch.tensor(list(row), dtype=torch.long, device=device) for row in rows]
    masks = [torch.ones_like(row) for row in ids]
    return (
        pad_sequence(ids, batch_first=True, padding_side=side),
        pad_sequence(masks, batch_first=True, padding_side=side),
    )


def _lay_out_padded(rows: Sequence[TokenRow], device: torch.device | str) -> MicroBatch:
    prompt_ids, prompt_mask, completion_ids, completion_mask = pad_rows(rows, device=device)
    mask_SN = torch.cat([prompt_mask, completion_mask], dim=1)
    is_completion_BT = completion_mask.bool()
    index_SN = torch.arange(mask_SN.numel(), device=mask_SN.device).view_as(mask_SN)
    predictor_BT = index_SN[:, prompt_ids.shape[1] :] - 1
    score_index_BT = torch.full_like(completion_ids, int(is_completion_BT.sum()))
    score_index_BT[is_completion_BT] = torch.arange(int(is_completion_BT.sum()), device=mask_SN.device)
    return MicroBatch(
        layout="padded",
        input_ids_SN=torch.cat([prompt_ids, completion_ids], dim=1),
        position_ids_SN=(mask_SN.cumsum(1) - 1).clamp(min=0),
        padding_mask_SN=mask_SN,
        nodes=(),
        scored_indices_C=predictor_BT[is_completion_BT],
        scored_ids_C=completion_ids[is_completion_BT],
        score_index_BT=score_index_BT,
        longest=int(mask_SN.sum(1).max()),
    )


def _lay_out_trie(rows: Sequence[TokenRow], trie: Trie, layout: str, device: torch.device | str) -> MicroBatch:
    score_indices = [[-1] * max(len(row.completion_ids_T) for row in rows) for _ in rows]
    score_by_token: dict[int, int] = {}
    predictor_indices: list[int] = []
    for row_index, path in trie.paths.items():
        prompt_length = len(rows[row_index].prompt_ids_P)
        for column, (predictor, token) in enumerate(zip(path[prompt_length - 1 :], path[prompt_length:], strict=False)):
            score_index = score_by_token.setdefault(token, len(predictor_indices))
            if score_index == len(predictor_indices):
                predictor_indices.append(predictor)
            score_indices[row_index][column] = score_index
    score_index_BT = torch.tensor(score_indices, dtype=torch.long).view(len(rows), -1)
    return MicroBatch(
        layout=layout,
        input_ids_SN=torch.tensor([trie.ids], device=device),
        position_ids_SN=torch.tensor([trie.depths], device=device),
        padding_mask_SN=None,
        nodes=trie.nodes,
        scored_indices_C=torch.tensor(predictor_indices, dtype=torch.long, device=device),
        scored_ids_C=torch.tensor([trie.ids[token] for token in score_by_token], dtype=torch.long, device=device),
        score_index_BT=score_index_BT.where(score_index_BT >= 0, len(predictor_indices)).to(device),
        longest=max(trie.depths) + 1,
    )
