"""Makes a `RunView` from a run log and the documents it refers to. `ReadResult.view` makes one, too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

from memagent_graph.calls import Span
from memagent_graph.documents import DocumentRef, DocumentStore, SourceMark
from memagent_graph.errors import DocumentError
from memagent_graph.run_log import RunLog
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import MemoryUpdate, Trace

Value = TypeVar("Value")
Default = TypeVar("Default")


def view_of_run(log: RunLog, run_id: str, store: DocumentStore) -> RunView:
    """Return a logged run, finished or not. Texts of chunks come from the store, if they are still there.

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
        rewards=tuple(reward for reward in log.rewards(run_id) if reward.conversation is None),
        **texts_of(store, record.document, trace),
    )


def texts_of(store: DocumentStore | None, document: DocumentRef, trace: Trace) -> dict[str, Any]:
    """Return the fields of a `RunView` that come from the document's store, as far as the document is still there."""
    if store is None:
        return {}
    nowhere: list[SourceMark] = []
    return {
        "sections": _unless_lost(lambda: store.sections(document), nowhere),
        "headings": _unless_lost(lambda: store.headings(document), nowhere),
        "chunk_text": chunk_reader(store, document, trace),
        "span_text": _span_reader(store, document),
    }


def chunk_reader(store: DocumentStore, document: DocumentRef, trace: Trace) -> Callable[[MemoryUpdate], str | None]:
    """Return a function that returns the text that an update read, without passages looked up for it.

    It returns None if the update read none, or several that do not follow each other (the text between them was not
    read), or if the store has lost it.
    """
    text = _span_reader(store, document)

    def read(update: MemoryUpdate) -> str | None:
        reads = trace.by_id[update.step].reads if update.step in trace.by_id else ()
        reads = reads[:1] + tuple(span for span in reads[1:] if span.start_byte >= reads[0].end_byte)
        if update.chunk_index is None or any(a.end_byte != b.start_byte for a, b in pairwise(reads)):
            return None
        return text(update)

    return read


def _span_reader(store: DocumentStore, document: DocumentRef) -> Callable[[Span | MemoryUpdate], str | None]:
    """Return a function that returns the text of a part of the document; None if the store has lost it."""
    return lambda part: _unless_lost(lambda: store.read(document, part.start_byte, part.end_byte), None)


def _unless_lost(read: Callable[[], Value], otherwise: Default) -> Value | Default:
    try:
        return read()
    except (DocumentError, OSError):
        return otherwise
