"""Shared passes: reads of one document stay at the same chunk, so that the server's cache serves all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
MAX_SHARED_READS: Final = 128
"""The default maximum number of questions that share a pass over a document."""
Barrier: TypeAlias = Callable[[int], Awaitable[None]]
"""A function that waits until a reader may begin a chunk, given the number of chunks that it has read."""


class SharedPass:
    """Lets a reader begin a chunk only when all other readers have reached it or left. All are on one event loop.

    A server whose prefix cache has room for one section then computes that section only once. Readers also wait for a
    reader that joins late or continues from the middle. From then on, all stay together.
    """

    def __init__(self) -> None:
        self._chunks_read: dict[object, int] = {}
        self._min_chunks_read = -1
        self._has_advanced = asyncio.Event()

    @contextmanager
    def join(self) -> Iterator[Barrier]:
        """Add a reader at the document's beginning. It leaves when the context ends."""
        reader = object()
        self._chunks_read[reader] = -1
        self._wake_readers()

        async def wait(chunks_read: int) -> None:
            self._chunks_read[reader] = max(chunks_read, self._chunks_read[reader])
            self._wake_readers()
            while chunks_read > self._min_chunks_read:
                await self._has_advanced.wait()

        try:
            yield wait
        finally:
            del self._chunks_read[reader]
            self._wake_readers()

    def _wake_readers(self) -> None:
        """Wake the waiting readers if the slowest reader has advanced."""
        min_chunks_read = min(self._chunks_read.values(), default=self._min_chunks_read)
        if min_chunks_read != self._min_chunks_read:
            self._min_chunks_read = min_chunks_read
            self._has_advanced.set()
            self._has_advanced = asyncio.Event()


async def read_in_passes(reads: Sequence[Callable[[Barrier], Awaitable[T]]], max_shared: int) -> list[T | Exception]:
    """Run reads of one document in parallel, with all reads of a pass at the same chunk.

    Args:
        reads: functions that read. Each is called with the barrier that it has to await before it begins a chunk.
        max_shared: the maximum number of reads that share a pass. Other reads follow in later passes.

    Returns:
        The outcomes in order: a result, or the error of a read that failed. An error does not stop the other reads.
    """

    async def run_read(read: Callable[[Barrier], Awaitable[T]], shared_pass: SharedPass) -> T | Exception:
        with shared_pass.join() as barrier:
            try:
                await asyncio.sleep(0)  # until all reads have joined
                return await read(barrier)
            except Exception as error:  # noqa: BLE001  after any error, the other reads continue
                return error

    outcomes: list[T | Exception] = []
    for start in range(0, len(reads), max_shared):
        shared_pass = SharedPass()
        outcomes += await asyncio.gather(*(run_read(read, shared_pass) for read in reads[start : start + max_shared]))
    return outcomes
