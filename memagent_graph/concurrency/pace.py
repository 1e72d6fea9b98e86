"""Keeps reads of one document at the same chunk, so that the server's cache for one serves the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
MAX_SHARED_READS: Final = 128
"""The default maximum number of questions that share a pass over a document."""
Reach: TypeAlias = Callable[[int], Awaitable[None]]
"""Waits until a reader may begin a chunk. The argument is the number of chunks that the reader has read."""


class Pace:
    """Lets a reader begin a chunk only when all others have begun as many, or have left. All are on one event loop.

    A server whose prefix cache has room for one section then computes that section only once. Readers also wait for a
    reader that joins late or continues from the middle. After they meet, all of them stay together.
    """

    def __init__(self) -> None:
        self._chunks_read: dict[object, int] = {}
        self._lowest = -1
        self._waiting: list[asyncio.Future[None]] = []

    @contextmanager
    def reader(self) -> Iterator[Reach]:
        """Add a reader at the document's beginning. The reader leaves when the context ends."""
        key = object()
        self._move(key, -1)

        async def reach(chunks: int) -> None:
            self._move(key, chunks)
            while chunks > self._lowest:
                waiter = asyncio.get_running_loop().create_future()
                self._waiting.append(waiter)
                await waiter

        try:
            yield reach
        finally:
            self._move(key, None)

    def _move(self, reader: object, chunks: int | None) -> None:
        """Record the chunks that a reader has read (None if it has left), and wake the readers that waited for it."""
        if chunks is None:
            del self._chunks_read[reader]
        else:
            self._chunks_read[reader] = max(chunks, self._chunks_read.get(reader, chunks))
        lowest = min(self._chunks_read.values(), default=self._lowest)
        if lowest != self._lowest:
            self._lowest, waiting = lowest, self._waiting
            self._waiting = []
            for waiter in waiting:
                if not waiter.done():  # as if its reader was cancelled
                    waiter.set_result(None)


async def read_in_passes(reads: Sequence[Callable[[Reach], Awaitable[T]]], per_pass: int) -> list[T | Exception]:
    """Run reads of one document in parallel, all at the same chunk at the same time.

    Args:
        reads: each is called with the function that it has to await before it begins a chunk.
        per_pass: the maximum number of reads that share a pass. Other reads follow in later passes.

    Returns:
        The outcomes in order: a result, or the error of a read that failed. The other reads run to their end.
    """

    async def one(read: Callable[[Reach], Awaitable[T]], pace: Pace) -> T | Exception:
        with pace.reader() as reach:
            try:
                await asyncio.sleep(0)  # until all have joined
                return await read(reach)
            except Exception as error:  # noqa: BLE001  whatever it is, the other reads continue
                return error

    outcomes: list[T | Exception] = []
    for start in range(0, len(reads), per_pass):
        pace = Pace()
        outcomes += await asyncio.gather(*(one(read, pace) for read in reads[start : start + per_pass]))
    return outcomes
