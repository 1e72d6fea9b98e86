"""Computes the difference of two texts, word by word. Both texts can be restored from it.

Words are compared only where lines differ, so two memories of a thousand words take milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum

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
    if old == new:
        return [Change(DiffOp.EQUAL, new)] if new else []
    if len(old) + len(new) > _MAX_COMPARED_CHARS:
        return _join_neighbours([(DiffOp.DELETE, old), (DiffOp.INSERT, new)])
    pieces: list[tuple[DiffOp, str]] = []
    for op, left, right in _iter_changes(old.splitlines(keepends=True), new.splitlines(keepends=True)):
        if op == "equal":
            pieces.append((DiffOp.EQUAL, left))
            continue
        for word_op, deletion, insertion in _iter_changes(_TOKEN.findall(left), _TOKEN.findall(right)):
            if word_op == "equal":
                pieces.append((DiffOp.EQUAL, deletion))
            else:
                pieces += [(DiffOp.DELETE, deletion), (DiffOp.INSERT, insertion)]
    return _join_neighbours(pieces)


def _iter_changes(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield alternating parts: the tag ("equal" or another), the old text, and the new text."""
    matcher = SequenceMatcher(None, old, new, autojunk=len(old) * len(new) > _MAX_COMPARISONS)
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        yield tag, "".join(old[old_start:old_end]), "".join(new[new_start:new_end])


def _join_neighbours(pieces: Sequence[tuple[DiffOp, str]]) -> list[Change]:
    """Join neighbouring changes, for legibility also across one or two unchanged words between larger changes."""
    changes: list[Change] = []
    deletion = insertion = ""
    for index, (op, text) in enumerate(pieces):
        if op is DiffOp.EQUAL and not _is_short_gap(
            text, max(len(deletion), len(insertion)), pieces[index + 1 : index + 3]
        ):
            changes += _make_changes(deletion, insertion)
            deletion = insertion = ""
            equal_before = changes.pop().text if changes and changes[-1].op is DiffOp.EQUAL else ""
            if equal_before + text:
                changes.append(Change(op, equal_before + text))
            continue
        deletion += text if op is not DiffOp.INSERT else ""
        insertion += text if op is not DiffOp.DELETE else ""
    return changes + _make_changes(deletion, insertion)


def _is_short_gap(text: str, changed_before: int, next_pieces: Sequence[tuple[DiffOp, str]]) -> bool:
    changed_after = max((len(piece) for op, piece in next_pieces if op is not DiffOp.EQUAL), default=0)
    if "\n" in text or not changed_before or not changed_after:
        return False
    return len(text) <= min(changed_before, changed_after) and len(find_words(text)) <= _MAX_GAP_WORDS


def _make_changes(deletion: str, insertion: str) -> list[Change]:
    pairs = ((DiffOp.DELETE, deletion), (DiffOp.INSERT, insertion))
    return [Change(op, text) for op, text in pairs if text]
