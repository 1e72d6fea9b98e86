"""Finds the passages of a chunk whose words a memory line repeats in the same order."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from memagent_graph.grouping import group_values
from memagent_graph.words import find_words, fold_word, is_unspaced

MAX_QUOTES = 3
"""Maximum number of quotes of a line."""
_MAX_GAP_WORDS = 4
_MAX_OCCURRENCES = 64
_MAX_REPEATS = 3
_UNSPACED_ANCHOR_CHARS = 4
_NAME = re.compile(r"(?<=[a-z,]\s)[A-Z]\w+")
_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        a about after all also an and any are as at be because been before being both but by can could did do does
        during each for from had has have he her here him his how i if in into is it its may me more most my no nor
        not of on one only or other our out over own said she should so some such than that the their them then there
        these they this those through to too under until up very was we were what when where which while who whom why
        will with would you your
        """,
    )
)


def find_quotes(line: str, chunk_text: str, chunk_start_char: int = 0) -> list[tuple[int, int]]:
    """Return the passages of a chunk that have a line's words in their order, as spans in the document, longest first.

    Words are compared folded (`words.fold_word`); punctuation and white space do not count. A passage has a number or a
    word that is not a function word, or four characters of a script without spaces; passages a few words apart are
    joined.
    """
    line_words = TokenizedText(line)
    quotes = choose_quotes(line_words, find_possible_quotes(line_words, TokenizedText(chunk_text), 0))
    return [(chunk_start_char + quote.start, chunk_start_char + quote.end) for quote in quotes]


class TokenizedText:
    """The words of a text and their positions."""

    __slots__ = ("spans", "text", "words")

    def __init__(self, text: str) -> None:
        self.text = text
        self.spans = find_words(text)
        self.words = [fold_word(text[start:end]) for start, end in self.spans]

    def find_anchors(self) -> list[tuple[int, str]]:
        """Return the words that make a shared passage worth quoting, with their positions.

        These are content words, and four characters in a row of scripts without spaces.
        """
        words = [(index, word) for index, word in enumerate(self.words) if _is_content_word(word)]
        return sorted([*words, *self._find_unspaced_anchors()])

    def find_names(self) -> dict[str, list[int]]:
        """Return the positions of capitalised words within sentences, by spelling."""
        return group_values(
            (self.text[start:end], index)
            for index, (start, end) in enumerate(self.spans)
            if _NAME.match(self.text, start)
        )

    def find_positions(self, anchors: Container[str]) -> dict[str, list[int]]:
        """Return the positions of some anchors."""
        words_at_positions = chain(enumerate(self.words), self._find_unspaced_anchors())
        return group_values((word, position) for position, word in words_at_positions if word in anchors)

    def _find_unspaced_anchors(self) -> Iterator[tuple[int, str]]:
        if self.text.isascii():
            return
        length = 0
        for index, word in enumerate(self.words):
            length = length + 1 if is_unspaced(word) else 0
            if length >= _UNSPACED_ANCHOR_CHARS:
                start = index - _UNSPACED_ANCHOR_CHARS + 1
                yield start, "".join(self.words[start : index + 1])


@dataclass(frozen=True, slots=True)
class MatchingSpan:
    """A run of equal words in a line and in a chunk: `length` words from each start."""

    line_start: int
    chunk_start: int
    length: int

    @property
    def line_indices(self) -> frozenset[int]:
        """The indices of the line's words in the span."""
        return frozenset(range(self.line_start, self.line_start + self.length))


@dataclass(frozen=True, slots=True)
class Quote:
    """A possible quote: matching spans that are close together in a chunk."""

    chunk: TokenizedText
    source: int
    start: int
    end: int
    line_indices: frozenset[int]
    """The indices of the line's words in the quote."""
    max_match_length: int
    """The number of words of the longest matching span. The same words in another order may mean the opposite."""


def find_matching_spans(line: TokenizedText, chunk: TokenizedText) -> list[MatchingSpan]:
    """Return the longest spans of equal words around every common anchor.

    A single word that is frequent in a chunk is not a match. In a line that has only function words, capitalised
    words in the chunk also count (the month May, or Will).
    """
    if anchors := line.find_anchors():
        positions = chunk.find_positions({anchor for _, anchor in anchors})
    else:
        positions = chunk.find_names()
        anchors = [(index, line.text[start:end]) for index, (start, end) in enumerate(line.spans)]
    matches: list[MatchingSpan] = []
    ends: dict[int, int] = {}
    for line_index, anchor in anchors:
        for chunk_index in positions.get(anchor, ())[:_MAX_OCCURRENCES]:
            if ends.get(chunk_index - line_index, -1) <= line_index:
                match = _extend_match(line.words, chunk.words, line_index, chunk_index)
                ends[chunk_index - line_index] = match.line_start + match.length
                if match.length > 1 or len(positions[anchor]) <= _MAX_REPEATS:
                    matches.append(match)
    return matches


