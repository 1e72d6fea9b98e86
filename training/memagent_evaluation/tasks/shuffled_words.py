"""Texts of many words in random order, as streams, and the number of words for a text of a given number of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from memagent_evaluation.samples import Needle
from memagent_evaluation.tasks.counting import TokenCounter
from memagent_evaluation.tasks.seeding import Order
from memagent_graph.tokenizers import Tokenizer

_CORRECTIONS = 8
_GOOD_SHARE = 5000


@dataclass(frozen=True, slots=True)
class ShuffledWords:
    """A text of words in random order. The word at a place is computed from counts; no list is stored."""

    header: str
    size: int
    """The number of words after the header."""
    word: Callable[[int], str]
    """The word of an entry, 0 to `size` - 1."""
    numbered: bool
    order: str
    """The seed of the order."""

    def entries(self) -> Iterator[tuple[str, str]]:
        """The words in order, each alone and in its form in the text."""
        for place, entry in enumerate(Order(self.size, random.Random(self.order)), 1):
            word = self.word(entry)
            yield word, f"{place}. {word}" if self.numbered else word

    def pieces(self) -> Iterator[str]:
        """The text."""
        gap = self.header
        for _, shown in self.entries():
            yield gap + shown
            gap = " "

    def measured(self, tokenizer: Tokenizer, gold: Sequence[str]) -> tuple[int, tuple[Needle, ...]]:
        """How many tokens the text has, and the first place of each gold word."""
        counter = TokenCounter(tokenizer)
        missing = set(gold)
        found: list[tuple[str, str, int]] = []
        gap = self.header
        for word, shown in self.entries():
            if word in missing:
                missing.remove(word)
                found.append((shown, word, counter.characters + len(gap)))
            counter.add(gap + shown)
            gap = " "
        return counter.total(), tuple(Needle(shown, word, at / counter.characters) for shown, word, at in found)


def longest(
    room: int, draft: Callable[[int], ShuffledWords | None], tokenizer: Tokenizer, gold: Sequence[str]
) -> tuple[ShuffledWords, tuple[Needle, ...]] | None:
    """The longest text of at most `room` tokens among drafts, with its needles; None if there is none.

    `draft` makes a text with an estimated number of tokens or slightly fewer. Each is counted as a whole, and the next
    one is corrected by the difference, until one is short by at most a 5,000th.
    """
    target = room
    best: tuple[int, ShuffledWords, tuple[Needle, ...]] | None = None
    tried = set()
    for _ in range(_CORRECTIONS):
        text = draft(target)
        if text is None or target in tried:
            break
        tried.add(target)
        tokens, needles = text.measured(tokenizer, gold)
        if tokens <= room and (best is None or tokens > best[0]):
            best = tokens, text, needles
        if 0 <= room - tokens <= room / _GOOD_SHARE:
            break
        target += room - tokens
    return best[1:] if best is not None else None
