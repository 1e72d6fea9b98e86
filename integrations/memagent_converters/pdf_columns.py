"""The order of a page's lines where its columns were written row by row, as some programs do.

Such lines have wide gaps after which the text goes on at the same places. What stands there is a column if it reads as
prose: it fills its column, and not every line of it begins as a sentence or a cell does. Otherwise it is a table.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from math import inf
from statistics import median
from typing import Final, NamedTuple

_LINE: Final = re.compile(r"[^\r\n\ufffe]*[^\s\ufffe]\ufffe?")
"""A line may end with pdfium's hyphen instead of a line's end."""
_WIDE: Final = 1.2
"""A gap, by the height of its line."""
FEWEST_ROWS: Final = 4
_NARROWEST: Final = 40
"""A column, in points."""
_FEWEST_CHARACTERS: Final = 15
_FILLED: Final = 0.6
_MOST_BEGINNINGS: Final = 0.7


class _Part(NamedTuple):
    """A part of a line without a wide gap: its characters, and where on the page it begins and ends."""

    begin: int
    end: int
    left: float
    right: float


def columns_apart(text: str, box: Callable[[int], tuple[float, float, float, float]]) -> list[tuple[int, int]]:
    """Return the parts of a page's text in reading order: all of it, if it has no such columns.

    Args:
        text: the page's.
        box: returns the left, bottom, right and top of a character.
    """
    lines = [[*_parts(text, *match.span(), box)] for match in _LINE.finditer(text)]
    columns: list[int] = []
    for left, count in sorted(Counter(round(part.left) for line in lines for part in line[1:]).items()):
        if count >= FEWEST_ROWS and (not columns or left > columns[-1] + _NARROWEST):
            columns.append(left)

    def column(part: _Part) -> int:
        return bisect(columns, part.left + 1)

    ordered: list[_Part] = []
    for fits, rows in groupby(lines, lambda line: all(part.right < [*columns, inf][column(part)] for part in line)):
        parts = [part for line in rows for part in line]
        sides = [[part for part in parts if column(part) == number] for number in range(len(columns) + 1)]
        is_apart = fits and all(_is_prose(text, side) for side in sides)
        ordered += chain(*sides) if is_apart else parts
    in_order = ordered == sorted(ordered)
    return [(0, len(text))] if in_order else [(part.begin, part.end) for part in ordered]


def _parts(text: str, begin: int, end: int, box: Callable[[int], tuple[float, float, float, float]]) -> Iterator[_Part]:
    first = box(begin)[0]
    for at in (at for at in range(begin + 1, end - 1) if text[at] == " "):
        (_, bottom, right, top), following = box(at - 1), box(at + 1)[0]
        if following - right > _WIDE * (top - bottom):
            yield _Part(begin, at, first, right)
            begin, first = at + 1, following
    yield _Part(begin, end, first, box(end - 1)[2])


def _is_prose(text: str, lines: Sequence[_Part]) -> bool:
    if len(lines) < FEWEST_ROWS:
        return False
    widths = [line.right - line.left for line in lines]
    beginnings = sum(text[line.begin].isupper() or not text[line.begin].isalpha() for line in lines)
    return (
        median(line.end - line.begin for line in lines) >= _FEWEST_CHARACTERS
        and median(widths) >= _FILLED * max(widths)
        and beginnings <= _MOST_BEGINNINGS * len(lines)
    )