def _extend_match(
    line_words: Sequence[str], chunk_words: Sequence[str], line_index: int, chunk_index: int
) -> MatchingSpan:
    """Return the longest span of equal words around one word of a line and of a chunk."""
    words_before = 0
    while (
        words_before < min(line_index, chunk_index)
        and line_words[line_index - words_before - 1] == chunk_words[chunk_index - words_before - 1]
    ):
        words_before += 1
    words_after = 0
    max_after = min(len(line_words) - line_index, len(chunk_words) - chunk_index)
    while words_after < max_after and line_words[line_index + words_after] == chunk_words[chunk_index + words_after]:
        words_after += 1
    return MatchingSpan(line_index - words_before, chunk_index - words_before, words_before + words_after)


def find_possible_quotes(line: TokenizedText, chunk: TokenizedText, source: int) -> list[Quote]:
    """Return possible quotes: matching spans, joined over small gaps if the next one adds words of the line."""
    groups: list[list[MatchingSpan]] = []
    covered_indices: frozenset[int] = frozenset()
    end = 0
    for match in sorted(find_matching_spans(line, chunk), key=lambda match: (match.chunk_start, -match.length)):
        if groups and match.chunk_start - end <= _MAX_GAP_WORDS and not match.line_indices <= covered_indices:
            groups[-1].append(match)
            covered_indices |= match.line_indices
            end = max(end, match.chunk_start + match.length)
        else:
            groups.append([match])
            covered_indices, end = match.line_indices, match.chunk_start + match.length
    return [_make_quote(chunk, source, group) for group in groups]


def _make_quote(chunk: TokenizedText, source: int, matches: Sequence[MatchingSpan]) -> Quote:
    """Make a quote of matching spans, without leading spans whose words are also in later ones."""
    while len(matches) > 1 and matches[0].line_indices <= frozenset[int]().union(
        *(match.line_indices for match in matches[1:])
    ):
        matches = matches[1:]
    end = max(match.chunk_start + match.length for match in matches)
    line_indices = frozenset[int]().union(*(match.line_indices for match in matches))
    max_match_length = max(match.length for match in matches)
    return Quote(
        chunk, source, chunk.spans[matches[0].chunk_start][0], chunk.spans[end - 1][1], line_indices, max_match_length
    )


def choose_quotes(line: TokenizedText, candidates: Iterable[Quote]) -> list[Quote]:
    """Return the few candidates that together have the most of the line's words, longest first."""
    weights = [10 if _is_content_word(word) or is_unspaced(word) else 1 for word in line.words]
    remaining = list(candidates)
    selection: list[Quote] = []
    covered_indices: frozenset[int] = frozenset()
    while remaining and len(selection) < MAX_QUOTES:
        gains = [sum(weights[index] for index in quote.line_indices - covered_indices) for quote in remaining]
        index = max(range(len(remaining)), key=lambda index: (gains[index], remaining[index].max_match_length, -index))
        if gains[index] < max(weights):
            break
        best_quote = remaining.pop(index)
        others = [quote for quote in selection if quote.source == best_quote.source]
        if all(quote.end <= best_quote.start or best_quote.end <= quote.start for quote in others):
            selection.append(best_quote)
            covered_indices |= best_quote.line_indices
    return sorted(selection, key=lambda quote: (quote.start - quote.end, quote.source, quote.start))


def measure_coverage(line: TokenizedText, quotes: Iterable[Quote]) -> float:
    """Return the fraction of the line's words that are in the quotes."""
    covered_indices = frozenset[int]().union(*(quote.line_indices for quote in quotes))
    return len(covered_indices) / max(1, len(line.words))


def select_content_words(words: Iterable[str]) -> frozenset[str]:
    """Return the words that are not function words; all words if there are only function words."""
    words = frozenset(words)
    return frozenset(word for word in words if word not in _STOP_WORDS) or words


def _is_content_word(word: str) -> bool:
    return word.isdecimal() or (len(word) > 1 and word not in _STOP_WORDS and not is_unspaced(word))
