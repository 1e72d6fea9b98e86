"""Finds the origins of a memory's lines from their verbatim overlap with chunks, without a model.

A line of the final memory is traced back through rewordings and merges to the update that first wrote it. Its quotes
are the passages that it shares with the chunks of that update. They do not prove that a line is true or follows from
a chunk. They show which of its words are in the chunk, and where.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

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
from memagent_graph.trace import Call, MemoryUpdate, Span, Trace
from memagent_graph.words import WORD, find_character_pairs, find_sentence_ends, fold_words

_MIN_SIMILARITY = 0.6
_MIN_CONTAINED_FRACTION = 0.8
_MIN_CONTAINED_WORDS = 3
_MIN_SENTENCE_CHARS = 40
_MIN_CHUNK_COVERAGE = 0.5
_SPACED_SENTENCE = re.compile(r"[.!?][\"'”’)\]]*$")
_MAX_SENTENCE_CHARS = 500
_NO_PLACES = Places()
_Rewordings: TypeAlias = "tuple[_Rewordings, int] | None"


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


def find_provenance(
    trace: Trace, load_chunk_text: Callable[[MemoryUpdate], str | None], places: Places = _NO_PLACES
) -> Provenance:
    """Return the origins of the final memory's lines, and the lost lines.

    Args:
        trace: the run. Branches that did not contribute to the final memory do not count.
        load_chunk_text: returns the document's text from an update's `start_char` to `end_char`. It is called only for
            chunks with words of the final memory. If it returns None, there are origins but no quotes.
        places: the names of places in the document.
    """
    updates = trace.updates
    lines, lost = _trace_lines(trace)
    chunks: dict[int, TokenizedText] = {}
    origins: list[LineOrigin] = []
    evidence: list[Evidence] = []
    for line_index, line in enumerate(lines):
        line_words = TokenizedText(line.text)
        quotes = _find_line_quotes(line, line_words, trace, load_chunk_text, chunks)
        coverage = measure_coverage(line_words, quotes)
        for quote in quotes:
            update = updates[quote.source]
            evidence.append(
                _make_evidence(
                    quote,
                    update.start_char,
                    places,
                    line=line.text,
                    line_index=line_index,
                    chunk_index=update.chunk_index or 0,
                    coverage=coverage,
                    branch=update.branch,
                    update=quote.source,
                )
            )
        has_edit = any(event.kind is EventKind.MEMORY_EDITED for event in updates[line.first_update].events)
        first_update_quotes = [quote for quote in quotes if quote.source == line.first_update]
        origins.append(
            LineOrigin(
                line=line.text,
                update=line.first_update,
                reworded=line.rewording_updates,
                edited=has_edit and measure_coverage(line_words, first_update_quotes) < _MIN_CHUNK_COVERAGE,
                coverage=coverage,
            )
        )
    return Provenance(tuple(origins), tuple(evidence), lost)


def find_excerpt_evidence(
    call: Call, supported_text: str, load_span_text: Callable[[Span], str | None], places: Places
) -> tuple[Evidence, ...]:
    """Return quotes from an excerpt, for a run that showed one instead of reading chunks.

    Args:
        call: the call with the excerpt in its prompt.
        supported_text: the answer, if it was written from the excerpt, or else the final memory.
        load_span_text: returns the document's text of a span; None if it is unknown.
        places: as for `find_provenance`.

    Returns:
        Quotes for the sentences of the text. They are whole sentences of the document, because an answer may be a
        single word.
    """
    texts = [TokenizedText(load_span_text(span) or "") for span in call.reads]
    evidence: dict[tuple[int, int, int], Evidence] = {}
    for line_index, line in enumerate(split_memory(supported_text)):
        line_words = TokenizedText(line)
        candidates = (find_possible_quotes(line_words, text, span_index) for span_index, text in enumerate(texts))
        quotes = choose_quotes(line_words, chain(*candidates))
        for quote in quotes:
            span, text = call.reads[quote.source], quote.chunk.text
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
                    coverage=measure_coverage(line_words, quotes),
                    branch=call.branch,
                    update=-1,
                ),
            )
    return tuple(evidence.values())


def find_sentence_around(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the start and end of the sentence around a quote, or of the quote in a very long sentence."""
    ends = find_sentence_ends(text)
    sentence_start = max((position for position in ends if position <= start), default=0)
    sentence_end = min((position for position in ends if position >= end), default=len(text))
    sentence = text[sentence_start:sentence_end]
    if len(sentence) > max(_MAX_SENTENCE_CHARS, end - start):
        return start, end
    return sentence_start + len(sentence) - len(sentence.lstrip()), sentence_start + len(sentence.rstrip())


