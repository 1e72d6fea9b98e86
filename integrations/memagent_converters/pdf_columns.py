"""The order of a page's lines where its columns were written row by row, as some programs do.

Such a line runs over two columns, with a wide gap in it. Lines in a row whose gaps lie over each other are columns if
they read as prose: filled, and beginning with small letters as often as sentences go on. What else has gaps is a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import Final

_LINE: Final = re.compile(r"[^\r\n\ufffe]*[^\s\ufffe]\ufffe?")
"""A line may end with pdfium's hyphen instead of a line's end."""
_MOST_LINES: Final = 1000
_WIDE: Final = 1.2
"""A gap, by the height of its line."""
FEWEST_ROWS: Final = 4
_FEWEST_CHARACTERS: Final = 15
_FILLED: Final = 0.6
_MOST_BEGINNINGS: Final = 0.7
"""The share of a column's lines that begin as sentences and cells do."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a page's text, from `begin` to `end`, its place from left to right, and the wide gaps in it."""

    begin: int
    end: int
    left: float
    right: float
    gaps: tuple[tuple[int, float, float], ...] = ()
    """The character after each, and where it begins and ends on the page."""


Box = tuple[float, float, float, float]


def columns_apart(text: str, box: Callable[[int], Box]) -> list[tuple[int, int]]:
    """Return the parts of a page's text in reading order: all of it, where no line runs over columns.

    Args:
        text: the page's, with a line's end after each line.
        box: returns the left, bottom, right and top of a character.
    """
    lines = [_measured(text, *match.span(), box) for match in islice(_LINE.finditer(text), _MOST_LINES)]
    ordered = _ordered(text, lines) if len(lines) < _MOST_LINES else lines
    return [(line.begin, line.end) for line in ordered] if ordered != lines else [(0, len(text))]


def _measured(text: str, begin: int, end: int, box: Callable[[int], Box]) -> Line:
    gaps = []
    for at in (at for at in range(begin + 1, end - 1) if text[at] == " "):
        (_, bottom, left, top), right = box(at - 1), box(at + 1)[0]
        if right - left > _WIDE * (top - bottom):
            gaps.append((at + 1, left, right))
    return Line(begin, end, box(begin)[0], box(end - 1)[2], tuple(gaps))


def _ordered(text: str, lines: list[Line]) -> list[Line]:
    """Return the lines, those that run over columns cut in parts and the parts column by column."""
    for first, line in enumerate(lines):
        for gap in line.gaps:
            left, right, last = _sides(lines[first:], gap)
            if min(len(left), len(right)) >= FEWEST_ROWS and _is_prose(text, left) and _is_prose(text, right):
                after = _ordered(text, lines[first + last :])
                return [*lines[:first], *_ordered(text, left), *_ordered(text, right), *after]
    return lines


def _sides(lines: Sequence[Line], gap: tuple[int, float, float]) -> tuple[list[Line], list[Line], int]:
    """Return the parts of lines on the two sides of a gap that goes on below, and how many lines these are."""
    _, begin, end = gap
    left, right = [], []
    for number, line in enumerate(lines):
        if line.right <= end and line.left < begin:
            left.append(line)
            begin = max(begin, line.right)
        elif line.left >= begin and line.right > end:
            right.append(line)
            end = min(end, line.left)
        else:
            over = next((each for each in line.gaps if each[1] < end and each[2] > begin), None)
            if over is None:
                return left, right, number
            at, begin, end = over[0], max(begin, over[1]), min(end, over[2])
            left.append(replace(line, end=at - 1, right=over[1], gaps=tuple(g for g in line.gaps if g[0] < at)))
            right.append(replace(line, begin=at, left=over[2], gaps=tuple(g for g in line.gaps if g[0] > at)))
    return left, right, len(lines)


def _is_prose(text: str, lines: Sequence[Line]) -> bool:
    widths = [line.right - line.left for line in lines]
    beginnings = sum(text[line.begin].isupper() or not text[line.begin].isalpha() for line in lines)
    return (
        median(line.end - line.begin for line in lines) >= _FEWEST_CHARACTERS
        and median(widths) >= _FILLED * max(widths)
        and beginnings <= _MOST_BEGINNINGS * len(lines)
    )
