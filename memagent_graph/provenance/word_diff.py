"""Computes the difference of two texts, word by word. Both texts can be restored from it.

Words are compared only where lines differ, so two memories of a thousand words take milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import zip_longest

import regex

from memagent_graph.words import WORD, find_words

_TOKEN = regex.compile(rf"(?:{WORD.pattern}|\S)[^\S\n]*|\s")
_MAX_COMPARISONS = 9_000_000
"""Above this, frequent pieces do not start an equal part, because the time grows with the square of the length."""
_MAX_GAP_WORDS = 2
_MAX_COMPARED_CHARS = 1 << 17
"""Longer texts are not compared."""


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
    pairs = [(old, new)]
    if len(old) + len(new) <= _MAX_COMPARED_CHARS:
        pairs = []
        for left, right in _iter_changes(old.splitlines(keepends=True), new.splitlines(keepends=True)):
            is_equal = left == right
            pairs += [(left, right)] if is_equal else _iter_changes(_TOKEN.findall(left), _TOKEN.findall(right))
    changes: list[Change] = []
    deletion = insertion = ""
    for (left, right), next_pair in zip_longest(pairs, pairs[1:], fillvalue=("", "")):
        if left != right or _is_short_gap(left, (deletion, insertion), next_pair):
            deletion += left
            insertion += right
            continue
        changes += _make_changes(deletion, insertion)
        deletion = insertion = ""
        equal_before = changes.pop().text if changes and changes[-1].op is DiffOp.EQUAL else ""
        changes.append(Change(DiffOp.EQUAL, equal_before + left))
    return changes + _make_changes(deletion, insertion)


def _iter_changes(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield alternating parts, equal and different ones: the old text and the new text."""
    matcher = SequenceMatcher(None, old, new, autojunk=len(old) * len(new) > _MAX_COMPARISONS)
    for _, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        yield "".join(old[old_start:old_end]), "".join(new[new_start:new_end])


def _is_short_gap(text: str, change_before: tuple[str, str], next_pair: tuple[str, str]) -> bool:
    """Return whether unchanged text is one or two words between larger changes, which are more legible as one."""
    changed_before = max(map(len, change_before))
    changed_after = max(map(len, next_pair)) if next_pair[0] != next_pair[1] else 0
    if "\n" in text or not changed_before or not changed_after:
        return False
    return len(text) <= min(changed_before, changed_after) and len(find_words(text)) <= _MAX_GAP_WORDS


def _make_changes(deletion: str, insertion: str) -> list[Change]:
    pairs = ((DiffOp.DELETE, deletion), (DiffOp.INSERT, insertion))
    return [Change(op, text) for op, text in pairs if text]
