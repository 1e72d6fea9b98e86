"""Finds the origin of a memory's lines from verbatim overlap with the chunks, without a model.

A line of the final memory is traced back through rewordings and merges to the update that first wrote it. Its quotes
are the passages that it shares with the chunks of that update. They do not prove that a line is true or follows from
a chunk. They show which of its words are in the chunk, and where.
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
from memagent_graph.grouping import group_values
from memagent_graph.no_answers import gives_no_answer
from memagent_graph.provenance.overlap import (
    Quote,
    TokenizedText,
    choose_quotes,
    find_matching_spans,
    find_possible_quotes,
    measure_coverage,
    select_content_words,
)
from memagent_graph.provenance.places import Places
from memagent_graph.trace import MemoryUpdate, Trace
from memagent_graph.words import WORD, find_sentence_ends, fold_words, is_unspaced, list_terms

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
    """The position of the quote's first character in the document."""
    end_char: int
    quote: str
    """The document's text from `start_char` to `end_char`."""
    section: str | None
    """The heading or numbered clause above the quote's start, or else its page or source."""
    coverage: float
    """The fraction of the line's words that are in this and the other quotes of the line."""
    branch: str
    """The branch that read the chunk; "" is the trunk."""
    update: int
    """The index in `Trace.updates` of the update that read the chunk; -1 for a quote from an excerpt."""
    page: int | None = None
    """The page on which the quote begins, counted from 1; None if the document has no pages."""
    link: str | None = None
    """A link to the page of a PDF document, such as `file:///reports/2025.pdf#page=7`. It has only the file's name if
    its path is unknown. None for other documents."""

    @property
    def place(self) -> str | None:
        """Page and section, as far as they are known."""
        if self.page is None or self.section is None or self.section == f"page {self.page}":
            return self.section
        return f"page {self.page}, {self.section}"


@dataclass(frozen=True, slots=True)
class LineOrigin:
    """The origin of a line of the final memory. Updates are indices in `Trace.updates`."""

    line: str
    update: int
    """The update that first wrote the line."""
    reworded: tuple[int, ...]
    """The later updates that reworded the line, in order."""
    edited: bool
    """Whether a person wrote the line: the memory was edited where the line first appears, and the chunk has less than
    half of its words."""
    coverage: float
    """The fraction of the line's words that are in its quotes."""


