"""A document's text as quotes are taken from it and found in it again: sentences, pages, exact matches.

A quote counts as found if it is in the text character by character, after both were brought in the form of
`stated_facts.one_form`: Unicode NFKC, one kind of quotation mark, apostrophe and dash, single spaces, and no invisible
characters. Letter case, words, digits and all other punctuation must be the same.
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
from memagent_graph.reports.stated_facts import one_form

LONGEST_QUOTE: Final = 600
"""Characters. A longer sentence is quoted in part, which `SourceQuote.is_whole` says."""
_END: Final = re.compile(
    r"[.!?][\"'\u201d\u2019)\]]*(?=\s+[^\sa-z])|[。！？][」』”’）]*"  # the end of a sentence
    r"|\n[^\S\n]*(?=\n)|\n(?=[^\S\n]*(?:[-*\u2022|#]|\d+[.)]\s|[A-Z][\w /-]{0,30}:[ \t]))"  # a list, a table, a field
)
_ABBREVIATION: Final = re.compile(
    r"(?:^|[\s(])(?:[A-Z]|[A-Za-z]\.[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|No|Nos|Fig|Figs|Sec|Art|vs|cf|al|etc|Inc|Ltd|Co|Corp|Jr|Sr|pp|p|"
    r"Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec|approx|ca|Rev|Gen|Col|Vol|v)$"
)
_REACH: Final = 1500
"""Characters on either side of a passage in which its sentence's ends are looked for."""


@dataclass(frozen=True)
class SourceText:
    """A document's text, and where its pages begin."""

    text: str = field(repr=False)
    sections: Sequence[SourceMark] = ()

    @classmethod
    def of(cls, store: DocumentStore, document: DocumentRef) -> SourceText:
        """The text that the store has.

        Raises:
            DocumentError: it is no longer there.
        """
        size = store.size(document)
        return cls(store.read_bytes(document, 0, size or 0).decode(errors="replace"), store.sections(document))

    def page(self, start: int) -> str | None:
        """The page or source in which a character is."""
        return section_at(self.sections, start)

    def sentence(self, start: int, end: int) -> tuple[int, int, bool]:
        """The whole sentences, list items or table rows around a passage.

        Returns:
            First character and end, without white space around them, and whether they are whole: those that are longer
            than `LONGEST_QUOTE` are cut at a word near the passage.
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
        # Several sentences, each of which may be as long as it likes.
        first, last = self.sentence(start, start + 1), self.sentence(max(start, end - 1), end)
        return (first[0] == start or not first[2]) and (last[1] == end or not last[2])

    def find(self, quote: str, near: int = 0) -> tuple[int, int] | None:
        """Where a quote is, as characters of the text: the place that is nearest to `near`; None if it is nowhere."""
        wanted = one_form(quote)
        if not wanted:
            return None
        if self.text[near : near + len(quote)] == quote:
            return near, near + len(quote)
        form, places = self._formed
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
    def _formed(self) -> tuple[str, array[int]]:
        """The text in the form in which quotes are compared, and the character of the text that each of its is from."""
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
            formed = one_form(word)
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
    """The character of a word that each character of its other form is from, as near as that can be known."""
    places: list[int] = []
    for index in range(len(word)):
        places += [start + index] * max(0, len(one_form(word[: index + 1])) - len(places))
    return (places + [start + len(word) - 1] * len(formed))[: len(formed)]
