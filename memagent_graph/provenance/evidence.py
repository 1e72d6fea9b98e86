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
    line_coverage,
    possible_quotes,
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
class SupportSpan:
    """A part of a memory line, in characters, whose words are in the answer."""

    line_index: int
    start: int
    end: int


def find_provenance(
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
    evidence: list[Evidence] = []
    for line_index, line in enumerate(lines):
        words = WordedText(line.text)
        quotes = _line_quotes(line, words, trace, chunk_text, chunks)
        coverage = line_coverage(words, quotes)
        for candidate in quotes:
            update = updates[candidate.source]
            evidence.append(
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
        first_quotes = [candidate for candidate in quotes if candidate.source == line.first]
        reworded = _chain(line.reworded)
        origins.append(
            LineOrigin(
                line=line.text,
                first_chunk=first.chunk_index,
                reworded=tuple(updates[index].chunk_index for index in reworded),
                edited=by_person and line_coverage(words, first_quotes) < _SUPPORTED,
                coverage=coverage,
                branch=first.branch,
                update=line.first,
                reworded_updates=reworded,
            )
        )
    return Provenance(tuple(origins), tuple(evidence), lost)


def excerpt_evidence(
    trace: Trace, answer: str, span_text: Callable[[Span], str | None], places: Places = _NOWHERE
) -> tuple[Evidence, ...]:
    """Find what the policy used of an excerpt, in a run that showed one instead of reading chunks.

    Args:
        trace: the run. If it showed no excerpt, nothing is found.
        answer: its answer.
        span_text: the document's text in a span; None if it is not known.
        places: as for `find_provenance`.

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
    evidence: dict[tuple[int, int, int], Evidence] = {}
    for line_index, line in enumerate(memory_lines(answer if reading.writes is Writes.ANSWER else trace.final_memory)):
        words = WordedText(line)
        quotes = best_quotes(words, chain(*(possible_quotes(words, texts[number], number) for number in texts)))
        for quote in quotes:
            span, text = reading.reads[quote.source], quote.chunk.text
            start, end = sentence_around(text, quote.start, quote.end)
            evidence.setdefault(
                (line_index, span.start_char + start, span.start_char + end),
                _evidence(
                    replace(quote, start=start, end=end),
                    span.start_char,
                    places,
                    line=line,
                    line_index=line_index,
                    chunk_index=span.index,
                    coverage=line_coverage(words, quotes),
                    branch=reading.branch,
                    update=-1,
                ),
            )
    return tuple(evidence.values())


def sentence_around(text: str, start: int, end: int) -> tuple[int, int]:
    """Return where the sentence begins and ends in which a quote lies; the quote's own ends if it is very long."""
    ends = sentence_ends(text)
    first = max((position for position in ends if position <= start), default=0)
    last = min((position for position in ends if position >= end), default=len(text))
    sentence = text[first:last]
    if len(sentence) > max(_MAX_SENTENCE, end - start):
        return start, end
    return first + len(sentence) - len(sentence.lstrip()), last - len(sentence) + len(sentence.rstrip())


def _evidence(quote: Quote, text_start: int, places: Places, **values: Any) -> Evidence:
    """Return the evidence for a quote from a text that begins at the document's character `text_start`."""
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


def quoted_chunks(trace: Trace, chunk_text: Callable[[MemoryUpdate], str | None]) -> list[frozenset[int]]:
    """Return, for each of `Trace.updates`, the chunks that the memory after it quotes, as `find_provenance` finds them.

    Args:
        trace: the run.
        chunk_text: as for `find_provenance`.
    """
    after: list[list[_Line]] = []
    chunks: dict[int, WordedText | None] = {}
    quoted: dict[_Line, frozenset[int]] = {}
    for index, update in enumerate(trace.updates):
        sources = trace.sources(update)
        lines = [line for source in sources for line in after[source]]
        # If there are several memories, an unchanged one may be equal to one of them.
        is_unchanged = not update.changed and len(sources) == 1
        after.append(lines if is_unchanged else _next_lines(lines, memory_lines(update.memory), index)[0])
        for line in after[-1]:
            if line not in quoted:
                quotes = _line_quotes(line, WordedText(line.text), trace, chunk_text, chunks)
                quoted[line] = frozenset(trace.updates[quote.source].chunk_index or 0 for quote in quotes)
    return [frozenset().union(*(quoted[line] for line in lines)) for lines in after]


def _line_quotes(
    line: _Line,
    words: WordedText,
    trace: Trace,
    chunk_text: Callable[[MemoryUpdate], str | None],
    chunks: dict[int, WordedText | None],
) -> list[Quote]:
    """Return what a line shares with the chunks that its words come from; `chunks` caches their texts, by update."""
    candidates: list[Quote] = []
    for index in _with_lookups({line.first, *line.sources.values()}, trace):
        if index not in chunks:
            update = trace.updates[index]
            text = None if update.chunk_index is None else chunk_text(update)
            chunks[index] = None if text is None else WordedText(text)
        chunk = chunks[index]
        candidates += [] if chunk is None else possible_quotes(words, chunk, index)
    return best_quotes(words, candidates)


def _with_lookups(indices: set[int], trace: Trace) -> list[int]:
    """Return updates, and those that read what was looked up for them, in order."""
    lookups = {
        span.index
        for index in indices
        for step in (trace.by_id.get(trace.updates[index].step),)
        for span in (step.reads[0 if step.chunk_index is None else 1 :] if step else ())
        if step is not None and span.index != step.chunk_index
    }
    if not lookups:
        return sorted(indices)
    return sorted(indices | {index for index, update in enumerate(trace.updates) if update.chunk_index in lookups})


def supporting_lines(answer: str, question: str, lines: Sequence[str]) -> frozenset[int]:
    """Return the indices of the lines of memory that an answer rests on.

    They are the fewest that together have every word of the answer that is in memory; among equals, those with more
    words of the question. An answer without such a word, as "yes", rests on the line with most words of the question.
    One that says that there is none rests on no line.
    """
    if gives_no_answer(answer, quoted=True):
        return frozenset()
    words = [_anchors(line) for line in lines]
    topic, indices = _anchors(question), set[int]()

    def next_line(needed: frozenset[str]) -> None:
        """Add the line with most of the words that are needed."""
        indices.add(max(range(len(words)), key=lambda at: (len(words[at] & needed), len(words[at] & topic), -at)))

    memory_words = frozenset().union(*words)
    while missing := (_anchors(answer) & memory_words).difference(*(words[at] for at in indices)):
        next_line(missing)
    if not indices and topic & memory_words:
        next_line(topic)
    return frozenset(indices)


def _anchors(text: str) -> frozenset[str]:
    """Return a text's content words; of scripts without spaces, pairs of characters, as a name may have only two."""
    pairs = frozenset(term for term in terms(text) if len(term) > 1 and is_unspaced(term))
    return pairs.union(word for _, word in WordedText(text).anchors())


def find_support(answer: str, lines: Sequence[str]) -> tuple[SupportSpan, ...]:
    """Return the parts of memory lines whose words the answer repeats."""
    answer_words = WordedText(answer)
    parts: list[SupportSpan] = []
    for line_index, line in enumerate(lines):
        text = WordedText(line)
        end = 0
        for run in sorted(shared_runs(answer_words, text), key=lambda run: run.chunk_start):
            start = max(end, text.spans[run.chunk_start][0])
            end = max(end, text.spans[run.chunk_start + run.length - 1][1])
            if start < end:
                parts.append(SupportSpan(line_index, start, end))
    return tuple(parts)


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
    sources: dict[str, int]
    """The update that added each word of `content`."""


@dataclass(frozen=True, slots=True)
class _Reworded:
    """The update that reworded a line, and those before it: a chain, as a line may be reworded at every chunk."""

    before: _Reworded | None
    update: int


def _lineage(trace: Trace) -> tuple[list[_Line], tuple[LostLine, ...]]:
    """Return the final memory's lines, and those that were lost before it."""
    path, last_sources = trace.final_path, trace.final_sources
    uses = Counter(chain(last_sources, *map(trace.sources, path)))
    has_branches = any(count > 1 for count in uses.values())
    after: dict[int, list[_Line]] = {}

    def join_memories(indices: Sequence[int]) -> list[_Line]:
        """Return the lines of several memories; they are dropped after the last memory that is based on them."""
        uses.subtract(indices)
        memories = [after[index] if uses[index] else after.pop(index) for index in indices]
        return memories[0] if len(memories) == 1 else list(chain(*memories))

    lost: dict[_Line, int] = {}
    ancestors: set[_Line] = set()
    for update in path:
        index = trace.update_index(update.step)
        lines = join_memories(trace.sources(update))
        if update.changed:
            lines, removed, reworded = _next_lines(lines, memory_lines(update.memory), index)
            lost |= dict.fromkeys(removed, index)
            ancestors.update(reworded if has_branches else ())
        after[index] = lines
    final = join_memories(last_sources)
    # A line is not lost if another branch kept it, if it came back in the same words, or if it says nothing.
    final_words = {line.words for line in final}
    losses = [
        (line, index)
        for line, index in lost.items()
        if line not in ancestors and line.words not in final_words and not gives_no_answer(line.text)
    ]
    updates = trace.updates
    return final, tuple(
        LostLine(
            line=line.text,
            first_chunk=updates[line.first].chunk_index,
            gone_chunk=updates[index].chunk_index,
            branch=updates[index].branch,
            update=line.first,
            gone_update=index,
        )
        for line, index in sorted(losses, key=itemgetter(1))
    )


def _chain(reworded: _Reworded | None) -> tuple[int, ...]:
    updates = []
    while reworded is not None:
        updates.append(reworded.update)
        reworded = reworded.before
    return tuple(reversed(updates))


def _next_lines(
    old: Sequence[_Line], texts: Sequence[str], update: int
) -> tuple[list[_Line], list[_Line], list[_Line]]:
    """Return the next memory's lines, the lines of `old` without a successor, and the reworded lines.

    An unchanged line has no other successor; otherwise lists of similar facts would inherit from each other.
    """
    by_text: dict[str, list[int]] = {}
    for index, line in enumerate(old):
        by_text.setdefault(line.text, []).append(index)
    unchanged: list[int | None] = [by_text[text].pop(0) if by_text.get(text) else None for text in texts]
    candidates = set(range(len(old))).difference(index for index in unchanged if index is not None)
    lines_by_word: dict[str, list[int]] = {}
    for index in candidates:
        for word in old[index].content:
            lines_by_word.setdefault(word, []).append(index)
    lines: list[_Line] = []
    lost = set(candidates)
    for text, same in zip(texts, unchanged, strict=True):
        if same is not None:
            lines.append(old[same])
            continue
        folded = tuple(words(text))
        content = content_words(folded)
        shared = Counter(index for word in content for index in lines_by_word.get(word, ()))
        likeness = {index: _likeness(count, content, old[index].content) for index, count in shared.items()}
        best = max(likeness, key=lambda index: (likeness[index], -index), default=None)
        if best is None or likeness[best] < _SAME_LINE:
            lines.append(_Line(text, folded, content, update, None, dict.fromkeys(content, update)))
            continue
        parents = [index for index, count in shared.items() if count >= _SAME_LINE * len(old[index].content)]
        lost.difference_update(parents, (best,))
        lines.append(_reword(text, folded, content, old[best], [old[index] for index in parents], update))
    return lines, [old[index] for index in sorted(lost)], [old[index] for index in candidates - lost]


def _reword(
    text: str, words: tuple[str, ...], content: frozenset[str], line: _Line, others: Sequence[_Line], update: int
) -> _Line:
    if words == line.words:
        return replace(line, text=text)
    sources = {word: source for other in others for word, source in other.sources.items()} | line.sources
    word_sources = {word: sources.get(word, update) for word in content}
    return _Line(text, words, content, line.first, _Reworded(line.reworded, update), word_sources)


def _likeness(shared: int, new: frozenset[str], old: frozenset[str]) -> float:
    """Return the share of words in common; a line that was cut out of a longer one counts as similar, too."""
    dice = 2 * shared / (len(new) + len(old))
    contained = shared / len(new)
    return max(dice, contained) if shared >= _MIN_CONTAINED and contained >= _CONTAINED else dice
