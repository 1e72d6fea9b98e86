"""Hints for names that were mistyped: which known names are near."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_NEAREST = 3
_LEAST_LIKENESS = 0.5
"""Below it, a guess is mostly wrong; see `difflib.get_close_matches`."""


def did_you_mean(name: str, known: Iterable[str], then: str = "", *, prefix: str = "") -> str:
    """Return a hint such as "Did you mean gated? There are: ...", without the question if no known name is near.

    Args:
        name: the unknown name.
        known: the names that exist.
        then: the rest of the hint.
        prefix: shown before each name, as in "my_tasks.py:".
    """
    near = difflib.get_close_matches(name, known, n=_NEAREST, cutoff=_LEAST_LIKENESS)
    guess = f"Did you mean {' or '.join(prefix + each for each in near)}?" if near else ""
    return f"{guess} {then}".strip()