def _make_evidence(quote: Quote, text_start: int, places: Places, **values: Any) -> Evidence:
    """Return the evidence for a quote from a text that begins at `text_start` in the document."""
    start = text_start + quote.start
    page = places.find_page(start)
    return Evidence(
        start_char=start,
        end_char=text_start + quote.end,
        quote=quote.chunk.text[quote.start : quote.end],
        section=places.find_section(start),
        page=page,
        link=f"{places.link_prefix}#page={page}" if places.link_prefix and page is not None else None,
        **values,
    )


def find_quoted_chunks(trace: Trace, load_chunk_text: Callable[[MemoryUpdate], str | None]) -> list[frozenset[int]]:
    """Return, for each update, the indices of the chunks that the memory after it quotes.

    Args:
        trace: the run.
        load_chunk_text: as for `find_provenance`.
    """
    quoted_chunks: list[frozenset[int]] = []
    chunks: dict[int, TokenizedText] = {}
    chunks_by_line = WeakKeyDictionary[_Line, frozenset[int]]()
    for _, (lines, _, _) in _follow_lines(trace, trace.updates):
        for line in lines:
            if line not in chunks_by_line:
                quotes = _find_line_quotes(line, TokenizedText(line.text), trace, load_chunk_text, chunks)
                chunks_by_line[line] = frozenset(trace.updates[quote.source].chunk_index or 0 for quote in quotes)
        quoted_chunks.append(frozenset().union(*(chunks_by_line[line] for line in lines)))
    return quoted_chunks


def _find_line_quotes(
    line: _Line,
    line_words: TokenizedText,
    trace: Trace,
    load_chunk_text: Callable[[MemoryUpdate], str | None],
    chunks: dict[int, TokenizedText],
) -> list[Quote]:
    """Return the quotes of a line from the chunks of its words. `chunks` caches their texts by update."""
    candidates: list[Quote] = []
    for index in _add_lookup_sources({line.first_update, *line.sources.values()}, trace):
        if index not in chunks:
            update = trace.updates[index]
            text = load_chunk_text(update) if trace.reads_one_passage(update) else None
            chunks[index] = TokenizedText(text or "")
        candidates += find_possible_quotes(line_words, chunks[index], index)
    return choose_quotes(line_words, candidates)


def _add_lookup_sources(indices: set[int], trace: Trace) -> list[int]:
    """Return updates and the updates that read the results of their look-ups, in order."""
    calls = [trace.calls_by_id[trace.updates[index].call_id] for index in indices]
    lookups = {span.index for call in calls for span in call.reads if span.index != call.chunk_index}
    if not lookups:
        return sorted(indices)
    return sorted(indices | {index for index, update in enumerate(trace.updates) if update.chunk_index in lookups})


