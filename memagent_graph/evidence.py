"""Where a memory's lines come from: verbatim overlap with the chunks that brought them, computed without a model.

A line of the final memory is followed back through its rewordings to the update that first wrote it. Its quotes are
the stretches of words that it shares with the chunks read there. Nothing here says that a line is true or follows from
a chunk: it says which of its words stood there, and where.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from memagent_graph.results import EventKind, MemoryUpdate
from memagent_graph.sources import SourceMark
from memagent_graph.word_diff import UNSPACED, WORD

MOST_QUOTES = 3
"""Quotes of one line."""

_SAME_LINE = 0.6
_CONTAINED = 0.8
_FEWEST_CONTAINED = 3
_WIDEST_GAP = 4
_MOST_OCCURRENCES = 64
_RARE = 3
_UNSPACED_RUN = 4
_SHORTEST_SENTENCE = 40
_SUPPORTED = 0.5
_UNSPACED = re.compile(f"[{UNSPACED}]")
_SENTENCE_END = re.compile(r"(?:[.!?][\"'”’)\]]*\s+(?=[^\sa-z])|[。！？][」』”’）]*)")
_ABBREVIATION = re.compile(r"(?:^|\W)[A-Z]\w{0,2}\.?$")
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


@dataclass(frozen=True, slots=True)
class Evidence:
    """A quote that supports a line of the final memory."""

    line: str
    line_index: int
    chunk_index: int
    start_char: int
    """First character of the quote, in the document."""
    end_char: int
    quote: str
    """The document's text between the two, as it stands there."""
    section: str | None
    """The page or source that the quote begins in, where the document has them."""
    coverage: float
    """The share of the line's words, 0 to 1, that this and the line's other quotes hold."""


@dataclass(frozen=True, slots=True)
class LineOrigin:
    """A line of the final memory, and the chunks at which it was written."""

    line: str
    first_chunk: int
    reworded: tuple[int, ...]
    """The later chunks at which its words were changed, in order."""
    edited: bool
    """Whether a person wrote it: the memory was edited where it first appears, and the chunk there has not half of
    its words."""
    coverage: float
    """The share of the line's words, 0 to 1, that its quotes hold."""


