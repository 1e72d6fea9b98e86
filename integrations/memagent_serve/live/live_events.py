"""The JSON data of the live page on reads, updates and sources, and the stream of its events.

The stream has the states of a key's reads, and every update of the read that is shown. It checks for changes a few
times per second, so that neither a fast policy nor many reads can flood a page. A browser needs only one connection for
all reads. Texts of documents, policies and people are sent unchanged; the page shows them only as text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from memagent_graph.documents import DocumentStore
from memagent_graph.errors import RunNotFoundError
from memagent_graph.provenance.evidence import Evidence
from memagent_graph.provenance.word_diff import compare_words
from memagent_graph.timeline.model import Timeline
from memagent_graph.timeline.view import RunView
from memagent_graph.trace import MemoryUpdate
from memagent_serve.api_errors import APIError, make_not_found_error
from memagent_serve.keys import Owner
from memagent_serve.ledger import Entry
from memagent_serve.live.live_reads import LiveReads
from memagent_serve.reads import ServedRead, name_state

_MAX_CONTEXT_BYTES: Final = 6000
_MAX_QUOTES: Final = 4


def format_read(entry: Entry, read: ServedRead | None, answer: str | None = None) -> dict[str, Any]:
    """Return a read for the list.

    `answer` is the answer in the run log, for a read that this process no longer has in memory.
    """
    return {
        "id": entry.run_id,
        "question": entry.question,
        "document": entry.document,
        "began": entry.began,
        "state": name_state(entry, read),
        "error": entry.error if read is None else None,
        "edited": entry.edited,
        "answer": read.result.answer if read and read.result else answer,
        "progress": read.newest_update.progress if read and read.newest_update else None,
    }


def format_update(update: MemoryUpdate, memory_before: str) -> dict[str, Any]:
    """Return a memory update, with the differences from the previous memory."""
    name = "merge" if update.chunk_index is None else f"chunk {update.chunk_number}"
    return {
        "chunk": update.chunk_index,
        "branch": update.branch,
        "name": f"{name}, branch {update.branch}" if update.branch else name,
        "memory": update.memory,
        "diff": [(part.op.value, part.text) for part in compare_words(memory_before, update.memory)]
        if memory_before != update.memory
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
    """Return the lines that the answer rests on, each with its origin and quotes; all lines if there is no answer."""
    supporting_lines = {quote.line_index for quote in timeline.view.evidence}
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
        for index, line in enumerate(timeline.view.provenance.lines)
        if timeline.view.answer is None or index in supporting_lines
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
        end: the character after the passage.

    Raises:
        APIError: 404; the run has not read that far.
        DocumentError: the text is no longer stored.
    """
    spans = {span for call in view.trace.calls for span in call.reads}
    span = next((span for span in spans if span.start_char <= start < span.end_char), None)
    text = None if span is None else view.span_text(span)
    if span is None or text is None:
        raise make_not_found_error("the run has not read this passage, or its text is no longer stored")
    passage_start = span.start_byte + len(text[: start - span.start_char].encode())
    passage_end = passage_start + len(text[start - span.start_char : end - span.start_char].encode())
    document_end = view.document["size"] or passage_end
    context_start = max(0, passage_start - _MAX_CONTEXT_BYTES)
    context_end = min(document_end, passage_end + _MAX_CONTEXT_BYTES)
    text_before, passage, text_after = (
        store.read_bytes(view.document, *span).decode(errors="ignore")
        for span in ((context_start, passage_start), (passage_start, passage_end), (passage_end, context_end))
    )
    return {
        "document": view.document["name"],
        "start": start,
        "end": end,
        "before": text_before,
        "passage": passage,
        "after": text_after,
        "begins": context_start == 0,
        "ends": context_end >= document_end,
    }


_SECONDS_BETWEEN_CHECKS: Final = 0.2
_MAX_SNAPSHOT_UPDATES: Final = 40
"""The number of newest updates that are sent when the page opens a read. The run page has all updates."""


