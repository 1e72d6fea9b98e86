"""One optimizer step as a plan: which rows each rank forwards together, within a budget of tokens.

The plan is made from the whole step, the same on every rank; it depends on the rows' content, not on their order. At
every position all ranks have a micro-batch with the same number of rows, because the ranks synchronise there (sharded
weights and metrics are gathered) and need equal shapes. Padding rows of one prompt and one completion token, with a
loss weight of 0, fill the gaps. No row is left out, and none is cut.

Splitting a step this way changes no number: the loss weights (`advantages.py`) already belong to the whole step.
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
"""Tokens of a padding row: one of prompt and one of completion, the least that a loss can be computed from."""

_SLACK = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""How much fuller than ideal a micro-batch may be: rows do not divide evenly, and padding rows take space."""
_NEAR = 1.01
"""Plans within this ratio of the best are considered equal: one micro-batch more or less costs more."""
_BLOCK = 512
"""Tokens that are compared at once, which runs in C."""


class Layout(StrEnum):
    """The way in which a micro-batch is forwarded. It determines how many tokens the rows cost."""

    PADDED = "padded"
    """A rectangle: rows * (longest prompt + longest completion), as TRL pads the two apart."""

    PACKED = "packed"
    """Rows end to end: the sum of their lengths."""

    PREFIX_TREE = "prefix_tree"
    """Common prefixes are forwarded once: the tokens of the rows' trie, with all padding rows as one row."""


@dataclass(frozen=True, slots=True)
class PlannedMicroBatch:
    """The rows that one rank forwards at once, by index, and the number of padding rows after them."""

    rows: tuple[int, ...]
    padding_rows: int
    tokens: int
    """Tokens forwarded, padding and padding rows included."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: for each rank its micro-batches, the same number on every rank, the heaviest first."""

    layout: Layout
    micro_batches: tuple[tuple[PlannedMicroBatch, ...], ...] = field(repr=False)
    row_tokens: int
    """Tokens of all rows; shared ones count for each row."""

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
        return sum(_count_padding(self.layout, batch.padding_rows) for rank in self.micro_batches for batch in rank)


def plan_step(rows: Sequence[TrainingRow], *, ranks: int, token_budget: int, layout: Layout) -> StepPlan:
    """Distribute the rows of one optimizer step.

    Args:
        rows: all rows of the step.
        ranks: processes that train together.
        token_budget: the maximum number of tokens that a rank forwards at once, in the layout's count.
        layout: how a micro-batch is forwarded.

    Returns:
        Among the splits within 1 % of the shortest time, the one with the fewest micro-batches.

    Raises:
        TrainingError: a single row exceeds the budget; the message names its run.
    """
    check_lengths(rows, token_budget)
    order = sorted(range(len(rows)), key=lambda index: _sort_key(rows[index], layout))
    step = _Step([rows[index] for index in order], layout)
    if layout is Layout.PADDED:
        candidates = [_plan_padded_positions(step, ranks, token_budget)]
    else:
        split = _plan_packed_batches if layout is Layout.PACKED else _plan_tree_batches
        capacities = _compute_capacities(step, split, ranks, token_budget)
        candidates = [_plan_positions(step, split(step, capacity), ranks, token_budget) for capacity in capacities]
    costs = [sum(map(step.critical_tokens, positions)) for positions in candidates]
    near_best = [pair for pair in zip(candidates, costs, strict=True) if pair[1] <= _NEAR * min(costs)]
    best, _ = min(near_best, key=lambda pair: (len(pair[0]), pair[1]))
    return StepPlan(layout, _deal(step, best, ranks, order), sum(step.lengths))


