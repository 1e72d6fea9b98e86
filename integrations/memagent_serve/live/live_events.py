"""The live page's data on reads, updates and sources as JSON values, and the stream of its events.

The stream has the states of a key's reads, and every update of the read that is shown. It checks for changes a few
times per second, so neither a fast policy nor many reads can flood a page. A browser needs only one connection for all
reads. Texts of documents, policies and people are sent unchanged; the page shows them only as text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from memagent_graph.documents import DocumentStore
from memagent_graph.provenance.evidence import Evidence
from memagent_graph.provenance.word_diff import compare_words
from memagent_graph.timeline.model import Timeline
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import MemoryUpdate
from memagent_serve.api_errors import ApiError, not_found
from memagent_serve.keys import Owner
from memagent_serve.ledger import Entry
from memagent_serve.live.live_reads import LiveReads
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
        "state": state.value if read is not None or state.has_ended else "interrupted",
        "error": entry.error if read is None else None,
        "edited": entry.edited,
        "answer": read.result.answer if read and read.result else answer,
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
        "tokens": update.chunk_tokens,
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
            "from": timeline.find_step(line.update).name,
            "edited": line.edited,
            "quotes": _format_quotes(timeline.list_quotes(index)),
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
    spans = {span for call in view.trace.calls for span in call.reads}
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


_SECONDS_BETWEEN_CHECKS: Final = 0.2
_NEWEST_UPDATES: Final = 40
"""The number of newest updates that are sent when the page opens a read. The read's run page has all updates."""


class ReadWatcher:
    """Sends a page the changes of the read that it shows."""

    def __init__(self, reads: LiveReads, owner: Owner, run_id: str) -> None:
        self._reads, self._owner, self._run_id = reads, owner, run_id
        self._edits: int | None = None
        self._read: ServedRead | None = None
        self._sent = 0
        self._memories: dict[str, str] = {}
        self._by_call: dict[str, str] = {}
        self._state = ""

    async def iter_changes(self) -> AsyncIterator[dict[str, str]]:
        """Yield the changes since the last call.

        Raises:
            ApiError: 404; there is no such read.
        """
        entry = await self._reads.get_entry(self._owner, self._run_id)
        read = self._reads.manager.find(self._owner, self._run_id)
        edits = self._reads.edits[self._run_id]
        if edits != self._edits:
            self._edits, self._read, self._sent = edits, read, 0
            yield _make_event("snapshot", await self._make_snapshot())
        elif read is not None and read is not self._read:
            self._read, self._sent = read, 0
        if self._read is not None:
            while self._sent < len(self._read.updates):
                update = self._read.updates[self._sent]
                self._sent += 1
                if update.call_id not in self._by_call:
                    yield _make_event("update", self._format(update))
        state = json.dumps([entry.edited, format_read(entry, read)["state"]])
        if state != self._state:
            self._state = state
            value = {**format_read(entry, read), **await self._get_outcome()}
            yield _make_event("state", value)

    async def _make_snapshot(self) -> dict[str, Any]:
        self._memories, self._by_call = {}, {}
        try:
            updates = await self._reads.list_updates(self._owner, self._run_id)
        except ApiError:  # it has not begun
            return {"updates": [], "earlier": 0}
        return await asyncio.to_thread(self._format_history, updates)

    def _format_history(self, updates: Sequence[MemoryUpdate]) -> dict[str, Any]:
        values = []
        # The newest update of each branch is always sent, because its memory can be edited.
        newest = {update.branch: index for index, update in enumerate(updates)}
        for index, update in enumerate(updates):
            if index >= len(updates) - _NEWEST_UPDATES or newest[update.branch] == index:
                values.append(self._format(update))
            else:
                self._record(update)
        return {"updates": values, "earlier": len(updates) - len(values)}

    def _format(self, update: MemoryUpdate) -> dict[str, Any]:
        sources = dict.fromkeys(self._by_call.get(call_id, "") for call_id in update.sources)
        before = self._memories.get(update.branch)
        value = format_update(update, "\n".join(filter(None, sources)) if before is None else before)
        self._record(update)
        return value

    def _record(self, update: MemoryUpdate) -> None:
        self._memories[update.branch] = self._by_call[update.call_id] = update.memory

    async def _get_outcome(self) -> dict[str, Any]:
        try:
            view = await self._reads.get_view(self._owner, self._run_id)
        except ApiError:
            return {"answer": None, "thumb": None}
        thumbs = [reward.value for reward in view.rewards if reward.name == "thumbs"]
        return {
            "answer": view.answer,
            "thumb": thumbs[-1] if thumbs else None,
            "model": view.model,
            "strategy": view.strategy,
        }


async def stream_changes(reads: LiveReads, owner: Owner, run_id: str | None) -> AsyncIterator[dict[str, str]]:
    """Yield changes of a key's reads, and every update of the read that the page shows.

    Events: "reads" has a list of the reads that changed. The read with `run_id` has "snapshot", "update" and "state",
    or "gone" if it does not exist.
    """
    known: dict[str, Any] = {}  # by run id: the state and progress that the page has
    watch = ReadWatcher(reads, owner, run_id) if run_id else None
    while True:
        running = {read.run_id: read for read in reads.manager.list_running(owner)}
        changed_reads = []
        for run in {**dict.fromkeys(known), **running}:
            read = running.get(run)
            state = (read.state, read.chunks) if read else None
            if run in known and known[run] == state:
                continue
            entry = await asyncio.to_thread(reads.ledger.get, owner.name, run)
            if entry is not None:
                changed_reads.append(format_read(entry, read or reads.manager.find(owner, run)))
            known[run] = state
        known = {run: state for run, state in known.items() if state is not None}
        if changed_reads:
            yield _make_event("reads", changed_reads)
        if watch is not None:
            try:
                async for event in watch.iter_changes():
                    yield event
            except ApiError as error:
                yield _make_event("gone", error.message)
                watch = None
        await asyncio.sleep(_SECONDS_BETWEEN_CHECKS)


def _make_event(name: str, value: Any) -> dict[str, str]:
    return {"event": name, "data": json.dumps(value, ensure_ascii=True)}