@dataclass(frozen=True, slots=True)
class LostLine:
    """A line that was in memory and has no successor in the final one."""

    line: str
    """As it last read."""
    first_chunk: int
    gone_chunk: int
    """The first chunk after which it was no longer there."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """How the lines of a final memory came to be."""

    lines: tuple[LineOrigin, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    """By line; of one line, the longest quote first."""
    lost: tuple[LostLine, ...] = ()
    """In the order in which they were lost."""


@dataclass(frozen=True, slots=True)
class Support:
    """A stretch of a memory line, in characters, whose words are in the answer."""

    line_index: int
    start: int
    end: int


def trace(
    updates: Sequence[MemoryUpdate],
    chunk_text: Callable[[MemoryUpdate], str | None],
    sections: Sequence[SourceMark] = (),
) -> Provenance:
    """Where the final memory's lines come from, and what was lost on the way.

    Args:
        updates: Every update, in order. Those that left the memory as it was cost nothing.
        chunk_text: The document's text between an update's `start_char` and `end_char`. It is asked only for chunks
            that brought words of the final memory; where it gives None, origins are known and quotes are not.
        sections: Where the document's pages or sources begin, in order.
    """
    lines, lost = _lineage(updates)
    chunks: dict[int, _Text | None] = {}
    origins: list[LineOrigin] = []
    found: list[Evidence] = []
    for line_index, line in enumerate(lines):
        words = _Text(line.text)
        candidates: list[_Candidate] = []
        for position in sorted({line.first, *line.brought.values()}):
            if position not in chunks:
                text = chunk_text(updates[position])
                chunks[position] = None if text is None else _Text(text)
            chunk = chunks[position]
            candidates += [] if chunk is None else _candidates(words, chunk, position)
        chosen = _chosen(words, candidates)
        coverage = _coverage(words, chosen)
        for candidate in chosen:
            update, chunk = updates[candidate.source], candidate.chunk
            start = update.start_char + candidate.start
            found.append(
                Evidence(
                    line=line.text,
                    line_index=line_index,
                    chunk_index=update.chunk_index,
                    start_char=start,
                    end_char=update.start_char + candidate.end,
                    quote=chunk.text[candidate.start : candidate.end],
                    section=section_at(sections, start),
                    coverage=coverage,
                )
            )
        first = updates[line.first]
        by_person = any(event.kind is EventKind.MEMORY_EDITED for event in first.events)
        here = [candidate for candidate in chosen if candidate.source == line.first]
        origins.append(
            LineOrigin(
                line=line.text,
                first_chunk=first.chunk_index,
                reworded=tuple(updates[position].chunk_index for position in line.reworded),
                edited=by_person and _coverage(words, here) < _SUPPORTED,
                coverage=coverage,
            )
        )
    return Provenance(tuple(origins), tuple(found), _lost_lines(updates, lines, lost))


def evidence(
    updates: Sequence[MemoryUpdate],
    chunk_text: Callable[[MemoryUpdate], str | None],
    sections: Sequence[SourceMark] = (),
) -> tuple[Evidence, ...]:
    """The quotes alone; see `trace`."""
    return trace(updates, chunk_text, sections).evidence


def quotes(line: str, chunk_text: str, chunk_start_char: int = 0) -> list[tuple[int, int]]:
    """The stretches of a chunk that hold a line's words in their order, as spans in the document, longest first.

    Letter case, punctuation and white space do not count. A stretch holds a number or a word that is not a mere
    function word, or four characters of a script without spaces; stretches a few words apart are one.
    """
    words = _Text(line)
    chosen = _chosen(words, _candidates(words, _Text(chunk_text), 0))
    return [(chunk_start_char + each.start, chunk_start_char + each.end) for each in chosen]


def support(answer: str, lines: Sequence[str]) -> tuple[Support, ...]:
    """Which words of memory the answer repeats."""
    asked = _Text(answer)
    found: list[Support] = []
    for line_index, line in enumerate(lines):
        text = _Text(line)
        end = 0
        for run in sorted(_runs(asked, text), key=lambda run: run.at):
            start = max(end, text.spans[run.at][0])
            end = max(end, text.spans[run.at + run.length - 1][1])
            if start < end:
                found.append(Support(line_index, start, end))
    return tuple(found)


def memory_lines(memory: str) -> list[str]:
    """A memory's lines, and the sentences of lines that have several; those without a word are left out."""
    lines: list[str] = []
    for line in memory.splitlines():
        start = 0
        for match in _SENTENCE_END.finditer(line):
            head = line[start : match.start()]
            if len(head) >= (_SHORTEST_SENTENCE if match[0][0] in ".!?" else 1) and not _ABBREVIATION.search(head):
                lines.append(line[start : match.end()].strip())
                start = match.end()
        lines.append(line[start:].strip())
    return [line for line in lines if WORD.search(line)]


def section_at(sections: Sequence[SourceMark], start_char: int) -> str | None:
    """The label of the page or source that a character lies in; None before the first."""
    index = bisect_right(sections, start_char, key=lambda mark: mark.start_char)
    return sections[index - 1].label if index else None


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of some memory. Updates are named by their position in the sequence."""

    text: str
    words: tuple[str, ...]
    content: frozenset[str]
    first: int
    reworded: tuple[int, ...]
    brought: dict[str, int]
    """The update that brought each word of `content`."""


def _lineage(updates: Sequence[MemoryUpdate]) -> tuple[list[_Line], list[tuple[_Line, int]]]:
    """The final memory's lines, and those that were lost with the update that lost them."""
    lines: list[_Line] = []
    lost: list[tuple[_Line, int]] = []
    memory = ""
    for position, update in enumerate(updates):
        if update.memory == memory:
            continue
        memory = update.memory
        lines, gone = _succeeded(lines, memory_lines(memory), position)
        lost += [(line, position) for line in gone]
    return lines, lost