def split_into_steps(
    groups: Sequence[RolloutGroup], *, groups_per_step: int, seed: int, steps: int | None = None
) -> list[tuple[RolloutGroup, ...]]:
    """Split groups into optimizer steps, whole groups only, each group in exactly one.

    The shuffle depends only on the seed and the groups' ids. The remaining groups make a last, smaller step, whose loss
    is a mean over fewer tokens; nothing is dropped. To get steps with equal numbers of useful groups, leave out those
    with a `find_drop_reason` first. With `steps`, there are that many, as equal in size as possible, and
    `groups_per_step` is ignored.

    Raises:
        TrainingError: two groups have the same id, or there are more steps than groups.
    """
    by_id = {group.group_id: group for group in groups}
    if len(by_id) < len(groups):
        name, count = Counter(group.group_id for group in groups).most_common(1)[0]
        raise TrainingError(f"{count} groups are named {name}", hint="Join them, or give each its own id.")
    shuffled = sorted(by_id)
    random.Random(seed).shuffle(shuffled)
    if steps is not None:
        if steps > len(shuffled):
            raise TrainingError(
                f"{len(shuffled)} groups for {steps} optimizer steps", hint="Collect more groups, or take fewer steps."
            )
        bounds = [len(shuffled) * index // steps for index in range(steps + 1)]
    else:
        bounds = [*range(0, len(shuffled), groups_per_step), len(shuffled)]
    return [tuple(by_id[name] for name in shuffled[start:end]) for start, end in pairwise(bounds)]


_Batch = list[int]
"""A micro-batch's rows, by their index in the canonical order."""


class _Step:
    """The rows of a step in canonical order, as lengths."""

    def __init__(self, rows: Sequence[TrainingRow], layout: Layout) -> None:
        self.layout = layout
        self.prompts = [len(row.conversation.prompt_ids_P) for row in rows]
        self.completions = [len(row.conversation.completion_ids_T) for row in rows]
        self.lengths = [sum(parts) for parts in zip(self.prompts, self.completions, strict=True)]
        self.shared = [0] * len(rows)
        """Tokens that each row shares with the previous row; in sorted order, everything that a trie shares."""
        if layout is Layout.PREFIX_TREE and rows:
            previous = _join_ids(rows[0])
            for index, row in enumerate(rows[1:], start=1):
                current = _join_ids(row)
                self.shared[index] = count_shared_tokens(previous, current)
                previous = current

    def tokens(self, batch: Sequence[int], padding_rows: int = 0) -> int:
        """Return the cost of a micro-batch; rows of a prefix tree must be neighbours."""
        if self.layout is Layout.PADDED:
            longest_prompt = max((self.prompts[row] for row in batch), default=1)
            longest_completion = max((self.completions[row] for row in batch), default=1)
            return (len(batch) + padding_rows) * (longest_prompt + longest_completion)
        real = sum(self.lengths[row] for row in batch) - sum(self.shared[row] for row in batch[1:])
        return real + _count_padding(self.layout, padding_rows)

    def critical_tokens(self, position: Sequence[_Batch]) -> int:
        """Return what the slowest rank forwards at one position, with batches filled up to the same number of rows."""
        rows = max(map(len, position))
        return max(self.tokens(batch, rows - len(batch)) for batch in position)


def _count_padding(layout: Layout, padding_rows: int) -> int:
    return PADDING_ROW_TOKENS * (min(padding_rows, 1) if layout is Layout.PREFIX_TREE else padding_rows)


def _join_ids(row: TrainingRow) -> array[int]:
    return row.conversation.prompt_ids_P + row.conversation.completion_ids_T


def _sort_key(row: TrainingRow, layout: Layout) -> tuple[object, ...]:
    """Return the canonical order: a trie's, or the longest first, and then by run, so that the given order does not
    matter.
    """
    prompt, completion = len(row.conversation.prompt_ids_P), len(row.conversation.completion_ids_T)
    identity = (row.run_id, row.conversation_index, row.advantage, row.weight)
    return (_join_ids(row), *identity) if layout is Layout.PREFIX_TREE else (-prompt - completion, -prompt, *identity)


def check_lengths(rows: Sequence[TrainingRow], token_budget: int) -> None:
    """Refuse rows that are too long for a rank even as the only row.

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


def _plan_padded_positions(step: _Step, ranks: int, budget: int) -> list[list[_Batch]]:
    """Return neighbours in the order of length, as many at once as the budget allows on every rank."""
    positions: list[list[_Batch]] = []
    start = 0
    while start < len(step.lengths):
        remaining = range(start, len(step.lengths))
        # One row per rank always fits. More rows cost more, except at the bounds of the shares.
        count, too_many = 1, -(-len(remaining) // ranks) + 1
        while count + 1 < too_many:
            middle = (count + too_many) // 2
            if step.critical_tokens(_split_evenly(remaining[: middle * ranks], ranks)) <= budget:
                count = middle
            else:
                too_many = middle
        positions.append(_split_evenly(remaining[: count * ranks], ranks))
        start += count * ranks
    return positions


def _split_evenly(rows: range, ranks: int) -> list[_Batch]:
    """Return neighbours in equal parts, one per rank."""
    return [list(rows[len(rows) * rank // ranks : len(rows) * (rank + 1) // ranks]) for rank in range(ranks)]


def _plan_packed_batches(step: _Step, capacity: int) -> list[_Batch]:
    """Put each row, the longest first, where it leaves the least space (best fit decreasing)."""
    batches: list[_Batch] = []
    free_space: list[tuple[int, int]] = []
    """Free tokens and number of each batch, the fullest first."""
    for row, length in enumerate(step.lengths):
        index = bisect_left(free_space, (length, 0))
        if index == len(free_space):
            free, number = capacity, len(batches)
            batches.append([])
        else:
            free, number = free_space.pop(index)
        batches[number].append(row)
        insort(free_space, (free - length, number))
    return batches


def _plan_tree_batches(step: _Step, capacity: int) -> list[_Batch]:
    """Return sequences of neighbours in the trie's order, as few as possible, cut where the fewest tokens are shared.

    With a cut before a row, the tokens that it shares with the previous row are forwarded again. With `added[p]` tokens
    of the trie of the first p rows, the rows from i to p cost shared[i] + added[p] - added[i]; the smallest cost up to
    p is the minimum over the starts i that still fit; a monotonic queue finds it in one pass.
    """
    added = [0]
    for length, shared in zip(step.lengths, step.shared, strict=True):
        added.append(added[-1] + length - shared)
    costs: list[tuple[int, int]] = [(0, 0)]
    """For the first p rows: tokens that are forwarded again, and batches."""
    cut_before = [0]
    starts: deque[tuple[int, int, int]] = deque()
    for end in range(1, len(added)):
        new = end - 1
        repeated, batches = costs[new]
        candidate = (repeated + step.shared[new], batches + 1, new)
        while starts and starts[-1] >= candidate:
            starts.pop()
        starts.append(candidate)
        while step.shared[starts[0][2]] + added[end] - added[starts[0][2]] > capacity:
            starts.popleft()
        best = starts[0]
        costs.append(best[:2])
        cut_before.append(best[2])
    batches_from_last: list[_Batch] = []
    end = len(step.lengths)
    while end:
        batches_from_last.append(list(range(cut_before[end], end)))
        end = cut_before[end]
    return batches_from_last[::-1]


_Split = Callable[[_Step, int], list[_Batch]]


def _compute_capacities(step: _Step, split: _Split, ranks: int, budget: int) -> list[int]:
    """Return how full micro-batches may be: the budget, or less if that gives the ranks more equal shares."""
    if ranks == 1 or not step.lengths:
        return [budget]
    fullest = split(step, budget)
    tokens = sum(map(step.tokens, fullest))
    fewest = -(-len(fullest) // ranks)
    ideals = [budget / (1 + _SLACK[-1]), *(tokens / (ranks * positions) for positions in (fewest, fewest + 1))]
    longest = max(step.lengths)
    return sorted({min(budget, max(longest, int(ideal * (1 + slack)) + 1)) for ideal in ideals for slack in _SLACK})


def _plan_positions(step: _Step, batches: list[_Batch], ranks: int, budget: int) -> list[list[_Batch]]:
    """Return micro-batches with similar numbers of rows at the same position, one per rank.

    If padding rows would exceed the budget, the batches with the most rows are halved until they do not.
    """
    sized = [(step.tokens(batch), batch) for batch in batches]
    while True:
        sized.sort(key=lambda pair: (-len(pair[1]), -pair[0], pair[1]))
        positions = [sized[start : start + ranks] for start in range(0, len(sized), ranks)]
        for position in positions:
            position.extend([(0, [])] * (ranks - len(position)))
        halved: list[tuple[int, _Batch]] = []
        for (_, most_rows), *others in positions:
            if any(
                tokens + _count_padding(step.layout, len(most_rows) - len(rest)) > budget for tokens, rest in others
            ):
                middle = len(most_rows) // 2
                halved += [(step.tokens(half), half) for half in (most_rows[:middle], most_rows[middle:])]
        if not halved:
            return [[batch for _, batch in position] for position in positions]
        replaced = {batch[0] for _, batch in halved}
        sized = [pair for pair in sized if pair[1][0] not in replaced] + halved


def _deal(
    step: _Step, positions: Sequence[Sequence[_Batch]], ranks: int, order: Sequence[int]
) -> tuple[tuple[PlannedMicroBatch, ...], ...]:
    """Distribute positions over ranks, the largest batch to the rank with the least so far.

    The heaviest position is first, so that a budget that is too large for the device fails at once.
    """
    ranks_batches: list[list[PlannedMicroBatch]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for position in sorted(positions, key=lambda position: (-step.critical_tokens(position), position)):
        rows = max(map(len, position))
        planned = [
            PlannedMicroBatch(
                rows=tuple(order[row] for row in batch),
                padding_rows=rows - len(batch),
                tokens=step.tokens(batch, rows - len(batch)),
            )
            for batch in position
        ]
        lightest_first = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for rank, batch in zip(lightest_first, sorted(planned, key=lambda batch: -batch.tokens), strict=True):
            ranks_batches[rank].append(batch)
            loads[rank] += batch.tokens
    return tuple(map(tuple, ranks_batches))


def count_shared_tokens(left: array[int], right: array[int]) -> int:
    """Return how many tokens two sequences share at their beginning; a prefix tree saves these."""
    shorter = min(len(left), len(right))
    for start in range(0, shorter, _BLOCK):
        end = min(start + _BLOCK, shorter)
        if left[start:end] != right[start:end]:
            return next(index for index in range(start, end) if left[index] != right[index])
    return shorter
