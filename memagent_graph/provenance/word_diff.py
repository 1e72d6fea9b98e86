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
"""Above it, frequent pieces are no beginning of an equal part. The time would grow with the square of the length."""
_MAX_ISLAND_WORDS = 2
_MAX_CHARACTERS = 1 << 17
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


def _match(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield alternating parts: `equal` or another tag, the old text, the new text."""
    matcher = SequenceMatcher(None, old, new, autojunk=len(old) * len(new) > _MAX_COMPARISONS)
    for tag, i, j, k, m in matcher.get_opcodes():
        yield tag, "".join(old[i:j]), "".join(new[k:m])


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
