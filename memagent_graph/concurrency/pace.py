"""Reads of one document that stay together, so that what one of them had computed serves the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")
AT_ONCE: Final = 128
"""How many questions share a pass where nobody says another number."""
Reach: TypeAlias = Callable[[int], Awaitable[None]]
"""Waits until a reader may begin a chunk, given by how many it has read."""


class Pace:
    """Lets no reader begin a chunk before all others have begun as many, or have left.

    Its readers may be in several threads and event loops. A server whose prefix cache holds one section then needs to
    compute that section once. One that joins late, or continues from the middle, is waited for likewise: from where
    they meet, all stay together.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[object, int] = {}
        self._lowest = -1
        self._waiting: list[Future[None]] = []
        self._stopped = False

    @contextmanager
    def reader(self) -> Iterator[Reach]:
        """One reader, at the document's beginning; it leaves with the context."""
        name = object()
        self._put(name, -1)

        async def reach(chunks: int) -> None:
            self._put(name, chunks)
            while (waiter := self._waiter(chunks)) is not None:
                await asyncio.wrap_future(waiter)
            if self._stopped:
                raise asyncio.CancelledError

        try:
            yield reach
        finally:
            self._put(name, None)

    def stop(self) -> None:
        """Cancel every read at its next chunk."""
        with self._lock:
            self._stopped, waiting = True, self._waiting
            self._waiting = []
        _wake(waiting)

    def _put(self, name: object, chunks: int | None) -> None:
        """Note where a reader is, None where it has left, and let those begin who waited for it."""
        with self._lock:
            if chunks is None:
                del self._places[name]
            else:
                self._places[name] = max(chunks, self._places.get(name, chunks))
            lowest = min(self._places.values(), default=self._lowest)
            if lowest == self._lowest:
                return
            self._lowest, waiting = lowest, self._waiting
            self._waiting = []
        _wake(waiting)

    def _waiter(self, chunks: int) -> Future[None] | None:
        """What to wait for before so many chunks; None where nobody is behind."""
        with self._lock:
            if self._stopped or chunks <= self._lowest:
                return None
            waiter: Future[None] = Future()
            self._waiting.append(waiter)
            return waiter


async def in_passes(reads: Sequence[Callable[[Reach], Awaitable[T]]], at_once: int) -> list[T | Exception]:
    """Do reads of one document side by side, all at the same chunk at the same time.

    Args:
        reads: each is called with what it has to await before it begins a chunk.
        at_once: how many share a pass; further ones follow in further passes.

    Returns:
        what came of each, in order. Failures stand in the places of those that failed; the others read to their end.
    """

    async def one(read: Callable[[Reach], Awaitable[T]], pace: Pace) -> T | Exception:
        with pace.reader() as reach:
            try:
                return await read(reach)
            except Exception as error:  # noqa: BLE001  whatever it is, the other reads go on
                return error

    outcomes: list[T | Exception] = []
    for pace, together in _passes(reads, at_once):
        outcomes += await asyncio.gather(*(one(read, pace) for read in together))
    return outcomes


def in_passes_of_threads(reads: Sequence[Callable[[Reach], T]], at_once: int) -> list[T | Exception]:
    """`in_passes` for synchronous reads, which run in threads; an interrupt (Ctrl-C) ends them at their next chunks."""

    def one(context: Context, read: Callable[[Reach], T], pace: Pace, joined: threading.Barrier) -> T | Exception:
        with pace.reader() as reach:
            joined.wait()  # or the first thread would be ahead before the last is there
            try:
                return context.run(read, reach)
            except Exception as error:  # noqa: BLE001  whatever it is, the other reads go on
                return error

    outcomes: list[T | Exception] = []
    for pace, together in _passes(reads, at_once):
        joined = threading.Barrier(len(together))
        with ThreadPoolExecutor(len(together)) as threads:
            try:
                do = partial(one, pace=pace, joined=joined)
                outcomes += [*threads.map(do, (copy_context() for _ in together), together)]
            except BaseException:
                joined.abort()
                pace.stop()
                raise
    return outcomes


def _passes(reads: Sequence[T], at_once: int) -> Iterator[tuple[Pace, Sequence[T]]]:
    for start in range(0, len(reads), at_once):
        yield Pace(), reads[start : start + at_once]


def _wake(waiting: Iterable[Future[None]]) -> None:
    for waiter in waiting:
        if waiter.set_running_or_notify_cancel():  # not if it was cancelled
            waiter.set_result(None)
