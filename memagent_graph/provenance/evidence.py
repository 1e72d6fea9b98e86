"""Finds where a memory's lines come from: verbatim overlap with the chunks read at the time, without a model.

A line of the final memory is traced back through its rewordings, and through merges of branches, to the update that
first wrote it. Its quotes are the passages that it shares with the chunks read there. This does not say that
a line is true or follows from a chunk: it says which of its words are in the chunk, and where.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any

from memagent_graph.calls import Span, Writes
from memagent_graph.events import EventKind
from memagent_graph.no_answers import gives_no_answer
from memagent_graph.provenance.overlap import (
    Quote,
    WordedText,
    best_quotes,
    content_words,
    possible_quotes,
    share_held,
    shared_runs,
)
from memagent_graph.provenance.places import Places
from memagent_graph.trace import MemoryUpdate, Trace
from memagent_graph.words import WORD, is_unspaced, sentence_ends, terms, words

_SAME_LINE = 0.6
_CONTAINED = 0.8
_MIN_CONTAINED = 3
_MIN_SENTENCE = 40
_SUPPORTED = 0.5
_SPACED_SENTENCE = re.compile(r"[.!?][\"'”’)\]]*$")
_MAX_SENTENCE = 500
_NOWHERE = Places()


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
    """The document's text between the two, unchanged."""
    section: str | None
    """The heading or numbered clause that the quote begins under; without one, its page or source, if there is one."""
    coverage: float
    """The share of the line's words, 0 to 1, that are in this and the line's other quotes."""
    branch: str
    """The branch that read the chunk; "" is the trunk."""
    update: int
    """The index in `Trace.updates` of the update that read the chunk; -1 if it is evidence of an excerpt."""
    page: int | None = None
    """The page on which the quote begins, counted from 1; None if the document has no pages."""
    link: str | None = None
    """Opens a PDF document at that page, as in `file:///reports/2025.pdf#page=7`; only the name of the file, if it is
    not known where it lay. None for other documents."""

    @property
    def place(self) -> str | None:
        """Page and section, or what there is of them."""
        if self.page is None or self.section is None or self.section == f"page {self.page}":
            return self.section
        return f"page {self.page}, {self.section}"


@dataclass(frozen=True, slots=True)
class LineOrigin:
    """A line of the final memory, and the chunks at which it was written."""

    line: str
    first_chunk: int | None
    """None if a merge wrote it, because that read no chunk."""
    reworded: tuple[int | None, ...]
    """The later chunks at which its words were changed, in order; None for a merge."""
    edited: bool
    """Whether a person wrote it: the memory was edited where it first appears, and the chunk there has under half of
    its words."""
    coverage: float
    """The share of the line's words, 0 to 1, that are in its quotes."""
    branch: str
    """The branch that first wrote it."""
    update: int
    """The index in `Trace.updates` of the update that first wrote it."""
    reworded_updates: tuple[int, ...]
    """As `reworded`, by indices in `Trace.updates`."""


