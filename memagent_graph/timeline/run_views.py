"""Makes a `RunView` from a run log and the documents it refers to. `ReadResult.view` makes one, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from memagent_graph.calls import Span
from memagent_graph.documents import DocumentRef, DocumentStore, SourceMark
from memagent_graph.errors import DocumentError
from memagent_graph.run_log import RunLog
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import MemoryUpdate, Trace


def view_of_run(log: RunLog, run_id: str, store: DocumentStore) -> RunView:
    """A logged run, finished or not. Texts of chunks come from the store, if they are still there.

    Raises:
        RunNotFoundError: there is no such run in the log.
    """
    record = log.get(run_id)
    trace = log.trace(run_id)
    return RunView(
        run_id=run_id,
        question=record.question,
        document=record.document,
        model=trace.steps[-1].model if trace.steps else "",
        strategy=record.strategy,
        trace=trace,
        answer=record.answer,
        raw_answer=trace.answers[-1].text if trace.answers else None,
        stop_reason=record.stop_reason,
        began=record.began,
        ended=record.ended,
        rewards=tuple(each for each in log.rewards(run_id) if each.conversation is None),
        sections=sections_of(store, record.document),
        headings=headings_of(store, record.document),
        chunk_text=chunk_reader(store, record.document, trace),
        span_text=span_reader(store, record.document),
    )


def chunk_reader(store: DocumentStore, document: DocumentRef, trace: Trace) -> Callable[[MemoryUpdate], str | None]:
    """Returns the text that an update read, without passages looked up for it; None if it read none,
    or several that do not follow each other (the text between them was not read), or the store has lost it.
    """
    text = span_reader(store, document)

    def read(update: MemoryUpdate) -> str | None:
        reads = trace.by_id[update.step].reads if update.step in trace.by_id else ()
        reads = reads[:1] + tuple(span for span in reads[1:] if span.start_byte >= reads[0].end_byte)
        if update.chunk_index is None or any(a.end_byte != b.start_byte for a, b in pairwise(reads)):
            return None
        return text(update)

    return read


def span_reader(store: DocumentStore, document: DocumentRef) -> Callable[[Span | MemoryUpdate], str | None]:
    """Returns the text of a part of the document; None if the store has lost it."""

    def read(part: Span | MemoryUpdate) -> str | None:
        try:
            return store.read(document, part.start_byte, part.end_byte)
        except (DocumentError, OSError):
            return None

    return read


def sections_of(store: DocumentStore, document: DocumentRef) -> Sequence[SourceMark]:
    """Where the document's pages or sources begin; empty if the store has lost it."""
    try:
        return store.sections(document)
    except (DocumentError, OSError):
        return ()


def headings_of(store: DocumentStore, document: DocumentRef) -> Sequence[SourceMark]:
    """Where the document's headings and numbered clauses begin; empty if the store has lost it."""
    try:
        return store.headings(document)
    except (DocumentError, OSError):
        return ()
