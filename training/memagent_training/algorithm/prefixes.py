"""How many tokens sequences share at their beginnings, which is what a prefix tree saves."""

from __future__ import annotations

from array import array

_BLOCK = 512
"""Compared at C speed."""


def shared_prefix(left: array[int], right: array[int]) -> int:
    """How many tokens two sequences begin with in common."""
    shorter = min(len(left), len(right))
    for start in range(0, shorter, _BLOCK):
        end = min(start + _BLOCK, shorter)
        if left[start:end] != right[start:end]:
            return next(place for place in range(start, end) if left[place] != right[place])
    return shorter