class ReadWatcher:
    """Sends a page the changes of the read that it shows."""

    def __init__(self, reads: LiveReads, owner: Owner, run_id: str) -> None:
        self._reads, self._owner, self._run_id = reads, owner, run_id
        self._revision: int | None = None
        self._read: ServedRead | None = None
        self._memories_by_branch: dict[str, str] = {}
        self._memories_by_call: dict[str, str] = {}
        self._state = ""

    async def iter_changes(self) -> AsyncIterator[dict[str, str]]:
        """Yield the changes since the last call.

        Raises:
            APIError: 404; there is no such read.
        """
        entry = await asyncio.to_thread(self._reads.ledger.get, self._owner.name, self._run_id)
        read = self._reads.manager.find(self._owner, self._run_id)
        if self._reads.revisions[self._run_id] != self._revision:
            self._revision, self._read = self._reads.revisions[self._run_id], read
            yield _make_event("snapshot", await self._make_snapshot())
        self._read = read or self._read
        for update in tuple(self._read.updates) if self._read is not None else ():
            if update.call_id not in self._memories_by_call:
                yield _make_event("update", self._format_next_update(update))
        state = json.dumps([entry.edited, format_read(entry, read)["state"]])
        if state != self._state:
            self._state = state
            values = {**format_read(entry, read), **await self._get_outcome()}
            yield _make_event("state", values)

    async def _make_snapshot(self) -> dict[str, Any]:
        self._memories_by_branch, self._memories_by_call = {}, {}
        try:
            updates = await self._reads.list_updates(self._owner, self._run_id)
        except (APIError, RunNotFoundError):  # the read has not begun
            return {"updates": [], "earlier": 0}
        return await asyncio.to_thread(self._format_history, updates)

    def _format_history(self, updates: Sequence[MemoryUpdate]) -> dict[str, Any]:
        values = []
        # The newest update of each branch is always sent, because its memory can be edited.
        newest_indexes = {update.branch: index for index, update in enumerate(updates)}
        for index, update in enumerate(updates):
            if index >= len(updates) - _MAX_SNAPSHOT_UPDATES or newest_indexes[update.branch] == index:
                values.append(self._format_next_update(update))
            else:
                self._record_memory(update)
        return {"updates": values, "earlier": len(updates) - len(values)}

    def _format_next_update(self, update: MemoryUpdate) -> dict[str, Any]:
        sources = dict.fromkeys(self._memories_by_call.get(call_id, "") for call_id in update.sources)
        memory_before = self._memories_by_branch.get(update.branch)
        value = format_update(update, "\n".join(filter(None, sources)) if memory_before is None else memory_before)
        self._record_memory(update)
        return value

    def _record_memory(self, update: MemoryUpdate) -> None:
        self._memories_by_branch[update.branch] = self._memories_by_call[update.call_id] = update.memory

    async def _get_outcome(self) -> dict[str, Any]:
        try:
            view = await self._reads.get_view(self._owner, self._run_id)
        except (APIError, RunNotFoundError):
            return {"answer": None, "thumb": None}
        thumbs = [reward.value for reward in view.rewards if reward.name == "thumbs"]
        return {
            "answer": view.answer,
            "thumb": thumbs[-1] if thumbs else None,
            "model": view.model,
            "strategy": view.strategy,
        }


async def stream_changes(reads: LiveReads, owner: Owner, shown_run_id: str | None) -> AsyncIterator[dict[str, str]]:
    """Yield changes of a key's reads, and every update of the read that the page shows.

    Events: "reads" has a list of the reads that changed. The read with `shown_run_id` has "snapshot", "update" and
    "state", or "gone" if it does not exist.
    """
    known_states: dict[str, Any] = {}  # by run id: the state and progress that the page shows
    watcher = ReadWatcher(reads, owner, shown_run_id) if shown_run_id else None
    while True:
        running_reads = {read.run_id: read for read in reads.manager.list_running(owner)}
        states = {run_id: (read.state, len(read.updates)) for run_id, read in running_reads.items()}
        changed_ids = [id_ for id_ in {**known_states, **states} if states.get(id_) != known_states.get(id_)]
        answers = await asyncio.to_thread(reads.get_answers, changed_ids) if changed_ids else {}
        changed_reads = []
        for run_id in changed_ids:
            entry = await asyncio.to_thread(reads.ledger.get, owner.name, run_id)
            read = running_reads.get(run_id) or reads.manager.find(owner, run_id)
            changed_reads.append(format_read(entry, read, answers.get(run_id)))
        known_states = states
        if changed_reads:
            yield _make_event("reads", changed_reads)
        if watcher is not None:
            try:
                async for event in watcher.iter_changes():
                    yield event
            except APIError as error:
                yield _make_event("gone", error.message)
                watcher = None
        await asyncio.sleep(_SECONDS_BETWEEN_CHECKS)


def _make_event(name: str, value: Any) -> dict[str, str]:
    return {"event": name, "data": json.dumps(value, ensure_ascii=True)}
