"""How many tokens sequences share at their beginning; a prefix tree saves these."""

from __future__ import annotations

from array import array

_BLOCK = 512
"""The comparison runs in C."""


def shared_prefix(left: array[int], right: array[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    shorter = min(len(left), len(right))
    for start in range(0, shorter, _BLOCK):
        end = min(start + _BLOCK, shorter)
        if left[start:end] != right[start:end]:
            return next(place for place in range(start, end) if left[place] != right[place])
    return shorter
