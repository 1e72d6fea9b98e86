"""Reads of one document that stay together, so that what one of them had computed serves the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Reach: TypeAlias = Callable[[int], Awaitable[None]]
"""Waits until a reader may begin a chunk, given by how many it has read."""


class Pace:
    """Lets no reader begin a chunk before all others have begun as many, or have left.

    For one event loop. A server whose prefix cache holds one section then needs to compute that section once.
    """

    def __init__(self) -> None:
        self._places: dict[object, int] = {}
        self._lowest = -1
        self._waiting: list[asyncio.Future[None]] = []

    @contextmanager
    def reader(self) -> Iterator[Reach]:
        """One reader, at the document's beginning; it leaves with the context."""
        name = object()
        self._places[name] = -1
        self._move()

        async def reach(chunks: int) -> None:
            self._places[name] = max(chunks, self._places[name])
            self._move()
            while chunks > self._lowest:
                waiter = asyncio.get_running_loop().create_future()
                self._waiting.append(waiter)
                await waiter

        try:
            yield reach
        finally:
            del self._places[name]
            self._move()

    def _move(self) -> None:
        lowest = min(self._places.values(), default=self._lowest)
        if lowest == self._lowest:
            return
        self._lowest, waiting = lowest, self._waiting
        self._waiting = []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
