"""Lays out documents up to a number of tokens: units of a haystack in order, and insertions between them.

As in RULER, a document grows by one unit (a sentence, line or passage) at a time, and ends before the unit that would
make it too long. So it has at most the requested tokens, and is short by less than a unit; the sample states its
length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from memagent_evaluation.samples import Needle
from memagent_graph.tokenizers import Tokenizer

_TAIL_CHARACTERS = 16
"""How much text before a part can change how many tokens the part has."""
_LATE_POSITION = 999_999
"""A position whose number has as many digits as any: for the largest possible number of tokens."""


class Haystack(Protocol):
    """The parts of a document besides insertions."""

    def units(self) -> Iterator[str]:
        """Sentences, lines or passages without end, the same at each call."""
        ...

    def piece(self, position: int, text: str) -> str:
        """Return the text of a unit or an insertion as the `position`-th part of the document."""
        ...


@dataclass(frozen=True, slots=True)
class Insertion:
    """Something to put between a haystack's units."""

    text: str
    depth: float
    """Its place: after this share of the haystack's tokens (or of its units, if these are counted), 0 to 1."""
    gold: str | None = None
    """The needle's gold string; None for a decoy, which is not evidence."""


@dataclass(frozen=True, slots=True)
class DocumentLayout:
    """A planned document: with the haystack, the text can be made from it any number of times."""

    insertions: tuple[Insertion, ...]
    """In the document's order."""
    slots: tuple[int, ...]
    """The index of the unit before which each insertion is."""
    units: int
    """How many units from the haystack's beginning are used."""

    def pieces(self, haystack: Haystack) -> Iterator[str]:
        """Yield the document's parts; white space at its end is left out."""
        previous = ""
        for part, _ in self._parts(haystack):
            if previous:
                yield previous
            previous = part
        if previous := previous.rstrip():
            yield previous

    def needles(self, haystack: Haystack) -> tuple[Needle, ...]:
        """Return the insertions with gold strings, and the places where they begin."""
        starts: list[tuple[Insertion, str, int]] = []
        characters = end = 0
        for part, insertion in self._parts(haystack):
            if insertion is not None and insertion.gold is not None:
                starts.append((insertion, insertion.gold, characters + max(part.find(insertion.text), 0)))
            characters += len(part)
            end = len(part.rstrip()) - len(part)
        total = characters + end
        return tuple(Needle(insertion.text, gold, start / total) for insertion, gold, start in starts)

    def _parts(self, haystack: Haystack) -> Iterator[tuple[str, Insertion | None]]:
        """Yield the document's parts, with the insertion if a part is one."""
        position = inserted = 0
        for number, unit in enumerate(itertools.chain(itertools.islice(haystack.units(), self.units), [None])):
            while inserted < len(self.slots) and self.slots[inserted] <= number:
                insertion = self.insertions[inserted]
                yield haystack.piece(position, insertion.text), insertion
                position, inserted = position + 1, inserted + 1
            if unit is not None:
                yield haystack.piece(position, unit), None
                position += 1


def least_tokens(haystack: Haystack, insertions: Sequence[Insertion], tokenizer: Tokenizer) -> int:
    """Return how many tokens a document with only the insertions has."""
    pieces = (haystack.piece(place, insertion.text) for place, insertion in enumerate(_in_order(insertions)))
    return tokenizer.count("".join(pieces).rstrip())


def lay_out(
    haystack: Haystack, insertions: Sequence[Insertion], budget: int, tokenizer: Tokenizer
) -> tuple[DocumentLayout, int]:
    """Return the longest document of at most `budget` tokens that is a beginning of the haystack with the insertions.

    Args:
        haystack: its units.
        insertions: what is between them; they alone must fit.
        budget: tokens.
        tokenizer: what counts them.

    Returns:
        The document, and its number of tokens.
    """
    ordered = _in_order(insertions)
    reserved = [tokenizer.count(haystack.piece(_LATE_POSITION, insertion.text)) for insertion in ordered]
    hay_budget = max(0, budget - sum(reserved))
    slots: list[int] = []
    text = _MeasuredText(tokenizer)
    units = hay_tokens = 0
    left = sum(reserved)
    for unit in haystack.units():
        while len(slots) < len(ordered) and hay_tokens >= ordered[len(slots)].depth * hay_budget:
            left -= reserved[len(slots)]
            text.add(haystack.piece(units + len(slots), ordered[len(slots)].text))
            slots.append(units)
        piece = haystack.piece(units + len(slots), unit)
        tokens = text.tokens_of(piece)
        if text.tokens + tokens + left > budget:
            break
        text.add(piece, tokens)
        units, hay_tokens = units + 1, hay_tokens + tokens
    for insertion in ordered[len(slots) :]:
        text.add(haystack.piece(units + len(slots), insertion.text))
        slots.append(units)
    return DocumentLayout(ordered, tuple(slots), units), text.tokens


class _MeasuredText:
    """The number of tokens of a text to which parts are added."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = 0
        self._tokenizer = tokenizer
        self._tail = ""
        self._tail_tokens = 0

    def tokens_of(self, part: str) -> int:
        """Return how many tokens a part would add."""
        return self._tokenizer.count(self._tail + part) - self._tail_tokens

    def add(self, part: str, tokens: int | None = None) -> None:
        """Add a part, whose tokens may be known."""
        self.tokens += self.tokens_of(part) if tokens is None else tokens
        self._tail = (self._tail + part)[-_TAIL_CHARACTERS:]
        self._tail_tokens = self._tokenizer.count(self._tail)


def _in_order(insertions: Sequence[Insertion]) -> tuple[Insertion, ...]:
    return tuple(sorted(insertions, key=lambda insertion: insertion.depth))
