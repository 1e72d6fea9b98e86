"""ROUGE-L: how much of a wording an answer has in the same order, for answers that are sentences, such as summaries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

_WORD: Final = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff]|[^\W\u2e80-\u9fff\uf900-\ufaff_]+")
"""Letters and digits in a row; in scripts without spaces, each character."""


def rouge_l(answer: str, wordings: Iterable[str]) -> float:
    """F1 over the longest common subsequence of words, case folded, compared with the nearest of several wordings. 0 to
    1.
    """
    said = _words(answer)
    return max((_f1(said, _words(each)) for each in wordings), default=0.0)


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    common = _longest_common(said, wanted)
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def _longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence, a row of its table in one number (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for at, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << at
    whole = row = (1 << len(first)) - 1
    for word in second:
        matching = row & places.get(word, 0)
        row = (row + matching | row - matching) & whole
    return len(first) - row.bit_count()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
