"""The reads that are running in this server, which outlive the requests that started them.

A client gives up a request after some time, often a minute, but a read may take hours. So a later request can follow a
read or end it, and a request can start one without waiting for it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from memagent_graph.errors import RunError
from memagent_graph.results import ReadResult
from memagent_graph.trace import MemoryUpdate
from memagent_mcp.tool_results import Answer

PATIENCE: Final = 45.0
"""Seconds that one call of a tool waits by default; clients often give up after 60."""
_REMEMBERED: Final = 256
"""How many ended reads are remembered with their outcome; the oldest is dropped first."""

Parts = AsyncGenerator[MemoryUpdate | ReadResult, None]


@dataclass(eq=False)
class ActiveRead:
    """A read that is running, or has ended."""

    run_id: str
    question: str
    document: str
    """Its name."""
    update: MemoryUpdate | None = None
    """The newest."""
    is_cancelled: bool = False
    task: asyncio.Task[Answer] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def advance(self, update: MemoryUpdate | None) -> None:
        """Record an update or the end, and wake everyone who waits."""
        self.update = update or self.update
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def is_at_work(self) -> bool:
        """Whether it has not ended."""
        return self.task is None or not self.task.done()

    async def next_change(self) -> None:
        """Wait for the next update, or the end."""
        await self._changed.wait()

    def answer(self) -> Answer:
        """The result, or the progress so far.

        Raises:
            MemAgentError: it failed, or was cancelled.
        """
        if self.task is None or not self.task.done():
            return Answer.pending(self.run_id, self.question, self.update)
        if self.task.cancelled():
            raise RunError("the read was cancelled", hint="resume_read continues it where it was.", run_id=self.run_id)
        return self.task.result()


class ActiveReads:
    """Begins reads, finds them by run id, and ends them."""

    def __init__(self) -> None:
        self._reads: OrderedDict[str, ActiveRead] = OrderedDict()
        self._unawaited: set[asyncio.Task[Any]] = set()

    def find(self, run_id: str) -> ActiveRead | None:
        """A read of this process, running or recently ended; None if there is none."""
        return self._reads.get(run_id)

    def announce(self, read: ActiveRead) -> None:
        """Register a read, which may not have begun."""
        self._reads[read.run_id] = read
        ended = [run_id for run_id, each in self._reads.items() if not each.is_at_work]
        for run_id in ended[: max(0, len(self._reads) - _REMEMBERED)]:
            del self._reads[run_id]

    async def drive(
        self, read: ActiveRead, parts: Parts, report: Callable[[MemoryUpdate], Awaitable[None]] | None
    ) -> Answer:
        """Read to the end, unless this is cancelled, or the read is.

        Raises:
            MemAgentError: it failed, or was cancelled by `cancel`.
        """
        read.task = asyncio.create_task(_driven(read, parts, report))
        if read.is_cancelled:  # before its turn
            read.task.cancel()
        try:
            return await read.task
        except asyncio.CancelledError:
            if read.is_cancelled:
                return read.answer()
            raise
        finally:
            read.advance(None)

    def begin(self, work: Awaitable[Any]) -> None:
        """Do the work in the background; errors belong to the reads."""
        task = asyncio.ensure_future(work)
        self._unawaited.add(task)
        task.add_done_callback(self._unawaited.discard)
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    async def cancel(self, read: ActiveRead) -> None:
        """End a read; what it has read is kept."""
        read.is_cancelled = True
        if read.task is not None and not read.task.done():
            read.task.cancel()
            await asyncio.wait([read.task])

    async def aclose(self) -> None:
        """End all of them."""
        for task in list(self._unawaited):
            task.cancel()
        await asyncio.gather(*self._unawaited, return_exceptions=True)
        for read in list(self._reads.values()):
            await self.cancel(read)


async def _driven(read: ActiveRead, parts: Parts, report: Callable[[MemoryUpdate], Awaitable[None]] | None) -> Answer:
    try:
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, ReadResult):
                    return await asyncio.to_thread(Answer.of, part)
                read.advance(part)
                if report is not None:
                    await report(part)
    except (sqlite3.Error, OSError) as error:
        raise RunError(
            f"the read ended with {type(error).__name__}: {error}",
            hint="Check the free disk space, the checkpoints and the documents of the server; then ask again.",
        ) from error
    raise AssertionError("a stream ends with its result")
