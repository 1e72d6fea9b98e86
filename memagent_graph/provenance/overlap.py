"""Finds the passages of a chunk whose words a memory line repeats in the same order."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from memagent_graph.grouping import group_values
from memagent_graph.words import find_words, fold, is_unspaced

MAX_QUOTES = 3
"""Maximum number of quotes of a line."""
_MAX_GAP = 4
_MAX_OCCURRENCES = 64
_MAX_REPEATS = 3
_UNSPACED_RUN = 4
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

    Words are compared folded (`words.fold`); punctuation and white space do not count. A passage has a number or a
    word that is not a function word, or four characters of a script without spaces; passages a few words apart are
    joined.
    """
    words = WordedText(line)
    chosen = choose_quotes(words, find_possible_quotes(words, WordedText(chunk_text), 0))
    return [(chunk_start_char + quote.start, chunk_start_char + quote.end) for quote in chosen]


class WordedText:
    """The words of a text and their positions."""

    __slots__ = ("spans", "text", "words")

    def __init__(self, text: str) -> None:
        self.text = text
        self.spans = find_words(text)
        self.words = [fold(text[start:end]) for start, end in self.spans]

    def anchors(self) -> list[tuple[int, str]]:
        """Return the words that make a shared passage worth quoting, with their positions.

        These are content words, and four characters in a row of scripts without spaces.
        """
        words = [(index, word) for index, word in enumerate(self.words) if _is_content(word)]
        return sorted([*words, *self._unspaced()])

    def names(self) -> dict[str, list[int]]:
        """Return the positions of capitalized words within sentences, by spelling."""
        return group_values(
            (self.text[start:end], index)
            for index, (start, end) in enumerate(self.spans)
            if _NAME.match(self.text, start)
        )

    def positions(self, anchors: Container[str]) -> dict[str, list[int]]:
        """Return the positions of some anchors."""
        places = chain(enumerate(self.words), self._unspaced())
        return group_values((word, position) for position, word in places if word in anchors)

    def _unspaced(self) -> Iterator[tuple[int, str]]:
        if self.text.isascii():
            return
        length = 0
        for index, word in enumerate(self.words):
            length = length + 1 if is_unspaced(word) else 0
            if length >= _UNSPACED_RUN:
                start = index - _UNSPACED_RUN + 1
                yield start, "".join(self.words[start : index + 1])


@dataclass(frozen=True, slots=True)
class Run:
    """Equal words in the same order in a line and in a chunk: `length` words from each start."""

    line_start: int
    chunk_start: int
    length: int

    @property
    def covers(self) -> frozenset[int]:
        """The indices of the line's words in it."""
        return frozenset(range(self.line_start, self.line_start + self.length))


@dataclass(frozen=True, slots=True)
class Quote:
    """A possible quote: runs that are close together in a chunk."""

    chunk: WordedText
    source: int
    start: int
    end: int
    covers: frozenset[int]
    """The indices of the line's words in it."""
    longest: int
    """The number of words of the longest run. The same words in another order may mean the opposite."""

    def overlaps(self, other: Quote) -> bool:
        """Return whether two quotes share text."""
        return self.source == other.source and self.start < other.end and other.start < self.end


def find_shared_runs(line: WordedText, chunk: WordedText) -> list[Run]:
    """Return the longest runs of equal words around every common anchor.

    A single word that is frequent in a chunk is not a run. In a line that has only function words, words that the
    chunk writes as names count (the month May, or Will).
    """
    if anchors := line.anchors():
        positions = chunk.positions({anchor for _, anchor in anchors})
    else:
        positions = chunk.names()
        anchors = [(index, line.text[start:end]) for index, (start, end) in enumerate(line.spans)]
    runs: list[Run] = []
    ends: dict[int, int] = {}
    for of, anchor in anchors:
        for at in positions.get(anchor, ())[:_MAX_OCCURRENCES]:
            if ends.get(at - of, -1) <= of:
                run = _extend(line.words, chunk.words, of, at)
                ends[at - of] = run.line_start + run.length
                if run.length > 1 or len(positions[anchor]) <= _MAX_REPEATS:
                    runs.append(run)
    return runs


def _extend(left: Sequence[str], right: Sequence[str], of: int, at: int) -> Run:
    start = 0
    while start < min(of, at) and left[of - start - 1] == right[at - start - 1]:
        start += 1
    end = 0
    while of + end < len(left) and at + end < len(right) and left[of + end] == right[at + end]:
        end += 1
    return Run(of - start, at - start, start + end)


def find_possible_quotes(line: WordedText, chunk: WordedText, source: int) -> list[Quote]:
    """Return possible quotes: runs, joined over small gaps if the next run adds words of the line."""
    groups: list[list[Run]] = []
    covered: frozenset[int] = frozenset()
    end = 0
    for run in sorted(find_shared_runs(line, chunk), key=lambda run: (run.chunk_start, -run.length)):
        if groups and run.chunk_start - end <= _MAX_GAP and not run.covers <= covered:
            groups[-1].append(run)
            covered |= run.covers
            end = max(end, run.chunk_start + run.length)
        else:
            groups.append([run])
            covered, end = run.covers, run.chunk_start + run.length
    return [_join(chunk, source, group) for group in groups]


def _join(chunk: WordedText, source: int, runs: Sequence[Run]) -> Quote:
    """Return the quote of runs, without the first runs whose words are also in later runs."""
    while len(runs) > 1 and runs[0].covers <= frozenset[int]().union(*(run.covers for run in runs[1:])):
        runs = runs[1:]
    end = max(run.chunk_start + run.length for run in runs)
    covers = frozenset[int]().union(*(run.covers for run in runs))
    longest = max(run.length for run in runs)
    return Quote(chunk, source, chunk.spans[runs[0].chunk_start][0], chunk.spans[end - 1][1], covers, longest)


def choose_quotes(line: WordedText, candidates: Iterable[Quote]) -> list[Quote]:
    """Return a few candidates that together have most of the line's words, longest first."""
    weights = [10 if _is_content(word) or is_unspaced(word) else 1 for word in line.words]
    remaining = list(candidates)
    selection: list[Quote] = []
    covered: frozenset[int] = frozenset()
    while remaining and len(selection) < MAX_QUOTES:
        gains = [sum(weights[index] for index in quote.covers - covered) for quote in remaining]
        index = max(range(len(remaining)), key=lambda at: (gains[at], remaining[at].longest, -at))
        if gains[index] < max(weights):
            break
        best = remaining.pop(index)
        if not any(best.overlaps(other) for other in selection):
            selection.append(best)
            covered |= best.covers
    return sorted(selection, key=lambda quote: (quote.start - quote.end, quote.source, quote.start))


def measure_coverage(line: WordedText, quotes: Iterable[Quote]) -> float:
    """Return the fraction of the line's words that are in the quotes."""
    covered = frozenset[int]().union(*(quote.covers for quote in quotes))
    return len(covered) / max(1, len(line.words))


def select_content_words(words: Iterable[str]) -> frozenset[str]:
    """Return the words that are not function words; all words if there are only function words."""
    words = frozenset(words)
    return frozenset(word for word in words if word not in _STOP_WORDS) or words


def _is_content(word: str) -> bool:
    return word.isdecimal() or (len(word) > 1 and word not in _STOP_WORDS and not is_unspaced(word))