def _succeeded(old: Sequence[_Line], texts: Sequence[str], position: int) -> tuple[list[_Line], list[_Line]]:
    """The next memory's lines, and those of `old` that none of them comes from.

    A line that stayed as it was has no other successor: lists of like facts would else inherit from each other.
    """
    by_text: dict[str, list[int]] = {}
    for index, line in enumerate(old):
        by_text.setdefault(line.text, []).append(index)
    stayed: list[int | None] = [by_text[text].pop(0) if by_text.get(text) else None for text in texts]
    changed = set(range(len(old))).difference(index for index in stayed if index is not None)
    holding: dict[str, list[int]] = {}
    for index in changed:
        for word in old[index].content:
            holding.setdefault(word, []).append(index)
    lines: list[_Line] = []
    lost = set(changed)
    for text, same in zip(texts, stayed, strict=True):
        if same is not None:
            lines.append(old[same])
            continue
        words = tuple(match[0].casefold() for match in WORD.finditer(text))
        content = _content(words)
        shared = Counter(each for word in content for each in holding.get(word, ()))
        likeness = {each: _likeness(count, content, old[each].content) for each, count in shared.items()}
        best = max(likeness, key=lambda each: (likeness[each], -each), default=None)
        if best is None or likeness[best] < _SAME_LINE:
            lines.append(_Line(text, words, content, position, (), dict.fromkeys(content, position)))
            continue
        parents = [each for each, count in shared.items() if count >= _SAME_LINE * len(old[each].content)]
        lost.difference_update(parents, (best,))
        lines.append(_reworded(text, words, content, old[best], [old[each] for each in parents], position))
    return lines, [old[index] for index in sorted(lost)]


def _reworded(
    text: str, words: tuple[str, ...], content: frozenset[str], line: _Line, others: Sequence[_Line], position: int
) -> _Line:
    if words == line.words:
        return replace(line, text=text)
    brought = {word: chunk for other in others for word, chunk in other.brought.items()} | line.brought
    chunks = {word: brought.get(word, position) for word in content}
    return _Line(text, words, content, line.first, (*line.reworded, position), chunks)


def _likeness(shared: int, new: frozenset[str], old: frozenset[str]) -> float:
    """The share of words in common; a line that was cut out of a longer one is like it, too."""
    dice = 2 * shared / (len(new) + len(old))
    contained = shared / len(new)
    return max(dice, contained) if shared >= _FEWEST_CONTAINED and contained >= _CONTAINED else dice


def _lost_lines(
    updates: Sequence[MemoryUpdate], final: Sequence[_Line], lost: Sequence[tuple[_Line, int]]
) -> tuple[LostLine, ...]:
    """The lost lines that did not come back later in the same words."""
    there = {line.words for line in final}
    return tuple(
        LostLine(line.text, updates[line.first].chunk_index, updates[position].chunk_index)
        for line, position in lost
        if line.words not in there
    )


class _Text:
    """A text's words and where they stand."""

    __slots__ = ("spans", "text", "words")

    def __init__(self, text: str) -> None:
        self.text = text
        self.spans = [match.span() for match in WORD.finditer(text)]
        if text.isascii():
            lowered = text.lower()
            self.words = [lowered[start:end] for start, end in self.spans]
        else:
            self.words = [text[start:end].casefold() for start, end in self.spans]

    def anchors(self) -> list[tuple[int, str]]:
        """What makes a shared stretch worth quoting, by where it stands.

        Those are content words, and four characters in a row of scripts without spaces.
        """
        words = [(index, word) for index, word in enumerate(self.words) if _is_content(word)]
        return sorted([*words, *self._unspaced()])

    def places(self, anchors: Container[str]) -> dict[str, list[int]]:
        """Where each of some anchors stands."""
        places: dict[str, list[int]] = {}
        for index, word in enumerate(self.words):
            if word in anchors:
                places.setdefault(word, []).append(index)
        for start, characters in self._unspaced():
            if characters in anchors:
                places.setdefault(characters, []).append(start)
        return places

    def _unspaced(self) -> Iterator[tuple[int, str]]:
        if self.text.isascii():
            return
        length = 0
        for index, word in enumerate(self.words):
            length = length + 1 if _is_unspaced(word) else 0
            if length >= _UNSPACED_RUN:
                start = index - _UNSPACED_RUN + 1
                yield start, "".join(self.words[start : index + 1])


