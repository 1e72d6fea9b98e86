"""The running reads of this server. A read continues after the request that started it has ended.

Clients time out after some time, often a minute, but a read may take hours. So a request can start a read without
waiting for it, and later requests can wait for it or cancel it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from memagent_graph.errors import RunError
from memagent_graph.reading.run_history import await_result
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
    outcome: ReadResult | Exception | None = None
    """The result, or why there is none; None while the read is running, and before it begins."""
    task: asyncio.Task[Any] | None = None
    """The task that runs the read, and nothing else."""
    change_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next update or at the end, and then replaced by a new event."""

    def wake_waiting_calls(self) -> None:
        """Wake all calls that wait for a change."""
        self.change_event.set()
        self.change_event = asyncio.Event()


class ActiveReads:
    """Runs reads, finds them by run id, and cancels them."""

    def __init__(self) -> None:
        self._reads: dict[str, ActiveRead] = {}
        self._background_tasks: set[asyncio.Task[Any]] = set()

    def find(self, run_id: str) -> ActiveRead | None:
        """Return a read that is running or has recently ended in this process; None for an unknown id."""
        return self._reads.get(run_id)

    def register(self, read: ActiveRead) -> None:
        """Register a read, before or after it begins."""
        self._reads[read.run_id] = read
        ended_ids = [run_id for run_id, other_read in self._reads.items() if other_read.outcome]
        for run_id in ended_ids[: max(0, len(self._reads) - _MAX_READS)]:
            del self._reads[run_id]

    async def run(
        self, read: ActiveRead, stream: ReadStream, report: Callable[[MemoryUpdate], Awaitable[None]] | None
    ) -> ReadResult:
        """Run a read to its end, in a task of its own, or until this task or the read is cancelled.

        Args:
            read: the read.
            stream: the updates and the result of the read, from the reader.
            report: called with each update; None reports nothing.

        Raises:
            MemAgentError: the read failed, or `cancel` cancelled it.
        """

        def add_update(update: MemoryUpdate) -> Awaitable[None] | None:
            read.update = update
            read.wake_waiting_calls()
            return None if report is None else report(update)

        if isinstance(read.outcome, RunError):  # `cancel` was called before the read began
            raise read.outcome
        read.task = asyncio.current_task()
        try:
            read.outcome = result = await await_result(stream, add_update)
            return result
        except asyncio.CancelledError:
            read.outcome = _make_cancelled_error(read)
            if not read.is_cancel_requested:
                raise
            raise read.outcome from None
        except (sqlite3.Error, OSError) as error:
            read.outcome = RunError(
                f"the read failed with {type(error).__name__}: {error}",
                hint="Check the server's free disk space, its checkpoints and its documents; then ask again.",
            )
            raise read.outcome from error
        except Exception as error:
            read.outcome = error
            raise
        finally:
            read.wake_waiting_calls()

    def start_in_background(self, work: Awaitable[Any]) -> None:
        """Run work in the background. Its errors are not raised here: the reads keep them."""
        task = asyncio.ensure_future(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)
        task.add_done_callback(lambda ended_task: None if ended_task.cancelled() else ended_task.exception())

    async def cancel(self, read: ActiveRead) -> None:
        """Cancel a read and wait until it has ended; its progress is kept."""
        read.is_cancel_requested = True
        if read.task is None:
            read.outcome = _make_cancelled_error(read)
            read.wake_waiting_calls()
        elif not read.task.done():
            read.task.cancel()
            await asyncio.wait([read.task])

    async def aclose(self) -> None:
        """Cancel all reads."""
        for task in list(self._background_tasks):
            task.cancel()
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        for read in list(self._reads.values()):
            await self.cancel(read)


def _make_cancelled_error(read: ActiveRead) -> RunError:
    return RunError("the read was cancelled", hint="Call resume_read to continue it.", run_id=read.run_id)
