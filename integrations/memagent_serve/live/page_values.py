"""Data on reads, updates and sources for the live page, as JSON values.

Texts of documents, policies and people are sent unchanged; the page shows them only as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from memagent_graph.documents import DocumentStore
from memagent_graph.provenance.evidence import Evidence
from memagent_graph.provenance.word_diff import compare_words
from memagent_graph.timeline.model import Timeline
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import MemoryUpdate
from memagent_serve.api_errors import not_found
from memagent_serve.ledger import Entry
from memagent_serve.reads import ServedRead

_CONTEXT_BYTES: Final = 6000
_MAX_QUOTES: Final = 4


def format_read(entry: Entry, read: ServedRead | None, answer: str | None = None) -> dict[str, Any]:
    """Return a read for the list. A read that has not ended and is not running here was interrupted.

    `answer` is the one in the run log, for a read that this process no longer holds.
    """
    state = read.state if read is not None else entry.state
    return {
        "id": entry.run_id,
        "question": entry.question,
        "document": entry.document,
        "began": entry.began,
        "ended": entry.ended,
        "state": state.value if read is not None or state.has_ended else "interrupted",
        "error": entry.error if read is None else None,
        "edited": entry.edited,
        "answer": read.result.answer if read and read.result else answer,
        "chunks": read.chunks if read else None,
        "progress": read.update.progress if read and read.update else None,
    }


def format_update(update: MemoryUpdate, before: str) -> dict[str, Any]:
    """Return a memory update, with the differences from the previous memory."""
    name = "merge" if update.chunk_index is None else f"chunk {update.chunk_number}"
    return {
        "chunk": update.chunk_index,
        "branch": update.branch,
        "name": f"{name}, branch {update.branch}" if update.branch else name,
        "memory": update.memory,
        "diff": [(part.op.value, part.text) for part in compare_words(before, update.memory)]
        if before != update.memory
        else [],
        "progress": update.progress,
        "tokens": [update.chunk_tokens, update.prompt_tokens, update.completion_tokens],
        "seconds": round(update.seconds, 2),
        "events": [
            {"kind": event.kind.value, "detail": event.detail, "rule": event.rule.value if event.rule else ""}
            for event in update.events
        ],
    }


def format_sources(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the lines that the answer rests on, each with its origin and quotes; without an answer, all of memory."""
    supporting = {quote.line_index for quote in timeline.view.evidence}
    if timeline.excerpt is not None:
        return [
            {"line": line, "from": "an excerpt", "edited": False, "quotes": _format_quotes(list(quotes))}
            for line, quotes in groupby(timeline.excerpt, key=attrgetter("line"))
        ]
    return [
        {
            "line": line.line,
            "from": timeline.step(line.update).name,
            "edited": line.edited,
            "quotes": _format_quotes(timeline.quotes(index)),
        }
        for index, line in enumerate(timeline.provenance.lines)
        if timeline.view.answer is None or index in supporting
    ]


def _format_quotes(evidence: Sequence[Evidence]) -> list[dict[str, Any]]:
    return [
        {"text": quote.quote, "start": quote.start_char, "end": quote.end_char, "section": quote.place}
        for quote in evidence[:_MAX_QUOTES]
    ]


def format_passage(view: RunView, store: DocumentStore, start: int, end: int) -> Mapping[str, Any]:
    """Return a passage of a run's document with up to 6,000 bytes of text on each side.

    Args:
        view: the run; the spans that it read have the byte positions of characters.
        store: the store with the document's text.
        start: the passage's first character.
        end: the character after its last one.

    Raises:
        ApiError: 404; the run has not read that far.
        DocumentError: the text is no longer stored.
    """
    spans = {span for step in view.trace.steps for span in step.reads}
    span = next((span for span in spans if span.start_char <= start < span.end_char), None)
    text = None if span is None else view.span_text(span)
    if span is None or text is None:
        raise not_found("the run has not read this passage, or its text is no longer stored")
    first = span.start_byte + len(text[: start - span.start_char].encode())
    last = first + len(text[start - span.start_char : end - span.start_char].encode())
    size = view.document["size"] or last
    begin, end_byte = max(0, first - _CONTEXT_BYTES), min(size, last + _CONTEXT_BYTES)
    before, passage, after = (
        store.read_bytes(view.document, *span).decode(errors="ignore")
        for span in ((begin, first), (first, last), (last, end_byte))
    )
    return {
        "document": view.document["name"],
        "start": start,
        "end": end,
        "before": before,
        "passage": passage,
        "after": after,
        "begins": begin == 0,
        "ends": end_byte >= size,
    }