@dataclass(frozen=True, slots=True)
class _Run:
    """Equal words, in order: `length` from word `of` of a line and from word `at` of a chunk."""

    of: int
    at: int
    length: int

    @property
    def covers(self) -> frozenset[int]:
        """The line's words in it, by their index."""
        return frozenset(range(self.of, self.of + self.length))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Runs that stand close together in a chunk: a possible quote."""

    chunk: _Text
    source: int
    start: int
    end: int
    covers: frozenset[int]
    """The line's words that it holds, by their index."""

    def overlaps(self, other: _Candidate) -> bool:
        """Whether the two share text."""
        return self.source == other.source and self.start < other.end and other.start < self.end


def _runs(line: _Text, chunk: _Text) -> list[_Run]:
    """The longest stretches of equal words, around every anchor that the two share.

    A single word that a chunk is full of is no quote, so it makes no run.
    """
    anchors = line.anchors()
    places = chunk.places({anchor for _, anchor in anchors})
    runs: list[_Run] = []
    reached: dict[int, int] = {}
    for of, anchor in anchors:
        for at in places.get(anchor, ())[:_MOST_OCCURRENCES]:
            if reached.get(at - of, -1) <= of:
                run = _extended(line.words, chunk.words, of, at)
                reached[at - of] = run.of + run.length
                if run.length > 1 or len(places[anchor]) <= _RARE:
                    runs.append(run)
    return runs


def _extended(left: Sequence[str], right: Sequence[str], of: int, at: int) -> _Run:
    start = 0
    while start < min(of, at) and left[of - start - 1] == right[at - start - 1]:
        start += 1
    end = 0
    while of + end < len(left) and at + end < len(right) and left[of + end] == right[at + end]:
        end += 1
    return _Run(of - start, at - start, start + end)


def _candidates(line: _Text, chunk: _Text, source: int) -> list[_Candidate]:
    """The chunk's possible quotes: runs joined over small gaps, as long as each adds words of the line."""
    groups: list[list[_Run]] = []
    held: frozenset[int] = frozenset()
    reached = 0
    for run in sorted(_runs(line, chunk), key=lambda run: (run.at, -run.length)):
        if groups and run.at - reached <= _WIDEST_GAP and not run.covers <= held:
            groups[-1].append(run)
            held |= run.covers
            reached = max(reached, run.at + run.length)
        else:
            groups.append([run])
            held, reached = run.covers, run.at + run.length
    return [_candidate(chunk, source, _trimmed(group)) for group in groups]


def _trimmed(runs: Sequence[_Run]) -> Sequence[_Run]:
    """Runs without the first ones whose words the later ones hold, too."""
    while len(runs) > 1 and runs[0].covers <= frozenset[int]().union(*(run.covers for run in runs[1:])):
        runs = runs[1:]
    return runs


def _candidate(chunk: _Text, source: int, runs: Sequence[_Run]) -> _Candidate:
    end = max(run.at + run.length for run in runs)
    covers = frozenset[int]().union(*(run.covers for run in runs))
    return _Candidate(chunk, source, chunk.spans[runs[0].at][0], chunk.spans[end - 1][1], covers)


def _chosen(line: _Text, candidates: Iterable[_Candidate]) -> list[_Candidate]:
    """The few candidates that together hold most of the line's words, longest first."""
    weights = [10 if _is_content(word) or _is_unspaced(word) else 1 for word in line.words]
    left = list(candidates)
    chosen: list[_Candidate] = []
    held: frozenset[int] = frozenset()
    while left and len(chosen) < MOST_QUOTES:
        gains = [sum(weights[index] for index in each.covers - held) for each in left]
        if (gain := max(gains)) < max(weights):
            break
        best = left.pop(gains.index(gain))
        if not any(best.overlaps(other) for other in chosen):
            chosen.append(best)
            held |= best.covers
    return sorted(chosen, key=lambda each: (each.start - each.end, each.source, each.start))


def _coverage(line: _Text, chosen: Iterable[_Candidate]) -> float:
    held = frozenset[int]().union(*(each.covers for each in chosen))
    return len(held) / max(1, len(line.words))


def _content(words: Iterable[str]) -> frozenset[str]:
    words = frozenset(words)
    return frozenset(word for word in words if word not in _STOP_WORDS) or words


def _is_content(word: str) -> bool:
    return word.isdecimal() or (len(word) > 1 and word not in _STOP_WORDS)


def _is_unspaced(word: str) -> bool:
    return len(word) == 1 and _UNSPACED.match(word) is not None
