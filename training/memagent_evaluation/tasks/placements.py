"""Lays out documents up to a number of tokens: the units of a haystack in order, and insertions between them.

As in RULER, a document grows by one unit (a sentence, line or passage) at a time, and ends before the unit that would
make it too long. So it is shorter than requested by less than a unit, and the sample states the length that it reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memagent_evaluation.samples import Needle
from memagent_graph.tokenizers import Tokenizer

_TAIL_CHARACTERS = 16
"""The characters of the preceding text that can change the number of tokens of a part."""
_LATE_POSITION = 999_999
"""A position with as many digits as any, for the largest possible number of tokens."""


@dataclass(frozen=True, slots=True)
class Haystack:
    """The text that insertions are hidden in."""

    iter_units: Callable[[], Iterator[str]]
    """Yields sentences, lines or passages without end, the same ones at each call."""
    format_part: Callable[[int, str], str]
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
    """The plan of a document, whose text can be iterated any number of times."""

    haystack: Haystack
    insertions: tuple[Insertion, ...]
    """The inserted texts, in the document's order."""
    slots: tuple[int, ...]
    """For each insertion, the index of the unit that follows it."""
    unit_count: int
    """The number of the haystack's first units that the document has."""

    def iter_pieces(self) -> Iterator[str]:
        """Yield the document's text in parts, without white space at its end."""
        previous = ""
        for part, _ in self._iter_parts():
            if previous:
                yield previous
            previous = part
        if previous := previous.rstrip():
            yield previous

    def find_needles(self) -> tuple[Needle, ...]:
        """Return the insertions that have gold strings as needles."""
        needle_starts: list[tuple[Insertion, str, int]] = []
        characters = trailing_space = 0
        for part, insertion in self._iter_parts():
            if insertion is not None and insertion.gold is not None:
                needle_starts.append((insertion, insertion.gold, characters + max(part.find(insertion.text), 0)))
            characters += len(part)
            trailing_space = len(part) - len(part.rstrip())
        document_characters = characters - trailing_space
        return tuple(
            Needle(insertion.text, gold, start / document_characters) for insertion, gold, start in needle_starts
        )

    def _iter_parts(self) -> Iterator[tuple[str, Insertion | None]]:
        """Yield the document's parts, each with its insertion, or None for a unit of the haystack."""
        position = insertion_index = 0
        for unit_index, unit in enumerate(
            itertools.chain(itertools.islice(self.haystack.iter_units(), self.unit_count), [None])
        ):
            while insertion_index < len(self.slots) and self.slots[insertion_index] <= unit_index:
                insertion = self.insertions[insertion_index]
                yield self.haystack.format_part(position, insertion.text), insertion
                position, insertion_index = position + 1, insertion_index + 1
            if unit is not None:
                yield self.haystack.format_part(position, unit), None
                position += 1


def lay_out(
    haystack: Haystack, insertions: Sequence[Insertion], budget: int, tokenizer: Tokenizer
) -> tuple[DocumentLayout, int]:
    """Lay out the longest document of at most `budget` tokens: insertions among the first units of the haystack.

    Args:
        haystack: the text around the insertions.
        insertions: the texts to insert. If they alone have more tokens, the document has no other text.
        budget: the maximum number of tokens.
        tokenizer: counts the tokens.

    Returns:
        The layout, and the document's number of tokens.
    """
    sorted_insertions = tuple(sorted(insertions, key=lambda insertion: insertion.depth))
    insertion_tokens = [
        tokenizer.count(haystack.format_part(_LATE_POSITION, insertion.text)) for insertion in sorted_insertions
    ]
    hay_budget = max(0, budget - sum(insertion_tokens))
    slots: list[int] = []
    counter = _TokenCounter(tokenizer)
    unit_count = hay_tokens = 0
    tokens_reserved = sum(insertion_tokens)
    for unit in haystack.iter_units():
        while len(slots) < len(sorted_insertions) and hay_tokens >= sorted_insertions[len(slots)].depth * hay_budget:
            tokens_reserved -= insertion_tokens[len(slots)]
            counter.add(haystack.format_part(unit_count + len(slots), sorted_insertions[len(slots)].text))
            slots.append(unit_count)
        part = haystack.format_part(unit_count + len(slots), unit)
        tokens = counter.count_added(part)
        if counter.tokens + tokens + tokens_reserved > budget:
            break
        counter.add(part, tokens)
        unit_count, hay_tokens = unit_count + 1, hay_tokens + tokens
    for insertion in sorted_insertions[len(slots) :]:
        counter.add(haystack.format_part(unit_count + len(slots), insertion.text))
        slots.append(unit_count)
    return DocumentLayout(haystack, sorted_insertions, tuple(slots), unit_count), counter.tokens


class _TokenCounter:
    """Counts the tokens of a text that grows by parts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = 0
        self._tokenizer = tokenizer
        self._tail = ""
        self._tail_tokens = 0

    def count_added(self, part: str) -> int:
        """Return the number of tokens that a part would add to the text."""
        return self._tokenizer.count(self._tail + part) - self._tail_tokens

    def add(self, part: str, tokens: int | None = None) -> None:
        """Add a part; `tokens` is the result of `count_added` for it, if known."""
        self.tokens += self.count_added(part) if tokens is None else tokens
        self._tail = (self._tail + part)[-_TAIL_CHARACTERS:]
        self._tail_tokens = self._tokenizer.count(self._tail)
