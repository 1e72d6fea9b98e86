"""The stream of events for the live page: the states of a key's reads, and every update of the read that is shown.

The stream checks for changes a few times per second, so neither a fast policy nor many reads can flood a page. A
browser needs only one connection for all reads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from memagent_graph.trace import MemoryUpdate
from memagent_serve.api_errors import ApiError
from memagent_serve.keys import Owner
from memagent_serve.ledger import Ledger
from memagent_serve.live.live_reads import LiveReads
from memagent_serve.live.page_values import format_read, format_update
from memagent_serve.reads import ReadManager, ServedRead

_SECONDS_BETWEEN_CHECKS: Final = 0.2
_NEWEST_UPDATES: Final = 40
"""The number of newest updates that are sent when the page opens a read. The read's run page has all updates."""


class ReadWatcher:
    """Sends a page the changes of the read that it shows."""

    def __init__(self, reads: LiveReads, manager: ReadManager, owner: Owner, run_id: str) -> None:
        self._reads, self._manager, self._owner, self._run_id = reads, manager, owner, run_id
        self._edits: int | None = None
        self._read: ServedRead | None = None
        self._sent = 0
        self._memories: dict[str, str] = {}
        self._by_step: dict[str, str] = {}
        self._state = ""

    async def iter_changes(self) -> AsyncIterator[dict[str, str]]:
        """Yield the changes since the last call.

        Raises:
            ApiError: 404; there is no such read.
        """
        entry = await self._reads.get_entry(self._owner, self._run_id)
        read = self._manager.find(self._owner, self._run_id)
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
                if update.step not in self._by_step:
                    yield _make_event("update", self._format(update))
        state = json.dumps([entry.edited, format_read(entry, read)["state"]])
        if state != self._state:
            self._state = state
            value = {**format_read(entry, read), **await self._get_outcome()}
            yield _make_event("state", value)

    async def _make_snapshot(self) -> dict[str, Any]:
        self._memories, self._by_step = {}, {}
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
        sources = dict.fromkeys(self._by_step.get(step, "") for step in update.sources or ())
        before = self._memories.get(update.branch)
        value = format_update(update, "\n".join(filter(None, sources)) if before is None else before)
        self._record(update)
        return value

    def _record(self, update: MemoryUpdate) -> None:
        self._memories[update.branch] = self._by_step[update.step] = update.memory

    async def _get_outcome(self) -> dict[str, Any]:
        try:
            view = await self._reads.get_view(self._owner, self._run_id)
        except ApiError:
            return {"answer": None, "stop_reason": None, "thumb": None}
        thumbs = [reward.value for reward in view.rewards if reward.name == "thumbs"]
        return {
            "answer": view.answer,
            "stop_reason": view.stop_reason,
            "thumb": thumbs[-1] if thumbs else None,
            "model": view.model,
            "strategy": view.strategy,
        }


async def stream_changes(
    reads: LiveReads, manager: ReadManager, ledger: Ledger, owner: Owner, run_id: str | None
) -> AsyncIterator[dict[str, str]]:
    """Yield changes of a key's reads, and every update of the read that the page shows.

    Events: "reads" has a list of the reads that changed. The read with `run_id` has "snapshot", "update" and "state",
    or "gone" if it does not exist.
    """
    known: dict[str, Any] = {}  # by run id: the state and progress that the page has
    watch = ReadWatcher(reads, manager, owner, run_id) if run_id else None
    while True:
        running = {read.run_id: read for read in manager.list_running(owner)}
        changed_reads = []
        for run in {**dict.fromkeys(known), **running}:
            read = running.get(run)
            state = (read.state, read.chunks) if read else None
            if run in known and known[run] == state:
                continue
            entry = await asyncio.to_thread(ledger.get, owner.name, run)
            if entry is not None:
                changed_reads.append(format_read(entry, read or manager.find(owner, run)))
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
