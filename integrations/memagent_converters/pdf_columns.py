"""The order of a page's lines where its columns were written row by row, as some programs do.

Lines of two columns have a wide gap at the same place. If the text on one side of the gap is prose, it is a column: its
lines are full, and some of them continue a sentence. Otherwise the lines are rows of a table.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from math import inf
from statistics import median
from typing import Final

_LINE: Final = re.compile(r"[^\r\n\ufffe]*[^\s\ufffe]\ufffe?")  # or with a hyphen of pdfium's
FEWEST_ROWS: Final = 4
_Part = tuple[int, int, float, float]  # its first character, the one after it, left and right


def columns_apart(text: str, box: Callable[[int], tuple[float, float, float]]) -> list[tuple[int, int]]:
    """Return the parts of a page's text in reading order: all of it, if it has no such columns.

    `box` returns where on the page a character begins and ends, and its height, in points.
    """
    lines = [[*_parts(text, *match.span(), box)] for match in _LINE.finditer(text)]
    columns: list[int] = []
    for left, count in sorted(Counter(round(part[2]) for line in lines for part in line[1:]).items()):
        if count >= FEWEST_ROWS and (not columns or left > columns[-1] + 40):  # closer ones are indented lines
            columns.append(left)

    def column(part: _Part) -> int:
        return bisect(columns, part[2] + 1)

    ordered: list[_Part] = []
    for fits, rows in groupby(lines, lambda line: all(part[3] < [*columns, inf][column(part)] for part in line)):
        parts = [*chain(*rows)]
        sides = [[part for part in parts if column(part) == number] for number in range(len(columns) + 1)]
        ordered += chain(*sides) if fits and all(_is_prose(text, side) for side in sides) else parts
    return [(0, len(text))] if ordered == sorted(ordered) else [part[:2] for part in ordered]


def _parts(text: str, begin: int, end: int, box: Callable[[int], tuple[float, float, float]]) -> Iterator[_Part]:
    left = box(begin)[0]
    for at in (at for at in range(begin + 1, end - 1) if text[at] == " "):
        (_, right, height), following = box(at - 1), box(at + 1)[0]
        if following - right > 1.2 * height:
            yield begin, at, left, right
            begin, left = at + 1, following
    yield begin, end, left, box(end - 1)[1]


def _is_prose(text: str, lines: Sequence[_Part]) -> bool:
    if len(lines) < FEWEST_ROWS or median(end - begin for begin, end, *_ in lines) < 15:
        return False
    widths = [right - left for *_, left, right in lines]
    beginnings = sum(text[begin].isupper() or not text[begin].isalpha() for begin, *_ in lines)
    return median(widths) >= 0.6 * max(widths) and beginnings <= 0.7 * len(lines)
