"""Computes the difference of two texts, word by word. Both texts can be restored from it.

Words are compared only where lines differ, so two memories of a thousand words take milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum

import regex

from memagent_graph.words import WORD, find_words

_TOKEN = regex.compile(rf"(?:{WORD.pattern}|\S)[^\S\n]*|\s")
_MAX_COMPARISONS = 4_000
_MAX_DEPTH = 20
_MAX_ISLAND_WORDS = 2
_MAX_CHARACTERS = 1 << 21
"""Maximum characters of both texts. The comparison takes a hundred bytes per word."""


class DiffOp(StrEnum):
    """The kind of a change."""

    EQUAL = "equal"
    INSERT = "insert"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Change:
    """A part of a text that is unchanged, inserted or deleted."""

    op: DiffOp
    text: str


def compare_words(old: str, new: str) -> list[Change]:
    """Return the difference of two texts.

    The joined texts of EQUAL and INSERT are exactly `new`, and the joined texts of EQUAL and DELETE exactly `old`.
    Neighbours have different ops, and a deletion is before the insertion that replaces it.
    """
    if old == new:
        return [Change(DiffOp.EQUAL, new)] if new else []
    if len(old) + len(new) > _MAX_CHARACTERS:
        return _tidy([(DiffOp.DELETE, old), (DiffOp.INSERT, new)])
    pieces: list[tuple[DiffOp, str]] = []
    for op, left, right in _match(old.splitlines(keepends=True), new.splitlines(keepends=True)):
        if op == "equal":
            pieces.append((DiffOp.EQUAL, left))
            continue
        for word_op, deletion, insertion in _match(_TOKEN.findall(left), _TOKEN.findall(right)):
            if word_op == "equal":
                pieces.append((DiffOp.EQUAL, deletion))
            else:
                pieces += [(DiffOp.DELETE, deletion), (DiffOp.INSERT, insertion)]
    return _tidy(pieces)


def count_words(text: str) -> int:
    """Return the number of words in a text, or of characters in scripts without spaces."""
    return len(find_words(text))


def _match(old: Sequence[str], new: Sequence[str], depth: int = 0) -> Iterator[tuple[str, str, str]]:
    """Yield alternating parts: `equal` or `replace`, the old text, the new text.

    Long parts are divided at pieces that occur once in both texts (patience diff). Otherwise texts with little in
    common would need time proportional to the square of their length.
    """
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    if start:
        yield "equal", "".join(old[:start]), "".join(new[:start])
    left, right = old[start : len(old) - end], new[start : len(new) - end]
    if len(left) * len(right) <= _MAX_COMPARISONS:
        for tag, i, j, k, m in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
            yield ("equal" if tag == "equal" else "replace"), "".join(left[i:j]), "".join(right[k:m])
    elif depth == _MAX_DEPTH or not (anchors := _common_once(left, right)):
        yield "replace", "".join(left), "".join(right)
    else:
        i = k = 0
        for j, m in (*anchors, (len(left), len(right))):
            yield from _match(left[i:j], right[k:m], depth + 1)
            if j < len(left):
                yield "equal", left[j], right[m]
            i, k = j + 1, m + 1
    if end:
        yield "equal", "".join(old[len(old) - end :]), "".join(new[len(new) - end :])


def _common_once(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    """Return the longest series of pieces that occur once in both texts, in the same order, as positions."""
    counts, others = Counter(left), Counter(right)
    positions = {piece: index for index, piece in enumerate(right)}
    pairs = [
        (index, positions[piece])
        for index, piece in enumerate(left)
        if counts[piece] == 1 and others[piece] == 1 and not piece.isspace()
    ]
    # The longest increasing subsequence of positions on the right, by patience sorting.
    ends: list[int] = []
    best: list[int] = []
    before: list[int] = []
    for number, (_, position) in enumerate(pairs):
        length = bisect_left(ends, position)
        before.append(best[length - 1] if length else -1)
        ends[length : length + 1] = [position]
        best[length : length + 1] = [number]
    series: list[tuple[int, int]] = []
    number = best[-1] if best else -1
    while number >= 0:
        series.append(pairs[number])
        number = before[number]
    return series[::-1]


def _tidy(pieces: Sequence[tuple[DiffOp, str]]) -> list[Change]:
    """Join neighbours, also across one or two unchanged words between larger changes, which is easier to read."""
    changes: list[Change] = []
    deletion = insertion = ""
    for index, (op, text) in enumerate(pieces):
        if op is DiffOp.EQUAL and not _is_island(
            text, max(len(deletion), len(insertion)), pieces[index + 1 : index + 3]
        ):
            changes += _flush(deletion, insertion)
            deletion = insertion = ""
            before = changes.pop().text if changes and changes[-1].op is DiffOp.EQUAL else ""
            if before + text:
                changes.append(Change(op, before + text))
            continue
        deletion += text if op is not DiffOp.INSERT else ""
        insertion += text if op is not DiffOp.DELETE else ""
    return changes + _flush(deletion, insertion)


def _is_island(text: str, changed_before: int, following: Sequence[tuple[DiffOp, str]]) -> bool:
    changed_after = max((len(piece) for op, piece in following if op is not DiffOp.EQUAL), default=0)
    if "\n" in text or not changed_before or not changed_after:
        return False
    return len(text) <= min(changed_before, changed_after) and count_words(text) <= _MAX_ISLAND_WORDS


def _flush(deletion: str, insertion: str) -> list[Change]:
    pairs = ((DiffOp.DELETE, deletion), (DiffOp.INSERT, insertion))
    return [Change(op, text) for op, text in pairs if text]
