"""The running reads of this server. A read continues after the request that started it has ended.

Clients time out after some time, often a minute, but a read may take hours. So a request can start a read without
waiting for it, and later requests can wait for it or cancel it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from memagent_graph.errors import MemAgentError, RunError
from memagent_graph.results import ReadResult
from memagent_graph.trace import MemoryUpdate

DEFAULT_WAIT_SECONDS: Final = 45.0
"""The default time that a tool call waits, in seconds. Many clients time out after 60 seconds."""
_MAX_READS: Final = 256
"""The maximum number of reads that are kept with their results.

Of the reads that have ended, the one that was registered first is removed first.
"""

ReadStream = AsyncGenerator[MemoryUpdate | ReadResult, None]


@dataclass(eq=False)
class ActiveRead:
    """A running read, or one that has ended."""

    run_id: str
    question: str
    document: str
    """The document's name."""
    update: MemoryUpdate | None = None
    """The newest update; None before the first one."""
    is_cancel_requested: bool = False
    """Whether `cancel` was called for the read."""
    task: asyncio.Task[ReadResult] | None = None
    change_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next update or at the end, and then replaced by a new event."""

    def publish(self, update: MemoryUpdate | None) -> None:
        """Record an update or, with None, the end; wake all waiting calls."""
        self.update = update or self.update
        change_event, self.change_event = self.change_event, asyncio.Event()
        change_event.set()

    @property
    def is_running(self) -> bool:
        """Whether the read has not ended; it may not have begun yet."""
        return self.task is None or not self.task.done()

    @property
    def outcome(self) -> ReadResult | BaseException | None:
        """The result, or why there is none; None while the read is running."""
        if self.task is not None and self.task.done() and not self.task.cancelled():
            return self.task.exception() or self.task.result()
        if self.is_cancel_requested or (self.task is not None and self.task.cancelled()):
            return RunError("the read was cancelled", hint="Call resume_read to continue it.", run_id=self.run_id)
        return None


class ActiveReads:
    """Runs reads, finds them by run id, and cancels them."""

    def __init__(self) -> None:
        self._reads: OrderedDict[str, ActiveRead] = OrderedDict()
        self._background_tasks: set[asyncio.Task[Any]] = set()

    def find(self, run_id: str) -> ActiveRead | None:
        """Return a read that is running or has recently ended in this process; None for an unknown id."""
        return self._reads.get(run_id)

    def register(self, read: ActiveRead) -> None:
        """Register a read, before or after it begins."""
        self._reads[read.run_id] = read
        ended_ids = [run_id for run_id, other_read in self._reads.items() if not other_read.is_running]
        for run_id in ended_ids[: max(0, len(self._reads) - _MAX_READS)]:
            del self._reads[run_id]

    async def run(
        self, read: ActiveRead, stream: ReadStream, report: Callable[[MemoryUpdate], Awaitable[None]] | None
    ) -> ReadResult:
        """Run a read to its end, or until this call or the read is cancelled.

        Args:
            read: the read.
            stream: the updates and the result of the read, from the reader.
            report: called with each update; None reports nothing.

        Raises:
            MemAgentError: the read failed, or `cancel` cancelled it.
        """
        read.task = asyncio.create_task(_consume_stream(read, stream, report))
        if read.is_cancel_requested:  # `cancel` was called before the read began
            read.task.cancel()
        try:
            return await read.task
        except asyncio.CancelledError:
            if read.is_cancel_requested and isinstance(read.outcome, MemAgentError):
                raise read.outcome from None
            raise
        finally:
            read.publish(None)

    def start_in_background(self, work: Awaitable[Any]) -> None:
        """Run work in the background. Its errors are not raised here: the reads keep them."""
        task = asyncio.ensure_future(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
        task.add_done_callback(lambda ended_task: None if ended_task.cancelled() else ended_task.exception())

    async def cancel(self, read: ActiveRead) -> None:
        """Cancel a read and wait until it has ended; its progress is kept."""
        read.is_cancel_requested = True
        if read.task is not None and not read.task.done():
            read.task.cancel()
            await asyncio.wait([read.task])

    async def aclose(self) -> None:
        """Cancel all reads."""
        for task in list(self._background_tasks):
            task.cancel()
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        for read in list(self._reads.values()):
            await self.cancel(read)


async def _consume_stream(
    read: ActiveRead, stream: ReadStream, report: Callable[[MemoryUpdate], Awaitable[None]] | None
) -> ReadResult:
    try:
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, ReadResult):
                    return item
                read.publish(item)
                if report is not None:
                    await report(item)
    except (sqlite3.Error, OSError) as error:
        raise RunError(
            f"the read failed with {type(error).__name__}: {error}",
            hint="Check the server's free disk space, its checkpoints and its documents; then ask again.",
        ) from error
    raise AssertionError("the last item of a read's stream is its result")