def find_supporting_lines(answer: str, question: str, lines: Sequence[str]) -> frozenset[int]:
    """Return the indices of the memory lines that support an answer.

    They are the smallest set of lines with all words of the answer that are in memory. Among equal sets, lines with
    more words of the question win. An answer without such words ("yes") has the line with the most words of the
    question. An answer such as "not stated" has no line.
    """
    if gives_no_answer(answer, quoted=True):
        return frozenset()
    line_words = [_find_anchors(line) for line in lines]
    memory_words = frozenset().union(*line_words)
    question_words = _find_anchors(question) & memory_words

    def find_best_line(needed_words: frozenset[str]) -> int:
        """Return the line with the most of the needed words."""
        common = [(len(words & needed_words), len(words & question_words)) for words in line_words]
        return common.index(max(common))

    missing_words = _find_anchors(answer) & memory_words
    if not missing_words:
        return frozenset({find_best_line(question_words)} if question_words else ())
    indices = set[int]()
    while missing_words:
        index = find_best_line(missing_words)
        indices.add(index)
        missing_words -= line_words[index]
    return frozenset(indices)


def _find_anchors(text: str) -> frozenset[str]:
    """Return the content words of a text; in scripts without spaces, all pairs of characters."""
    return find_character_pairs(text).union(word for _, word in TokenizedText(text).find_anchors())


def split_by_support(answer_words: TokenizedText, line: str) -> list[tuple[str, bool]]:
    """Return the pieces of a memory line, and whether an answer of these words repeats theirs."""
    text = TokenizedText(line)
    pieces: list[tuple[str, bool]] = []
    end = 0
    for match in sorted(find_matching_spans(answer_words, text), key=lambda match: match.chunk_start):
        start = max(end, text.spans[match.chunk_start][0])
        match_end = text.spans[match.chunk_start + match.length - 1][1]
        if start < match_end:
            pieces += [(line[end:start], False), (line[start:match_end], True)]
            end = match_end
    return [piece for piece in [*pieces, (line[end:], False)] if piece[0]]


def split_memory(memory: str) -> list[str]:
    """Return the lines of a memory. Lines of several sentences are split; lines without words are left out."""
    lines: list[str] = []
    for line in memory.splitlines():
        start = 0
        for end in find_sentence_ends(line):
            sentence = line[start:end].strip()
            if len(sentence) > _MIN_SENTENCE_CHARS or not _SPACED_SENTENCE.search(sentence):
                lines.append(sentence)
                start = end
        lines.append(line[start:].strip())
    return [line for line in lines if WORD.search(line)]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Line:
    """A line of a memory. Updates are indices in the trace. Lines with the same words are not equal."""

    text: str
    words: tuple[str, ...]
    first_update: int
    rewordings: _Rewordings
    """The updates that reworded it: the pair of the line before, which is shared and not copied, and the newest."""
    sources: dict[str, int]
    """Its content words, each with the update that added it."""

    @property
    def rewording_updates(self) -> tuple[int, ...]:
        """The updates that reworded it, in order."""
        updates: list[int] = []
        rewordings = self.rewordings
        while rewordings:
            rewordings, update = rewordings
            updates.append(update)
        return tuple(reversed(updates))


_Matches: TypeAlias = tuple[list[_Line], list[_Line], list[_Line]]
"""The lines of a memory, the earlier lines without a successor, and those that were reworded."""


def _trace_lines(trace: Trace) -> tuple[list[_Line], tuple[LostLine, ...]]:
    """Return the lines of the final memory, and the lost lines."""
    lines_by_source: dict[int, list[_Line]] = {source: [] for source in trace.final_sources}
    loss_updates: dict[_Line, int] = {}
    ancestors = WeakSet[_Line]()
    for index, (lines, removed, reworded) in _follow_lines(trace, trace.final_path):
        loss_updates |= dict.fromkeys(removed, index)
        ancestors.update(reworded)
        if index in lines_by_source:
            lines_by_source[index] = lines
    final_lines = list(chain(*lines_by_source.values()))
    # A line is not lost if another branch kept it, if it came back in the same words, or if it has no content.
    final_words = {line.words for line in final_lines}
    losses = [
        LostLine(line.text, line.first_update, index)
        for line, index in loss_updates.items()
        if line not in ancestors and line.words not in final_words and not gives_no_answer(line.text)
    ]
    return final_lines, tuple(sorted(losses, key=attrgetter("gone")))


