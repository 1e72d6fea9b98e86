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
"""Waits until a reader may begin a chunk. The argument is the number of chunks that the reader has read."""


class SharedPass:
    """Lets a reader begin a chunk only when all others have begun as many, or have left. All are on one event loop.

    A server whose prefix cache has room for one section then computes that section only once. Readers also wait for a
    reader that joins late or continues from the middle. After they meet, all of them stay together.
    """

    def __init__(self) -> None:
        self._chunks_read: dict[object, int] = {}
        self._lowest = -1
        self._advance = asyncio.Event()

    @contextmanager
    def join(self) -> Iterator[Barrier]:
        """Add a reader at the document's beginning. The reader leaves when the context ends."""
        reader = object()
        self._chunks_read[reader] = -1
        self._update()

        async def wait(chunks: int) -> None:
            self._chunks_read[reader] = max(chunks, self._chunks_read[reader])
            self._update()
            while chunks > self._lowest:
                await self._advance.wait()

        try:
            yield wait
        finally:
            del self._chunks_read[reader]
            self._update()

    def _update(self) -> None:
        """Wake the readers that wait, if the last reader has moved."""
        lowest = min(self._chunks_read.values(), default=self._lowest)
        if lowest != self._lowest:
            self._lowest = lowest
            self._advance.set()
            self._advance = asyncio.Event()


async def read_in_passes(reads: Sequence[Callable[[Barrier], Awaitable[T]]], max_shared: int) -> list[T | Exception]:
    """Run reads of one document in parallel, all at the same chunk at the same time.

    Args:
        reads: each is called with the function that it has to await before it begins a chunk.
        max_shared: the maximum number of reads that share a pass. Other reads follow in later passes.

    Returns:
        The outcomes in order: a result, or the error of a read that failed. The other reads run to their end.
    """

    async def run_read(read: Callable[[Barrier], Awaitable[T]], shared_pass: SharedPass) -> T | Exception:
        with shared_pass.join() as barrier:
            try:
                await asyncio.sleep(0)  # until all have joined
                return await read(barrier)
            except Exception as error:  # noqa: BLE001  whatever it is, the other reads continue
                return error

    outcomes: list[T | Exception] = []
    for start in range(0, len(reads), max_shared):
        shared_pass = SharedPass()
        outcomes += await asyncio.gather(*(run_read(read, shared_pass) for read in reads[start : start + max_shared]))
    return outcomes
