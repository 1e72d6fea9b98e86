"""Event loops: one in a thread for synchronous callers, and values that belong to a loop; and forked processes.

Everything in the reader is asynchronous. A synchronous call runs its coroutine here, so that connection pools outlive
the call, and so that it works inside a running loop as well, for example in a notebook.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, nullcontext, suppress
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar
from weakref import WeakSet

from memagent_graph.errors import PermanentError

_forkable: WeakSet[Any] = WeakSet()


def renew_in_children(forkable: Any) -> None:
    """Call an object's `after_fork` in every process that is forked from this one, while the object exists.

    A lock that another thread held at that moment would stay locked for ever, and a queue that another thread served
    would never be served. So `after_fork` creates both again, as if no thread had been started.
    """
    _forkable.add(forkable)


def _renew() -> None:
    for forkable in list(_forkable):
        forkable.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")

_CLEANUP_SECONDS = 10.0
"""The maximum number of seconds that a cancelled call waits for the end of its coroutine."""


class _Background:
    """The loop of this process, started at first use. Its thread is a daemon and ends with the process."""

    def __init__(self) -> None:
        self.after_fork()
        renew_in_children(self)

    def after_fork(self) -> None:
        """Forget the parent's loop, which runs in a thread that a child does not have."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop."""
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="memagent-loop", daemon=True).start()
            return self._loop


background_loop = _Background().loop
"""The loop on which synchronous calls run; started at first use, again in a forked process."""


class Cancellation:
    """Ends the calls or the conversion of one read, which wait in threads that nothing else interrupts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: list[Callable[[], object]] = []
        self.is_cancelled = False

    def cancel(self) -> None:
        """End everything that waits, and everything that follows."""
        with self._lock:
            self.is_cancelled, ends = True, list(self._ends)
        for end in ends:
            end()

    @contextmanager
    def watch(self, end: Callable[[], object]) -> Iterator[None]:
        """Call `end` if `cancel` is called during the block, or was called before."""
        with self._lock:
            self._ends.append(end)
        if self.is_cancelled:
            end()
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)


def run_sync(coroutine: Coroutine[Any, Any, T], cancellation: Cancellation | None = None) -> T:
    """Run a coroutine to its end and return its result; an interrupt (Ctrl-C) cancels it first.

    Raises:
        RuntimeError: it was called on the background loop itself, where it would wait for itself.
        PermanentError: `cancellation` ended it; a caller that retries other errors does not retry this one.
    """
    loop = background_loop()
    if _is_running(loop):
        coroutine.close()
        raise RuntimeError("a synchronous call was made on the background loop; await the asynchronous one instead")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        with cancellation.watch(future.cancel) if cancellation else nullcontext():
            return future.result()
    except BaseException as error:
        _cancel(future, coroutine, loop)
        if isinstance(error, CancelledError) and cancellation and cancellation.is_cancelled:
            raise PermanentError(
                "the read was broken off by its caller", hint="Start it again, or resume it."
            ) from error
        raise


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether this is called on the loop, where nothing may wait for it."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _cancel(future: Future[Any], coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
    """Cancel a coroutine unless it has ended, and wait for its end: until then it holds its run."""
    future.cancel()
    if future.cancelled() and not _is_running(loop):  # at once
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_await_end(coroutine), loop).result(_CLEANUP_SECONDS)


async def _await_end(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Wait for the task of a coroutine, whose error or cancellation its caller has."""
    for task in asyncio.all_tasks():
        if task.get_coro() is coroutine:
            await asyncio.wait({task})


def synchronous(method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[S, P], T]:
    """Return the synchronous version of a method: the same arguments, result and errors."""

    def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_sync(method(self, *args, **kwargs))

    _name_twin(twin, method)
    return twin


def synchronous_stream(
    method: Callable[Concatenate[S, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[S, P], Iterator[T]]:
    """Return the synchronous version of an asynchronous generator method, which runs on the background loop."""

    def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        end = object()
        parts: queue.SimpleQueue[Any] = queue.SimpleQueue()

        async def drain() -> None:
            try:
                async for part in method(self, *args, **kwargs):
                    parts.put(part)
                parts.put(end)
            except BaseException as error:
                parts.put(error)
                raise

        draining, loop = drain(), background_loop()
        future = asyncio.run_coroutine_threadsafe(draining, loop)
        try:
            while (part := parts.get()) is not end:
                if isinstance(part, BaseException):
                    raise part
                yield part
        finally:
            _cancel(future, draining, loop)

    _name_twin(twin, method)
    return twin


def _name_twin(twin: Callable[..., Any], method: Callable[..., Any]) -> None:
    update_wrapper(twin, method)
    twin.__name__ = method.__name__.removeprefix("a")
    twin.__qualname__ = method.__qualname__.replace(method.__name__, twin.__name__)
    twin.__doc__ = f"`{method.__name__}` for synchronous code."


class PerLoop(Generic[T]):
    """One value per event loop: connections, semaphores and savers must not be shared between loops.

    A value ends with its loop: `asyncio.run` closes it at its end, and values of closed loops are not kept.

    Args:
        make: makes a loop's value.
        close: closes one, on its loop.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None) -> None:
        self._make = make
        self._close = close
        self._values: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None, None]]] = {}

    def get(self) -> T:
        """Return the running loop's value, made at first use."""
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            for other in list(self._values):
                if other.is_closed():
                    self._values.pop(other, None)
            value = self._make()
            end = self._closed_at_end(value)
            with suppress(StopIteration):
                end.__anext__().send(None)  # the loop now knows the generator, and closes it with its others
            self._values[loop] = value, end
        return self._values[loop][0]

    async def aclose(self) -> None:
        """Close the running loop's value, if there is one. The next use creates another."""
        if (entry := self._values.pop(asyncio.get_running_loop(), None)) is not None:
            await entry[1].aclose()

    async def _closed_at_end(self, value: T) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._values.pop(asyncio.get_running_loop(), None)
            if self._close is not None:
                await self._close(value)
