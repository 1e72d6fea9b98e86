"""Plans an optimizer step: which rows each rank forwards together, within a token budget.

Every rank makes the same plan from the whole step; it depends on the rows' content, not on their order. At every
position all ranks have a micro-batch with the same number of rows, because the ranks synchronise there (sharded weights
and metrics are gathered) and need equal shapes. Padding rows of one prompt and one completion token, with a loss weight
of 0, fill the gaps. No row is left out, and none is cut.

The split does not change the result: the loss weights (`advantages.py`) already refer to the whole step.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from memagent_training.algorithm.advantages import TrainingRow
from memagent_training.data.rollouts import RolloutGroup
from memagent_training.training_errors import TrainingError

PADDING_ROW_TOKENS = 2
"""Tokens of a padding row: one prompt and one completion token, the minimum for which a loss can be computed."""

_SLACK_FRACTIONS = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""How much larger than ideal a micro-batch may be, as fractions: rows do not divide evenly, and padding takes space."""
_NEAR_BEST_RATIO = 1.01
"""Plans that take at most this multiple of the shortest time count as equal: an additional micro-batch costs more."""
_BLOCK_TOKENS = 512
"""Tokens that are compared in one operation on arrays, which runs in C."""


class Layout(StrEnum):
    """The layout in which a micro-batch is forwarded. It determines how many tokens the rows cost."""

    PADDED = "padded"
    """A rectangle: rows * (longest prompt + longest completion), as TRL pads prompts and completions separately."""

    PACKED = "packed"
    """Rows end to end: the sum of their lengths."""

    PREFIX_TREE = "prefix_tree"
    """Common prefixes are forwarded once: the tokens of the rows' trie, with all padding rows as one row."""


@dataclass(frozen=True, slots=True)
class PlannedMicroBatch:
    """The rows that one rank forwards at once, by index, and the number of padding rows after them."""

    rows: tuple[int, ...]
    padding_row_count: int
    tokens: int
    """Tokens forwarded, padding and padding rows included."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The micro-batches of one optimizer step for each rank: equally many on every rank, the heaviest first."""

    layout: Layout
    micro_batches: tuple[tuple[PlannedMicroBatch, ...], ...] = field(repr=False)
    row_tokens: int
    """Tokens of all rows; shared tokens count once per row."""

    @property
    def forwarded_tokens(self) -> int:
        """Tokens forwarded over all ranks."""
        return sum(batch.tokens for rank in self.micro_batches for batch in rank)

    @property
    def critical_tokens(self) -> int:
        """The step's time in tokens: at each position, the tokens of the slowest rank."""
        return sum(max(batch.tokens for batch in position) for position in zip(*self.micro_batches, strict=True))

    @property
    def padding_tokens(self) -> int:
        """Forwarded tokens that belong to no row. In a prefix tree, only padding rows are padding."""
        if self.layout is Layout.PADDED:
            return self.forwarded_tokens - self.row_tokens
        return sum(
            _count_padding_tokens(self.layout, batch.padding_row_count) for rank in self.micro_batches for batch in rank
        )


def plan_step(rows: Sequence[TrainingRow], *, ranks: int, token_budget: int, layout: Layout) -> StepPlan:
    """Distribute the rows of one optimizer step over ranks and micro-batches.

    Args:
        rows: all rows of the step.
        ranks: processes that train together.
        token_budget: the maximum number of tokens that a rank forwards at once, in the layout's count.
        layout: the layout in which micro-batches are forwarded.

    Returns:
        Among the splits within 1 % of the shortest time, the one with the fewest micro-batches.

    Raises:
        TrainingError: a single row exceeds the budget; the message names its run.
    """
    require_rows_fit(rows, token_budget)
    order = sorted(range(len(rows)), key=lambda index: _make_sort_key(rows[index], layout))
    row_lengths = _RowLengths([rows[index] for index in order], layout)
    if layout is Layout.PADDED:
        candidates = [_plan_padded_positions(row_lengths, ranks, token_budget)]
    else:
        split = _plan_packed_batches if layout is Layout.PACKED else _plan_tree_batches
        capacities = _compute_capacities(row_lengths, split, ranks, token_budget)
        candidates = [
            _plan_positions(row_lengths, split(row_lengths, capacity), ranks, token_budget) for capacity in capacities
        ]
    costs = [sum(map(row_lengths.count_critical_tokens, positions)) for positions in candidates]
    near_best = [pair for pair in zip(candidates, costs, strict=True) if pair[1] <= _NEAR_BEST_RATIO * min(costs)]
    best, _ = min(near_best, key=lambda pair: (len(pair[0]), pair[1]))
    return StepPlan(layout, _assign_to_ranks(row_lengths, best, ranks, order), sum(row_lengths.totals))