@dataclass(frozen=True, slots=True)
class LostLine:
    """A line of an earlier memory without a successor in the final memory. Updates are indices in `Trace.updates`."""

    line: str
    """Its last wording."""
    update: int
    """The update that first wrote the line."""
    gone: int
    """The update after which the line was missing."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origins of the lines of a final memory."""

    lines: tuple[LineOrigin, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    """Sorted by line, and by length (longest first)."""
    lost: tuple[LostLine, ...] = ()
    """In the order of their loss."""


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
    """Return the origins of the final memory's lines, and the lost lines.

    Args:
        trace: the run. Branches that did not contribute to the final memory do not count.
        chunk_text: returns the document's text from an update's `start_char` to `end_char`. It is called only for
            chunks with words of the final memory. If it returns None, there are origins but no quotes.
        places: the names of places in the document.
    """
    updates = trace.updates
    lines, lost = _trace_lines(trace)
    chunks: dict[int, TokenizedText | None] = {}
    origins: list[LineOrigin] = []
    evidence: list[Evidence] = []
    for line_index, line in enumerate(lines):
        words = TokenizedText(line.text)
        quotes = _find_line_quotes(line, words, trace, chunk_text, chunks)
        coverage = measure_coverage(words, quotes)
        for candidate in quotes:
            update = updates[candidate.source]
            evidence.append(
                _make_evidence(
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
        by_person = any(event.kind is EventKind.MEMORY_EDITED for event in updates[line.first].events)
        first_quotes = [candidate for candidate in quotes if candidate.source == line.first]
        origins.append(
            LineOrigin(
                line=line.text,
                update=line.first,
                reworded=line.reworded,
                edited=by_person and measure_coverage(words, first_quotes) < _SUPPORTED,
                coverage=coverage,
            )
        )
    return Provenance(tuple(origins), tuple(evidence), lost)


def find_excerpt_evidence(
    trace: Trace, answer: str, span_text: Callable[[Span], str | None], places: Places = _NOWHERE
) -> tuple[Evidence, ...]:
    """Return quotes from an excerpt, for a run that showed one instead of reading chunks.

    Args:
        trace: the run. Without an excerpt there are no quotes.
        answer: the run's answer.
        span_text: returns the document's text of a span; None if it is unknown.
        places: as for `find_provenance`.

    Returns:
        Quotes for the sentences of the answer, if it was written from the excerpt, or else of the final memory. They
        are whole sentences of the document, because the answer may be a single word.
    """
    reading = trace.newest_excerpt_call
    if reading is None:
        return ()
    texts = {
        number: TokenizedText(text)
        for number, span in enumerate(reading.reads)
        if (text := span_text(span)) is not None
    }
    evidence: dict[tuple[int, int, int], Evidence] = {}
    for line_index, line in enumerate(split_memory(answer if reading.writes is Writes.ANSWER else trace.final_memory)):
        words = TokenizedText(line)
        quotes = choose_quotes(words, chain(*(find_possible_quotes(words, texts[number], number) for number in texts)))
        for quote in quotes:
            span, text = reading.reads[quote.source], quote.chunk.text
            start, end = find_sentence_around(text, quote.start, quote.end)
            evidence.setdefault(
                (line_index, span.start_char + start, span.start_char + end),
                _make_evidence(
                    replace(quote, start=start, end=end),
                    span.start_char,
                    places,
                    line=line,
                    line_index=line_index,
                    chunk_index=span.index,
                    coverage=measure_coverage(words, quotes),
                    branch=reading.branch,
                    update=-1,
                ),
            )
    return tuple(evidence.values())


def find_sentence_around(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the start and end of the sentence around a quote, or of the quote in a very long sentence."""
    ends = find_sentence_ends(text)
    first = max((position for position in ends if position <= start), default=0)
    last = min((position for position in ends if position >= end), default=len(text))
    sentence = text[first:last]
    if len(sentence) > max(_MAX_SENTENCE, end - start):
        return start, end
    return first + len(sentence) - len(sentence.lstrip()), last - len(sentence) + len(sentence.rstrip())


def _make_evidence(quote: Quote, text_start: int, places: Places, **values: Any) -> Evidence:
    """Return the evidence for a quote from a text that begins at `text_start` in the document."""
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


def find_quoted_chunks(trace: Trace, chunk_text: Callable[[MemoryUpdate], str | None]) -> list[frozenset[int]]:
    """Return the chunks that the memory quotes after every update, as in `find_provenance`.

    Args:
        trace: the run.
        chunk_text: as for `find_provenance`.
    """
    after: list[list[_Line]] = []
    chunks: dict[int, TokenizedText | None] = {}
    quoted: dict[_Line, frozenset[int]] = {}
    for index, update in enumerate(trace.updates):
        sources = trace.source_indices(update)
        lines = [line for source in sources for line in after[source]]
        # After a merge, an unchanged memory may be equal to one of several.
        is_unchanged = not update.changed and len(sources) == 1
        after.append(lines if is_unchanged else _match_next_lines(lines, split_memory(update.memory), index)[0])
        for line in after[-1]:
            if line not in quoted:
                quotes = _find_line_quotes(line, TokenizedText(line.text), trace, chunk_text, chunks)
                quoted[line] = frozenset(trace.updates[quote.source].chunk_index or 0 for quote in quotes)
    return [frozenset().union(*(quoted[line] for line in lines)) for lines in after]


def _find_line_quotes(
    line: _Line,
    words: TokenizedText,
    trace: Trace,
    chunk_text: Callable[[MemoryUpdate], str | None],
    chunks: dict[int, TokenizedText | None],
) -> list[Quote]:
    """Return the quotes of a line from the chunks of its words. `chunks` caches their texts by update."""
    candidates: list[Quote] = []
    for index in _with_lookups({line.first, *line.sources.values()}, trace):
        if index not in chunks:
            update = trace.updates[index]
            text = None if update.chunk_index is None else chunk_text(update)
            chunks[index] = None if text is None else TokenizedText(text)
        chunk = chunks[index]
        candidates += [] if chunk is None else find_possible_quotes(words, chunk, index)
    return choose_quotes(words, candidates)


def _with_lookups(indices: set[int], trace: Trace) -> list[int]:
    """Return updates and the updates that read the results of their look-ups, in order."""
    lookups = {
        span.index
        for index in indices
        for call in (trace.calls_by_id[trace.updates[index].call_id],)
        for span in call.reads[0 if call.chunk_index is None else 1 :]
        if span.index != call.chunk_index
    }
    if not lookups:
        return sorted(indices)
    return sorted(indices | {index for index, update in enumerate(trace.updates) if update.chunk_index in lookups})


def find_supporting_lines(answer: str, question: str, lines: Sequence[str]) -> frozenset[int]:
    """Return the indices of the memory lines that support an answer.

    They are the smallest set of lines with all words of the answer that are in memory. Among equal sets, lines with
    more words of the question win. An answer without such words ("yes") has the line with most words of the question.
    An answer such as "not stated" has no line.
    """
    if gives_no_answer(answer, quoted=True):
        return frozenset()
    words = [_find_anchors(line) for line in lines]
    topic, indices = _find_anchors(question), set[int]()

    def next_line(needed: frozenset[str]) -> None:
        """Add the line with most of the needed words."""
        indices.add(max(range(len(words)), key=lambda at: (len(words[at] & needed), len(words[at] & topic), -at)))

    memory_words = frozenset().union(*words)
    while missing := (_find_anchors(answer) & memory_words).difference(*(words[at] for at in indices)):
        next_line(missing)
    if not indices and topic & memory_words:
        next_line(topic)
    return frozenset(indices)


def _find_anchors(text: str) -> frozenset[str]:
    """Return the content words of a text; in scripts without spaces, all pairs of characters."""
    pairs = frozenset(term for term in list_terms(text) if len(term) > 1 and is_unspaced(term))
    return pairs.union(word for _, word in TokenizedText(text).anchors())


def find_support(answer: str, lines: Sequence[str]) -> tuple[SupportSpan, ...]:
    """Return the parts of memory lines whose words the answer repeats."""
    answer_words = TokenizedText(answer)
    parts: list[SupportSpan] = []
    for line_index, line in enumerate(lines):
        text = TokenizedText(line)
        end = 0
        for match in sorted(find_matching_spans(answer_words, text), key=lambda match: match.chunk_start):
            start = max(end, text.spans[match.chunk_start][0])
            end = max(end, text.spans[match.chunk_start + match.length - 1][1])
            if start < end:
                parts.append(SupportSpan(line_index, start, end))
    return tuple(parts)


def split_memory(memory: str) -> list[str]:
    """Return the lines of a memory. Lines of several sentences are split; lines without words are left out."""
    lines: list[str] = []
    for line in memory.splitlines():
        start = 0
        for end in find_sentence_ends(line):
            sentence = line[start:end].strip()
            if len(sentence) > _MIN_SENTENCE or not _SPACED_SENTENCE.search(sentence):
                lines.append(sentence)
                start = end
        lines.append(line[start:].strip())
    return [line for line in lines if WORD.search(line)]


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """A line of a memory. Updates are indices in the trace. Lines with the same words are not equal."""

    text: str
    words: tuple[str, ...]
    content: frozenset[str]
    first: int
    reworded: tuple[int, ...]
    """The updates that reworded it, in order."""
    sources: dict[str, int]
    """The update that added each word of `content`."""


def _trace_lines(trace: Trace) -> tuple[list[_Line], tuple[LostLine, ...]]:
    """Return the lines of the final memory, and the lost lines."""
    path, last_sources = trace.final_path, trace.final_sources
    uses = Counter(chain(last_sources, *map(trace.source_indices, path)))
    has_branches = any(count > 1 for count in uses.values())
    after: dict[int, list[_Line]] = {}

    def join_memories(indices: Sequence[int]) -> list[_Line]:
        """Return the lines of several memories, and drop lines that no later memory needs."""
        uses.subtract(indices)
        memories = [after[index] if uses[index] else after.pop(index) for index in indices]
        return memories[0] if len(memories) == 1 else list(chain(*memories))

    lost: dict[_Line, int] = {}
    ancestors: set[_Line] = set()
    for update in path:
        index = trace.update_indices[update.call_id]
        lines = join_memories(trace.source_indices(update))
        if update.changed:
            lines, removed, reworded = _match_next_lines(lines, split_memory(update.memory), index)
            lost |= dict.fromkeys(removed, index)
            ancestors.update(reworded if has_branches else ())
        after[index] = lines
    final = join_memories(last_sources)
    # A line is not lost if another branch kept it, if it came back in the same words, or if it has no content.
    final_words = {line.words for line in final}
    losses = [
        (line, index)
        for line, index in lost.items()
        if line not in ancestors and line.words not in final_words and not gives_no_answer(line.text)
    ]
    return final, tuple(LostLine(line.text, line.first, index) for line, index in sorted(losses, key=itemgetter(1)))


def _match_next_lines(
    old: Sequence[_Line], texts: Sequence[str], update: int
) -> tuple[list[_Line], list[_Line], list[_Line]]:
    """Return the lines of the next memory, the lines of `old` without a successor, and the reworded lines.

    An unchanged line has no other successor. Otherwise similar facts in a list would inherit from each other.
    """
    by_text = group_values((line.text, index) for index, line in enumerate(old))
    unchanged: list[int | None] = [by_text[text].pop(0) if by_text.get(text) else None for text in texts]
    candidates = set(range(len(old))).difference(index for index in unchanged if index is not None)
    lines_by_word = group_values((word, index) for index in candidates for word in old[index].content)
    lines: list[_Line] = []
    lost = set(candidates)
    for text, same in zip(texts, unchanged, strict=True):
        if same is not None:
            lines.append(old[same])
            continue
        folded = tuple(fold_words(text))
        content = select_content_words(folded)
        shared = Counter(index for word in content for index in lines_by_word.get(word, ()))
        likeness = {index: _compute_likeness(count, content, old[index].content) for index, count in shared.items()}
        best = max(likeness, key=lambda index: (likeness[index], -index), default=None)
        if best is None or likeness[best] < _SAME_LINE:
            lines.append(_Line(text, folded, content, update, (), dict.fromkeys(content, update)))
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
    return _Line(text, words, content, line.first, (*line.reworded, update), word_sources)


def _compute_likeness(shared: int, new: frozenset[str], old: frozenset[str]) -> float:
    """Return the fraction of common words, where a part of a longer line counts as similar, too."""
    dice = 2 * shared / (len(new) + len(old))
    contained = shared / len(new)
    return max(dice, contained) if shared >= _MIN_CONTAINED and contained >= _CONTAINED else dice