@dataclass(frozen=True, slots=True)
class LostLine:
    """A line that was in memory and has no successor in the final one."""

    line: str
    """Its last wording."""
    first_chunk: int | None
    gone_chunk: int | None
    """The first chunk after which it was no longer there; None for a merge."""
    branch: str
    """The branch that lost it."""
    update: int
    """The index in `Trace.updates` of the update that first wrote it."""
    gone_update: int
    """As `gone_chunk`, by the index in `Trace.updates`."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origins of the lines of a final memory."""

    lines: tuple[LineOrigin, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    """Sorted by line; for one line, the longest quote first."""
    lost: tuple[LostLine, ...] = ()
    """In the order in which they were lost."""


@dataclass(frozen=True, slots=True)
class Support:
    """A part of a memory line, in characters, whose words are in the answer."""

    line_index: int
    start: int
    end: int


def provenance_of(
    trace: Trace,
    chunk_text: Callable[[MemoryUpdate], str | None],
    places: Places = _NOWHERE,
) -> Provenance:
    """Find where the final memory's lines come from, and which lines were lost.

    Args:
        trace: the run. Updates that did not change the memory cost nothing; branches that the final memory does not
            come from do not count.
        chunk_text: the document's text between an update's `start_char` and `end_char`. It is called only for chunks
            that brought words of the final memory; if it returns None, origins are known but quotes are not.
        places: what the document's places are called.
    """
    updates = trace.updates
    lines, lost = _lineage(trace)
    chunks: dict[int, WordedText | None] = {}
    origins: list[LineOrigin] = []
    found: list[Evidence] = []
    for line_index, line in enumerate(lines):
        words = WordedText(line.text)
        chosen = _quotes(line, words, trace, chunk_text, chunks)
        coverage = share_held(words, chosen)
        for candidate in chosen:
            update = updates[candidate.source]
            found.append(
                _evidence(
                    candidate,
                    update.start_char,
                    places,
                    line=line.text,
                    line_index=line_index,
                    chunk_index=update.chunk_index or 0,
                    coverage=coverage,
                    branch=update.branch,
                    update=candidate.source,
                )
            )
        first = updates[line.first]
        by_person = any(event.kind is EventKind.MEMORY_EDITED for event in first.events)
        here = [candidate for candidate in chosen if candidate.source == line.first]
        reworded = _chain(line.reworded)
        origins.append(
            LineOrigin(
                line=line.text,
                first_chunk=first.chunk_index,
                reworded=tuple(updates[place].chunk_index for place in reworded),
                edited=by_person and share_held(words, here) < _SUPPORTED,
                coverage=coverage,
                branch=first.branch,
                update=line.first,
                reworded_updates=reworded,
            )
        )
    return Provenance(tuple(origins), tuple(found), lost)


def excerpt_evidence(
    trace: Trace, answer: str, span_text: Callable[[Span], str | None], places: Places = _NOWHERE
) -> tuple[Evidence, ...]:
    """Find what the policy used of an excerpt, in a run that showed one instead of reading chunks.

    Args:
        trace: the run. If it showed no excerpt, nothing is found.
        answer: its answer.
        span_text: the document's text in a span; None if it is not known.
        places: as for `provenance_of`.

    Returns:
        Quotes for the sentences of the answer, if it was written from the excerpt, or else of the final memory; whole
        sentences of the document, because an answer alone may be a word.
    """
    reading = trace.excerpt
    if reading is None:
        return ()
    texts = {
        number: WordedText(text) for number, span in enumerate(reading.reads) if (text := span_text(span)) is not None
    }
    found: dict[tuple[int, int, int], Evidence] = {}
    for line_index, line in enumerate(memory_lines(answer if reading.writes is Writes.ANSWER else trace.final_memory)):
        words = WordedText(line)
        chosen = best_quotes(words, chain(*(possible_quotes(words, texts[number], number) for number in texts)))
        for quote in chosen:
            span, text = reading.reads[quote.source], quote.chunk.text
            start, end = sentence_around(text, quote.start, quote.end)
            found.setdefault(
                (line_index, span.start_char + start, span.start_char + end),
                _evidence(
                    replace(quote, start=start, end=end),
                    span.start_char,
                    places,
                    line=line,
                    line_index=line_index,
                    chunk_index=span.index,
                    coverage=share_held(words, chosen),
                    branch=reading.branch,
                    update=-1,
                ),
            )
    return tuple(found.values())


def sentence_around(text: str, start: int, end: int) -> tuple[int, int]:
    """Return where the sentence begins and ends in which a quote lies; the quote's own ends if it is very long."""
    ends = sentence_ends(text)
    first = max((each for each in ends if each <= start), default=0)
    last = min((each for each in ends if each >= end), default=len(text))
    sentence = text[first:last]
    if len(sentence) > max(_MAX_SENTENCE, end - start):
        return start, end
    return first + len(sentence) - len(sentence.lstrip()), last - len(sentence) + len(sentence.rstrip())


def _evidence(quote: Quote, text_start: int, places: Places, **values: Any) -> Evidence:
    """Evidence with the place of a quote from a text that begins at the document's character `text_start`."""
    start = text_start + quote.start
    return Evidence(
        start_char=start,
        end_char=text_start + quote.end,
        quote=quote.chunk.text[quote.start : quote.end],
        section=places.section(start),
        page=places.page(start),
        link=places.link(start),
        **values,
    )


def chunks_behind(trace: Trace, chunk_text: Callable[[MemoryUpdate], str | None]) -> list[frozenset[int]]:
    """For each of `Trace.updates`: the chunks with quotes of the memory after it, as `provenance_of` finds them.

    Args:
        trace: the run.
        chunk_text: as for `provenance_of`.
    """
    after: list[list[_Line]] = []
    chunks: dict[int, WordedText | None] = {}
    quoted: dict[_Line, frozenset[int]] = {}
    for place, update in enumerate(trace.updates):
        sources = trace.sources(update)
        lines = [line for source in sources for line in after[source]]
        # If there are several memories, an unchanged one may be equal to one of them.
        stays = not update.changed and len(sources) == 1
        after.append(lines if stays else _succeeded(lines, memory_lines(update.memory), place)[0])
        for line in after[-1]:
            if line not in quoted:
                quotes = _quotes(line, WordedText(line.text), trace, chunk_text, chunks)
                quoted[line] = frozenset(trace.updates[each.source].chunk_index or 0 for each in quotes)
    return [frozenset().union(*(quoted[line] for line in lines)) for lines in after]


def _quotes(
    line: _Line,
    words: WordedText,
    trace: Trace,
    chunk_text: Callable[[MemoryUpdate], str | None],
    chunks: dict[int, WordedText | None],
) -> list[Quote]:
    """Return what a line shares with the chunks that its words come from; `chunks` caches their texts, by update."""
    candidates: list[Quote] = []
    for place in _with_looked_up({line.first, *line.brought.values()}, trace):
        if place not in chunks:
            update = trace.updates[place]
            text = None if update.chunk_index is None else chunk_text(update)
            chunks[place] = None if text is None else WordedText(text)
        chunk = chunks[place]
        candidates += [] if chunk is None else possible_quotes(words, chunk, place)
    return best_quotes(words, candidates)


def _with_looked_up(places: set[int], trace: Trace) -> list[int]:
    """Return updates, and those that read what was looked up for them, in order."""
    looked_up = {
        span.index
        for place in places
        for step in (trace.by_id.get(trace.updates[place].step),)
        for span in (step.reads[0 if step.chunk_index is None else 1 :] if step else ())
        if step is not None and span.index != step.chunk_index
    }
    if not looked_up:
        return sorted(places)
    return sorted(places | {place for place, each in enumerate(trace.updates) if each.chunk_index in looked_up})


def supporting_lines(answer: str, question: str, lines: Sequence[str]) -> frozenset[int]:
    """Return the indices of the lines of memory that an answer rests on.

    They are the fewest that together have every word of the answer that is in memory; among equals, those with more
    words of the question. An answer without such a word, as "yes", rests on the line with most words of the question.
    One that says that there is none rests on no line.
    """
    if gives_no_answer(answer, quoted=True):
        return frozenset()
    words = [_anchors(line) for line in lines]
    topic, supporting = _anchors(question), set[int]()

    def next_line(needed: frozenset[str]) -> None:
        """Add the line with most of the words that are needed."""
        supporting.add(max(range(len(words)), key=lambda at: (len(words[at] & needed), len(words[at] & topic), -at)))

    known = frozenset().union(*words)
    while left := (_anchors(answer) & known).difference(*(words[at] for at in supporting)):
        next_line(left)
    if not supporting and topic & known:
        next_line(topic)
    return frozenset(supporting)


def _anchors(text: str) -> frozenset[str]:
    """Return a text's content words; of scripts without spaces, pairs of characters, as a name may have only two."""
    pairs = frozenset(term for term in terms(text) if len(term) > 1 and is_unspaced(term))
    return pairs.union(word for _, word in WordedText(text).anchors())


def support(answer: str, lines: Sequence[str]) -> tuple[Support, ...]:
    """Return the words of memory that the answer repeats."""
    asked = WordedText(answer)
    found: list[Support] = []
    for line_index, line in enumerate(lines):
        text = WordedText(line)
        end = 0
        for run in sorted(shared_runs(asked, text), key=lambda run: run.at):
            start = max(end, text.spans[run.at][0])
            end = max(end, text.spans[run.at + run.length - 1][1])
            if start < end:
                found.append(Support(line_index, start, end))
    return tuple(found)


def memory_lines(memory: str) -> list[str]:
    """Return a memory's lines, and the sentences of lines with several; those without a word are left out."""
    lines: list[str] = []
    for line in memory.splitlines():
        start = 0
        for end in sentence_ends(line):
            sentence = line[start:end].strip()
            if len(sentence) > _MIN_SENTENCE or not _SPACED_SENTENCE.search(sentence):
                lines.append(sentence)
                start = end
        lines.append(line[start:].strip())
    return [line for line in lines if WORD.search(line)]


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """A line of a memory. Updates are named by their indices in the trace; two lines with the same words are two."""

    text: str
    words: tuple[str, ...]
    content: frozenset[str]
    first: int
    reworded: _Reworded | None
    brought: dict[str, int]
    """The update that added each word of `content`."""


@dataclass(frozen=True, slots=True)
class _Reworded:
    """The update that reworded a line, and those before it: a chain, as a line may be reworded at every chunk."""

    before: _Reworded | None
    place: int


def _lineage(trace: Trace) -> tuple[list[_Line], tuple[LostLine, ...]]:
    """Return the final memory's lines, and those that were lost before it."""
    path, finally_used = trace.final_path, trace.final_sources
    uses = Counter(chain(finally_used, *map(trace.sources, path)))
    parted = any(count > 1 for count in uses.values())
    after: dict[int, list[_Line]] = {}

    def together(places: Sequence[int]) -> list[_Line]:
        """Return the lines of several memories; they are dropped after the last memory that is based on them."""
        uses.subtract(places)
        found = [after[place] if uses[place] else after.pop(place) for place in places]
        return found[0] if len(found) == 1 else list(chain(*found))

    lost: dict[_Line, int] = {}
    continued: set[_Line] = set()
    for update in path:
        place = trace.place(update.step)
        lines = together(trace.sources(update))
        if update.changed:
            lines, gone, others = _succeeded(lines, memory_lines(update.memory), place)
            lost |= dict.fromkeys(gone, place)
            continued.update(others if parted else ())
        after[place] = lines
    final = together(finally_used)
    # A line is not lost if another branch kept it, if it came back in the same words, or if it says nothing.
    there = {line.words for line in final}
    left_out = [
        (line, place)
        for line, place in lost.items()
        if line not in continued and line.words not in there and not gives_no_answer(line.text)
    ]
    updates = trace.updates
    return final, tuple(
        LostLine(
            line=line.text,
            first_chunk=updates[line.first].chunk_index,
            gone_chunk=updates[place].chunk_index,
            branch=updates[place].branch,
            update=line.first,
            gone_update=place,
        )
        for line, place in sorted(left_out, key=itemgetter(1))
    )


def _chain(reworded: _Reworded | None) -> tuple[int, ...]:
    places = []
    while reworded is not None:
        places.append(reworded.place)
        reworded = reworded.before
    return tuple(reversed(places))


def _succeeded(old: Sequence[_Line], texts: Sequence[str], place: int) -> tuple[list[_Line], list[_Line], list[_Line]]:
    """Return the next memory's lines, those of `old` without a successor, and those that continue in other words.

    An unchanged line has no other successor; otherwise lists of similar facts would inherit from each other.
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
        folded = tuple(words(text))
        content = content_words(folded)
        shared = Counter(each for word in content for each in holding.get(word, ()))
        likeness = {each: _likeness(count, content, old[each].content) for each, count in shared.items()}
        best = max(likeness, key=lambda each: (likeness[each], -each), default=None)
        if best is None or likeness[best] < _SAME_LINE:
            lines.append(_Line(text, folded, content, place, None, dict.fromkeys(content, place)))
            continue
        parents = [each for each, count in shared.items() if count >= _SAME_LINE * len(old[each].content)]
        lost.difference_update(parents, (best,))
        lines.append(_reword(text, folded, content, old[best], [old[each] for each in parents], place))
    return lines, [old[index] for index in sorted(lost)], [old[index] for index in changed - lost]


def _reword(
    text: str, words: tuple[str, ...], content: frozenset[str], line: _Line, others: Sequence[_Line], place: int
) -> _Line:
    if words == line.words:
        return replace(line, text=text)
    brought = {word: chunk for other in others for word, chunk in other.brought.items()} | line.brought
    chunks = {word: brought.get(word, place) for word in content}
    return _Line(text, words, content, line.first, _Reworded(line.reworded, place), chunks)


def _likeness(shared: int, new: frozenset[str], old: frozenset[str]) -> float:
    """Return the share of words in common; a line that was cut out of a longer one counts as similar, too."""
    dice = 2 * shared / (len(new) + len(old))
    contained = shared / len(new)
    return max(dice, contained) if shared >= _MIN_CONTAINED and contained >= _CONTAINED else dice
