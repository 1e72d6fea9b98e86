"""Lays out documents up to a number of tokens: the units of a haystack in order, and insertions between them.

As in RULER, a document grows by one unit (a sentence, line or passage) at a time, and ends before the unit that would
make it too long. So it is shorter than requested by less than a unit, and the sample states the length it reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memagent_evaluation.samples import Needle
from memagent_graph.tokenizers import Tokenizer

_TAIL_CHARACTERS = 16
"""How much of the preceding text can change the number of tokens that a part has."""
_LATE_POSITION = 999_999
"""A position whose number has as many digits as any: for the largest possible number of tokens."""


@dataclass(frozen=True, slots=True)
class Haystack:
    """The text that insertions are hidden in."""

    units: Callable[[], Iterator[str]]
    """Yields sentences, lines or passages without end, the same ones at each call."""
    piece: Callable[[int, str], str]
    """Returns the text of a unit or an insertion, given its position among the document's parts."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """A text to put between the units of a haystack."""

    text: str
    depth: float
    """The fraction of the haystack's tokens (or units, if lengths count these) that precedes it, 0 to 1."""
    gold: str | None = None
    """The needle's gold string; None for a decoy, which is not evidence."""


@dataclass(frozen=True, slots=True)
class DocumentLayout:
    """A planned document. It gives the text any number of times."""

    haystack: Haystack
    insertions: tuple[Insertion, ...]
    """In the document's order."""
    slots: tuple[int, ...]
    """The index of the unit before which each insertion is."""
    units: int
    """The number of units of the haystack that the document has, from the first one on."""

    def pieces(self) -> Iterator[str]:
        """Yield the document's text in parts, without white space at its end."""
        previous = ""
        for part, _ in self._iter_parts():
            if previous:
                yield previous
            previous = part
        if previous := previous.rstrip():
            yield previous

    def needles(self) -> tuple[Needle, ...]:
        """Return the insertions that have gold strings as needles."""
        starts: list[tuple[Insertion, str, int]] = []
        characters = end = 0
        for part, insertion in self._iter_parts():
            if insertion is not None and insertion.gold is not None:
                starts.append((insertion, insertion.gold, characters + max(part.find(insertion.text), 0)))
            characters += len(part)
            end = len(part.rstrip()) - len(part)
        total = characters + end
        return tuple(Needle(insertion.text, gold, start / total) for insertion, gold, start in starts)

    def _iter_parts(self) -> Iterator[tuple[str, Insertion | None]]:
        """Yield the document's parts, each with its insertion, or None for a unit of the haystack."""
        position = inserted = 0
        for index, unit in enumerate(itertools.chain(itertools.islice(self.haystack.units(), self.units), [None])):
            while inserted < len(self.slots) and self.slots[inserted] <= index:
                insertion = self.insertions[inserted]
                yield self.haystack.piece(position, insertion.text), insertion
                position, inserted = position + 1, inserted + 1
            if unit is not None:
                yield self.haystack.piece(position, unit), None
                position += 1


def lay_out(
    haystack: Haystack, insertions: Sequence[Insertion], budget: int, tokenizer: Tokenizer
) -> tuple[DocumentLayout, int]:
    """Lay out the longest document of at most `budget` tokens: the insertions in a beginning of the haystack.

    Args:
        haystack: the text around the insertions.
        insertions: the texts to insert. If they alone have too many tokens, the document has nothing else.
        budget: the maximum number of tokens.
        tokenizer: what counts them.

    Returns:
        The layout, and the document's number of tokens.
    """
    ordered = tuple(sorted(insertions, key=lambda insertion: insertion.depth))
    reserved = [tokenizer.count(haystack.piece(_LATE_POSITION, insertion.text)) for insertion in ordered]
    hay_budget = max(0, budget - sum(reserved))
    slots: list[int] = []
    text = _TokenCounter(tokenizer)
    units = hay_tokens = 0
    reserved_left = sum(reserved)
    for unit in haystack.units():
        while len(slots) < len(ordered) and hay_tokens >= ordered[len(slots)].depth * hay_budget:
            reserved_left -= reserved[len(slots)]
            text.add(haystack.piece(units + len(slots), ordered[len(slots)].text))
            slots.append(units)
        piece = haystack.piece(units + len(slots), unit)
        tokens = text.count_added(piece)
        if text.tokens + tokens + reserved_left > budget:
            break
        text.add(piece, tokens)
        units, hay_tokens = units + 1, hay_tokens + tokens
    for insertion in ordered[len(slots) :]:
        text.add(haystack.piece(units + len(slots), insertion.text))
        slots.append(units)
    return DocumentLayout(haystack, ordered, tuple(slots), units), text.tokens


class _TokenCounter:
    """Counts the tokens of a text that grows by parts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = 0
        self._tokenizer = tokenizer
        self._tail = ""
        self._tail_tokens = 0

    def count_added(self, part: str) -> int:
        """Return how many tokens the text would gain from a part."""
        return self._tokenizer.count(self._tail + part) - self._tail_tokens

    def add(self, part: str, tokens: int | None = None) -> None:
        """Add a part; `tokens` is what `count_added` returned for it, if it was called."""
        self.tokens += self.count_added(part) if tokens is None else tokens
        self._tail = (self._tail + part)[-_TAIL_CHARACTERS:]
        self._tail_tokens = self._tokenizer.count(self._tail)
