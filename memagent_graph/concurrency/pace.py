"""Keeps reads of one document at the same chunk, so that the server's cache for one serves the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
AT_ONCE: Final = 128
"""How many questions share a pass by default."""
Reach: TypeAlias = Callable[[int], Awaitable[None]]
"""Waits until a reader may begin a chunk; the argument is how many chunks it has read."""


class Pace:
    """A reader may begin a chunk only when all others have begun as many, or have left.

    Its readers are in one event loop. A server whose prefix cache holds one section then needs to compute that section
    only once. The others also wait for one that joins late or continues from the middle: after they meet, all stay
    together.
    """

    def __init__(self) -> None:
        self._places: dict[object, int] = {}
        self._lowest = -1
        self._moved = asyncio.Event()

    @contextmanager
    def reader(self) -> Iterator[Reach]:
        """Add a reader at the document's beginning; it leaves when the context ends."""
        name = object()
        self._places[name] = self._lowest = -1

        async def reach(chunks: int) -> None:
            self._places[name] = max(chunks, self._places[name])
            self._wake()
            while chunks > self._lowest:
                await self._moved.wait()

        try:
            yield reach
        finally:
            del self._places[name]
            self._wake()

    def _wake(self) -> None:
        """Let those that wait look again, if the reader that was behind has moved."""
        lowest = min(self._places.values(), default=-1)
        if lowest != self._lowest:
            self._lowest = lowest
            self._moved.set()
            self._moved = asyncio.Event()


async def in_passes(reads: Sequence[Callable[[Reach], Awaitable[T]]], at_once: int) -> list[T | Exception]:
    """Run reads of one document in parallel, all at the same chunk at the same time.

    Args:
        reads: each is called with the function that it has to await before it begins a chunk.
        at_once: how many share a pass; the others follow in later passes.

    Returns:
        The outcome of each, in order: a result, or the error if it failed. The others are read to their end.
    """

    async def one(read: Callable[[Reach], Awaitable[T]], pace: Pace) -> T | Exception:
        with pace.reader() as reach:
            try:
                return await read(reach)
            except Exception as error:  # noqa: BLE001  whatever it is, the other reads continue
                return error

    outcomes: list[T | Exception] = []
    for start in range(0, len(reads), at_once):
        pace = Pace()
        outcomes += await asyncio.gather(*(one(read, pace) for read in reads[start : start + at_once]))
    return outcomes
