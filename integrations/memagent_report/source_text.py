"""Extracts quotes from a document's text, and finds quotes in it: sentences, pages, exact matches.

A quote is found if the text contains it character by character after `stated_facts.normalized` has normalized both:
Unicode NFKC, one kind of quotation mark, apostrophe and dash, single spaces, no invisible characters. Letter case,
words, digits and all other punctuation must be the same.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from memagent_graph.documents import DocumentRef, DocumentStore, SourceMark
from memagent_graph.provenance.places import section_at
from memagent_report.stated_facts import normalized

LONGEST_QUOTE: Final = 600
"""In characters. A longer sentence is quoted in part; see `SourceQuote.is_whole`."""
_END: Final = re.compile(
    r"[.!?][\"'\u201d\u2019)\]]*(?=\s+[^\sa-z])|[。！？][」』”’）]*"  # the end of a sentence
    r"|\n[^\S\n]*(?=\n)|\n(?=[^\S\n]*(?:[-*\u2022|#]|\d+[.)]\s|[A-Z][\w /-]{0,30}:[ \t]))"  # a list, a table, a field
)
_ABBREVIATION: Final = re.compile(
    r"(?:^|[\s(])(?:[A-Z]|[A-Za-z]\.[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|No|Nos|Fig|Figs|Sec|Art|vs|cf|al|etc|Inc|Ltd|Co|Corp|Jr|Sr|pp|p|"
    r"Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec|approx|ca|Rev|Gen|Col|Vol|v)$"
)
_REACH: Final = 1500
"""How many characters on each side of a passage are searched for the ends of its sentence."""


@dataclass(frozen=True)
class SourceText:
    """The text of a document, and the positions at which its pages begin."""

    text: str = field(repr=False)
    sections: Sequence[SourceMark] = ()

    @classmethod
    def of(cls, store: DocumentStore, document: DocumentRef) -> SourceText:
        """Load the text from the store.

        Raises:
            DocumentError: the text is no longer in the store.
        """
        size = store.size(document)
        return cls(store.read_bytes(document, 0, size or 0).decode(errors="replace"), store.sections(document))

    def page(self, start: int) -> str | None:
        """Return the page or source of a character; None if the document has neither."""
        return section_at(self.sections, start)

    def sentence(self, start: int, end: int) -> tuple[int, int, bool]:
        """Return the whole sentences, list items or table rows around a passage.

        Returns:
            The first character, the end, and whether they are whole. Surrounding white space is left out. If they are
            longer than `LONGEST_QUOTE`, they are cut at word boundaries around the passage.
        """
        low, high = max(0, start - _REACH), min(len(self.text), end + _REACH)
        ends = [low] if low == 0 else []
        ends += [match.end() for match in _END.finditer(self.text, low, high) if self._really_ends(match)]
        begin = max((place for place in ends if place <= start), default=low)
        finish = min((place for place in ends if place >= max(end, start + 1)), default=high)
        begin, finish = self._trimmed(begin, finish)
        if finish - begin <= max(LONGEST_QUOTE, end - start):
            return begin, finish, True
        spare = max(0, LONGEST_QUOTE - (end - start)) // 2
        begin, finish = self._at_words(max(begin, start - spare), min(finish, end + spare))
        return begin, finish, False

    def is_whole(self, start: int, end: int) -> bool:
        """Whether a passage begins and ends where a sentence, a list item or a table row does."""
        begin, finish, whole = self.sentence(start, end)
        if (begin, finish) == (start, end):
            return whole
        # Several sentences: only the first and the last matter, and these may be longer than a quote.
        first, last = self.sentence(start, start + 1), self.sentence(max(start, end - 1), end)
        return (first[0] == start or not first[2]) and (last[1] == end or not last[2])

    def find(self, quote: str, near: int = 0) -> tuple[int, int] | None:
        """Return first character and end of the occurrence of a quote nearest to `near`; None if it does not occur."""
        wanted = normalized(quote)
        if not wanted:
            return None
        if self.text[near : near + len(quote)] == quote:
            return near, near + len(quote)
        form, places = self._normalized_text
        best: tuple[int, int] | None = None
        at = form.find(wanted)
        while at >= 0:
            found = places[at], places[at + len(wanted) - 1] + 1
            if best is None or abs(found[0] - near) < abs(best[0] - near):
                best = found
            at = form.find(wanted, at + 1)
        return best

    def _really_ends(self, match: re.Match[str]) -> bool:
        if match[0][0] not in ".":
            return True
        return _ABBREVIATION.search(self.text, max(0, match.start() - 8), match.start()) is None

    def _trimmed(self, start: int, end: int) -> tuple[int, int]:
        while start < end and self.text[start].isspace():
            start += 1
        while end > start and self.text[end - 1].isspace():
            end -= 1
        return start, end

    def _at_words(self, start: int, end: int) -> tuple[int, int]:
        while start > 0 and start < end and not self.text[start - 1].isspace():
            start += 1
        while end < len(self.text) and end > start and not self.text[end].isspace():
            end -= 1
        return self._trimmed(start, end)

    @cached_property
    def _normalized_text(self) -> tuple[str, array[int]]:
        """Return the normalized text and, for each of its characters, its position in the original text."""
        pieces: list[str] = []
        places: array[int] = array("Q")
        for match in re.finditer(r"\S+", self.text):
            if pieces:
                pieces.append(" ")
                places.append(match.start())
            word = match[0]
            if word.isascii():
                pieces.append(word)
                places.extend(range(match.start(), match.end()))
                continue
            formed = normalized(word)
            if not formed and pieces:
                pieces.pop()
                places.pop()
                continue
            pieces.append(formed)
            if len(formed) == len(word):
                places.extend(range(match.start(), match.end()))
            else:
                places.extend(_spread(word, formed, match.start()))
        return "".join(pieces), places


def _spread(word: str, formed: str, start: int) -> list[int]:
    """Return, for each character of a normalized word, its approximate position in the original text."""
    places: list[int] = []
    for index in range(len(word)):
        places += [start + index] * max(0, len(normalized(word[: index + 1])) - len(places))
    return (places + [start + len(word) - 1] * len(formed))[: len(formed)]