def _follow_lines(trace: Trace, updates: Sequence[MemoryUpdate]) -> Iterator[tuple[int, _Matches]]:
    """Yield the index of each update, and the lines of its memory, matched with those of its sources.

    Lines are kept only until the last of the updates that start from their memory.
    """
    last_uses = {source: update.call_id for update in updates for source in trace.source_indices(update)}
    lines_after_update: dict[int, list[_Line]] = {}
    for update in updates:
        index = trace.update_indices[update.call_id]
        # The memory that it continues comes first: of lines with the same text, the first one is the unchanged one.
        sources = dict.fromkeys((*trace.continued_indices(update), *trace.source_indices(update)))
        lines = [line for source in sources for line in lines_after_update[source]]
        matches: _Matches = (lines, [], [])
        if update.changed or len(sources) != 1:  # lines of other branches are lost even if the memory is unchanged
            matches = _match_next_lines(lines, split_memory(update.memory), index)
        lines_after_update[index] = matches[0]
        for source in sources:
            if last_uses[source] == update.call_id:
                del lines_after_update[source]
        yield index, matches


def _match_next_lines(old_lines: Sequence[_Line], texts: Sequence[str], update_index: int) -> _Matches:
    """Match the lines of the next memory with the old ones.

    An unchanged line has no other successor. Otherwise similar facts in a list would inherit from each other.
    """
    by_text = group_values((line.text, index) for index, line in enumerate(old_lines))
    unchanged: list[int | None] = [by_text[text].pop(0) if by_text.get(text) else None for text in texts]
    candidates = set(range(len(old_lines))).difference(index for index in unchanged if index is not None)
    lines_by_word = group_values((word, index) for index in candidates for word in old_lines[index].sources)
    lines: list[_Line] = []
    lost = set(candidates)
    for text, unchanged_index in zip(texts, unchanged, strict=True):
        if unchanged_index is not None:
            lines.append(old_lines[unchanged_index])
            continue
        folded_words = tuple(fold_words(text))
        content_words = select_content_words(folded_words)
        shared_word_counts = Counter(index for word in content_words for index in lines_by_word.get(word, ()))
        similarities = {
            index: _compute_similarity(count, len(content_words), len(old_lines[index].sources))
            for index, count in shared_word_counts.items()
        }
        best_index = max(similarities, key=lambda index: (similarities[index], -index), default=None)
        if best_index is None or similarities[best_index] < _MIN_SIMILARITY:
            lines.append(_Line(text, folded_words, update_index, None, dict.fromkeys(content_words, update_index)))
            continue
        parents = {
            index: old_lines[index]
            for index, count in shared_word_counts.items()
            if index == best_index or count >= _MIN_SIMILARITY * len(old_lines[index].sources)
        }
        lost.difference_update(parents)
        line = old_lines[best_index]
        if folded_words == line.words:
            lines.append(replace(line, text=text))
            continue
        word_sources: dict[str, int] = {}
        for word in content_words:
            sources = [parents[index].sources[word] for index in lines_by_word.get(word, ()) if index in parents]
            word_sources[word] = max(sources, default=update_index)
        lines.append(_Line(text, folded_words, line.first_update, (line.rewordings, update_index), word_sources))
    return lines, [old_lines[index] for index in sorted(lost)], [old_lines[index] for index in candidates - lost]


def _compute_similarity(shared_count: int, new_count: int, old_count: int) -> float:
    """Return the Dice coefficient of two lines' words; a part of a longer line also counts as similar."""
    dice = 2 * shared_count / (new_count + old_count)
    contained_fraction = shared_count / new_count
    is_contained = shared_count >= _MIN_CONTAINED_WORDS and contained_fraction >= _MIN_CONTAINED_FRACTION
    return max(dice, contained_fraction) if is_contained else dice
