"""Keeps reads of one document at the same chunk, so that the server's cache for one serves the others."""

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
"""How many questions share a pass by default."""
Reach: TypeAlias = Callable[[int], Awaitable[None]]
"""Waits until a reader may begin a chunk; the argument is how many chunks it has read."""


class Pace:
    """A reader may begin a chunk only when all others have begun as many, or have left.

    Its readers may be in several threads and event loops. A server whose prefix cache holds one section then needs to
    compute that section only once. The others also wait for one that joins late or continues from the middle: after
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
        """Add a reader at the document's beginning; it leaves when the context ends."""
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
        """Note where a reader is (None if it has left), and wake those that waited for it."""
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
        """Return what to wait for before this many chunks; None if no reader is behind."""
        with self._lock:
            if self._stopped or chunks <= self._lowest:
                return None
            waiter: Future[None] = Future()
            self._waiting.append(waiter)
            return waiter


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
    for pace, together in _passes(reads, at_once):
        outcomes += await asyncio.gather(*(one(read, pace) for read in together))
    return outcomes


def in_passes_of_threads(reads: Sequence[Callable[[Reach], T]], at_once: int) -> list[T | Exception]:
    """`in_passes` for synchronous reads, which run in threads; an interrupt (Ctrl-C) ends them at their next chunk."""

    def one(context: Context, read: Callable[[Reach], T], pace: Pace, joined: threading.Barrier) -> T | Exception:
        with pace.reader() as reach:
            joined.wait()  # otherwise the first thread would be ahead before the last one starts
            try:
                return context.run(read, reach)
            except Exception as error:  # noqa: BLE001  whatever it is, the other reads continue
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