def split_into_steps(
    groups: Sequence[RolloutGroup], *, groups_per_step: int, seed: int, steps: int | None = None
) -> list[tuple[RolloutGroup, ...]]:
    """Split groups into optimizer steps, whole groups only, each group in exactly one.

    The shuffle depends only on the seed and the groups' ids. The remaining groups form a last, smaller step, whose loss
    is a mean over fewer tokens; no group is dropped. For steps with equal numbers of useful groups, leave out groups
    with a `find_drop_reason` first. With `steps`, there are that many steps, of sizes as equal as possible, and
    `groups_per_step` is ignored.

    Raises:
        TrainingError: two groups have the same id, or there are more steps than groups.
    """
    groups_by_id = {group.group_id: group for group in groups}
    if len(groups_by_id) < len(groups):
        group_id, count = Counter(group.group_id for group in groups).most_common(1)[0]
        raise TrainingError(f"{count} groups are named {group_id}", hint="Join them, or give each its own id.")
    shuffled = sorted(groups_by_id)
    random.Random(seed).shuffle(shuffled)
    if steps is not None:
        if steps > len(shuffled):
            raise TrainingError(
                f"{len(shuffled)} groups for {steps} optimizer steps", hint="Collect more groups, or take fewer steps."
            )
        bounds = [len(shuffled) * index // steps for index in range(steps + 1)]
    else:
        bounds = [*range(0, len(shuffled), groups_per_step), len(shuffled)]
    return [tuple(groups_by_id[group_id] for group_id in shuffled[start:end]) for start, end in pairwise(bounds)]


_Batch = list[int]
"""A micro-batch's rows, by their index in the canonical order."""


class _RowLengths:
    """The lengths of a step's rows, in canonical order."""

    def __init__(self, rows: Sequence[TrainingRow], layout: Layout) -> None:
        self.layout = layout
        self.prompt_lengths = [len(row.conversation.prompt_ids_P) for row in rows]
        self.completion_lengths = [len(row.conversation.completion_ids_T) for row in rows]
        self.totals = [sum(parts) for parts in zip(self.prompt_lengths, self.completion_lengths, strict=True)]
        self.shared_tokens = [0] * len(rows)
        """The tokens that each row shares with the previous one; in sorted order, these are all that a trie shares."""
        if layout is Layout.PREFIX_TREE and rows:
            previous = _join_ids(rows[0])
            for index, row in enumerate(rows[1:], start=1):
                current = _join_ids(row)
                self.shared_tokens[index] = count_shared_tokens(previous, current)
                previous = current

    def count_tokens(self, batch: Sequence[int], padding_row_count: int = 0) -> int:
        """Return the forwarded tokens of a micro-batch; in a prefix tree, its rows must be neighbours."""
        if self.layout is Layout.PADDED:
            longest_prompt = max((self.prompt_lengths[row] for row in batch), default=1)
            longest_completion = max((self.completion_lengths[row] for row in batch), default=1)
            return (len(batch) + padding_row_count) * (longest_prompt + longest_completion)
        row_tokens = sum(self.totals[row] for row in batch) - sum(self.shared_tokens[row] for row in batch[1:])
        return row_tokens + _count_padding_tokens(self.layout, padding_row_count)

    def count_critical_tokens(self, position: Sequence[_Batch]) -> int:
        """Return the tokens of the slowest rank at one position, where padding rows give all batches the same size."""
        row_count = max(map(len, position))
        return max(self.count_tokens(batch, row_count - len(batch)) for batch in position)


def _count_padding_tokens(layout: Layout, padding_row_count: int) -> int:
    return PADDING_ROW_TOKENS * (min(padding_row_count, 1) if layout is Layout.PREFIX_TREE else padding_row_count)


def _join_ids(row: TrainingRow) -> array[int]:
    return row.conversation.prompt_ids_P + row.conversation.completion_ids_T


def _make_sort_key(row: TrainingRow, layout: Layout) -> tuple[object, ...]:
    """Return the key of the canonical order: a trie's, or longest first; then by run, not by the given order."""
    prompt, completion = len(row.conversation.prompt_ids_P), len(row.conversation.completion_ids_T)
    identity = (row.run_id, row.conversation_index, row.advantage, row.weight)
    return (_join_ids(row), *identity) if layout is Layout.PREFIX_TREE else (-prompt - completion, -prompt, *identity)


def require_rows_fit(rows: Sequence[TrainingRow], token_budget: int) -> None:
    """Refuse rows that exceed the token budget even alone in a micro-batch.

    Raises:
        TrainingError: a row exceeds the budget; the message names its run.
    """
    for row in rows:
        tokens = len(row.conversation.prompt_ids_P) + len(row.conversation.completion_ids_T)
        if tokens > token_budget:
            raise TrainingError(
                f"a conversation of {tokens:,} tokens exceeds token_budget, {token_budget:,}",
                hint=f"Set at least {tokens} (--set token_budget={tokens}), or leave such runs out (--max-tokens).",
                run_id=row.run_id,
                chunk_index=row.conversation.chunk_index,
            )


def _plan_padded_positions(row_lengths: _RowLengths, ranks: int, budget: int) -> list[list[_Batch]]:
    """Return positions of rows with neighbouring lengths, with as many rows as the budget allows on every rank."""
    positions: list[list[_Batch]] = []
    start = 0
    while start < len(row_lengths.totals):
        remaining = range(start, len(row_lengths.totals))
        # One row per rank always fits. More rows cost more, except at the bounds of the shares.
        rows_per_rank, too_many = 1, -(-len(remaining) // ranks) + 1
        while rows_per_rank + 1 < too_many:
            candidate_count = (rows_per_rank + too_many) // 2
            if row_lengths.count_critical_tokens(_split_evenly(remaining[: candidate_count * ranks], ranks)) <= budget:
                rows_per_rank = candidate_count
            else:
                too_many = candidate_count
        positions.append(_split_evenly(remaining[: rows_per_rank * ranks], ranks))
        start += rows_per_rank * ranks
    return positions


def _split_evenly(rows: range, ranks: int) -> list[_Batch]:
    """Split neighbouring rows into equal parts, one per rank."""
    return [list(rows[len(rows) * rank // ranks : len(rows) * (rank + 1) // ranks]) for rank in range(ranks)]


def _plan_packed_batches(row_lengths: _RowLengths, capacity: int) -> list[_Batch]:
    """Put each row, the longest first, into the batch where it leaves the least space (best fit decreasing)."""
    batches: list[_Batch] = []
    free_space: list[tuple[int, int]] = []
    """The free tokens and the index of each batch, the fullest first."""
    for row, length in enumerate(row_lengths.totals):
        index = bisect_left(free_space, (length, 0))
        if index == len(free_space):
            free, batch_index = capacity, len(batches)
            batches.append([])
        else:
            free, batch_index = free_space.pop(index)
        batches[batch_index].append(row)
        insort(free_space, (free - length, batch_index))
    return batches


def _plan_tree_batches(row_lengths: _RowLengths, capacity: int) -> list[_Batch]:
    """Return the fewest batches of neighbouring rows in the trie's order, cut where the fewest tokens are shared.

    After a cut before a row, the tokens that it shares with the previous row are forwarded again. If the trie of the
    first p rows has trie_sizes[p] tokens, the rows from i to p cost shared[i] + trie_sizes[p] - trie_sizes[i]. The
    smallest cost up to p is the minimum over the starts i that still fit; a monotonic queue finds it in one pass.
    """
    trie_sizes = [0]
    for length, shared in zip(row_lengths.totals, row_lengths.shared_tokens, strict=True):
        trie_sizes.append(trie_sizes[-1] + length - shared)
    costs: list[tuple[int, int]] = [(0, 0)]
    """For the first p rows: the tokens that are forwarded again, and the number of batches."""
    cut_before = [0]
    possible_starts: deque[tuple[int, int, int]] = deque()
    for end in range(1, len(trie_sizes)):
        row = end - 1
        repeated, batches = costs[row]
        candidate = (repeated + row_lengths.shared_tokens[row], batches + 1, row)
        while possible_starts and possible_starts[-1] >= candidate:
            possible_starts.pop()
        possible_starts.append(candidate)
        while (
            row_lengths.shared_tokens[possible_starts[0][2]] + trie_sizes[end] - trie_sizes[possible_starts[0][2]]
            > capacity
        ):
            possible_starts.popleft()
        best_start = possible_starts[0]
        costs.append(best_start[:2])
        cut_before.append(best_start[2])
    batches_from_last: list[_Batch] = []
    end = len(row_lengths.totals)
    while end:
        batches_from_last.append(list(range(cut_before[end], end)))
        end = cut_before[end]
    return batches_from_last[::-1]


_Split = Callable[[_RowLengths, int], list[_Batch]]


def _compute_capacities(row_lengths: _RowLengths, split: _Split, ranks: int, budget: int) -> list[int]:
    """Return token limits of micro-batches to try: the budget, or lower ones that may balance the ranks better."""
    if ranks == 1 or not row_lengths.totals:
        return [budget]
    fullest_batches = split(row_lengths, budget)
    tokens = sum(map(row_lengths.count_tokens, fullest_batches))
    fewest_positions = -(-len(fullest_batches) // ranks)
    ideal_sizes = [
        budget / (1 + _SLACK_FRACTIONS[-1]),
        *(tokens / (ranks * positions) for positions in (fewest_positions, fewest_positions + 1)),
    ]
    longest_row = max(row_lengths.totals)
    return sorted(
        {
            min(budget, max(longest_row, int(ideal_size * (1 + slack)) + 1))
            for ideal_size in ideal_sizes
            for slack in _SLACK_FRACTIONS
        }
    )


def _plan_positions(row_lengths: _RowLengths, batches: list[_Batch], ranks: int, budget: int) -> list[list[_Batch]]:
    """Return micro-batches with similar numbers of rows at the same position, one per rank.

    If padding rows would exceed the budget, the batches with the most rows are halved until they do not.
    """
    sized_batches = [(row_lengths.count_tokens(batch), batch) for batch in batches]
    while True:
        sized_batches.sort(key=lambda pair: (-len(pair[1]), -pair[0], pair[1]))
        positions = [sized_batches[start : start + ranks] for start in range(0, len(sized_batches), ranks)]
        for position in positions:
            position.extend([(0, [])] * (ranks - len(position)))
        half_batches: list[tuple[int, _Batch]] = []
        for (_, most_rows), *other_batches in positions:
            if any(
                tokens + _count_padding_tokens(row_lengths.layout, len(most_rows) - len(other_rows)) > budget
                for tokens, other_rows in other_batches
            ):
                middle = len(most_rows) // 2
                half_batches += [
                    (row_lengths.count_tokens(half), half) for half in (most_rows[:middle], most_rows[middle:])
                ]
        if not half_batches:
            return [[batch for _, batch in position] for position in positions]
        replaced_first_rows = {batch[0] for _, batch in half_batches}
        sized_batches = [pair for pair in sized_batches if pair[1][0] not in replaced_first_rows] + half_batches


def _assign_to_ranks(
    row_lengths: _RowLengths, positions: Sequence[Sequence[_Batch]], ranks: int, order: Sequence[int]
) -> tuple[tuple[PlannedMicroBatch, ...], ...]:
    """Assign the batches of each position to ranks, the largest batch to the rank with the fewest tokens so far.

    The heaviest position comes first, so that a budget that is too large for the device fails at once.
    """
    batches_by_rank: list[list[PlannedMicroBatch]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for position in sorted(positions, key=lambda position: (-row_lengths.count_critical_tokens(position), position)):
        row_count = max(map(len, position))
        position_batches = [
            PlannedMicroBatch(
                rows=tuple(order[row] for row in batch),
                padding_row_count=row_count - len(batch),
                tokens=row_lengths.count_tokens(batch, row_count - len(batch)),
            )
            for batch in position
        ]
        lightest_first = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for rank, batch in zip(lightest_first, sorted(position_batches, key=lambda batch: -batch.tokens), strict=True):
            batches_by_rank[rank].append(batch)
            loads[rank] += batch.tokens
    return tuple(map(tuple, batches_by_rank))


def count_shared_tokens(left: array[int], right: array[int]) -> int:
    """Return the length of two sequences' common prefix, which a prefix tree forwards once."""
    shorter = min(len(left), len(right))
    for start in range(0, shorter, _BLOCK_TOKENS):
        end = min(start + _BLOCK_TOKENS, shorter)
        if left[start:end] != right[start:end]:
            return next(index for index in range(start, end) if left[index] != right[index])
    return shorter
