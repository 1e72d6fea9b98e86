"""Event loops: a background loop for synchronous callers, values that belong to a loop, and forked processes.

Everything in the reader is asynchronous. A synchronous call runs its coroutine on the background loop, so connection
pools outlive the call, and it also works inside a running loop, for example in a notebook.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakSet

from memagent_graph.errors import PermanentError

_registered: WeakSet[Any] = WeakSet()


def register_after_fork(instance: Any) -> None:
    """Call an object's `after_fork` in every process that is forked from this one, while the object exists.

    In a forked process, a lock that another thread held stays locked for ever, and a queue that another thread served
    is never served. So `after_fork` creates both again, as if no thread had been started.
    """
    _registered.add(instance)


def _call_after_fork() -> None:
    for instance in list(_registered):
        instance.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_call_after_fork)


T = TypeVar("T")
P = ParamSpec("P")

_CLEANUP_SECONDS = 10.0
"""The maximum time that a cancelled call waits for the end of its coroutine."""


class _BackgroundLoop:
    """The background loop of this process, started at first use. Its thread is a daemon and ends with the process."""

    def __init__(self) -> None:
        self.after_fork()
        register_after_fork(self)

    def after_fork(self) -> None:
        """Forget the parent's loop, which runs in a thread that a child does not have."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the loop, and start it if it does not run."""
        with self._lock:
            if self._loop is None or self._loop.is_closed():
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name="memagent-loop", daemon=True).start()
            return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop for ever, also after a task that raised SystemExit or KeyboardInterrupt, which stops the loop."""
    while True:
        with suppress(SystemExit, KeyboardInterrupt):  # its caller gets it
            loop.run_forever()


_background_loop = _BackgroundLoop()


class Cancellation:
    """Cancels the calls or the conversion of one read, which wait in threads that nothing else can interrupt."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancel everything that is watched now or later."""
        self.is_cancelled = True
        for callback in self._callbacks.copy():
            callback()

    @contextmanager
    def watch(self, callback: Callable[[], object]) -> Iterator[None]:
        """Call `callback` if `cancel` is called during the block, or was called before."""
        self._callbacks.append(callback)  # before the check: a `cancel` in another thread is seen here or sees this
        if self.is_cancelled:
            callback()
        try:
            yield
        finally:
            self._callbacks.remove(callback)


def run_sync(coroutine: Coroutine[Any, Any, T], cancellation: Cancellation | None = None) -> T:
    """Run a coroutine to its end and return its result; an interrupt (Ctrl-C) cancels it first.

    Raises:
        RuntimeError: it was called on the background loop, where it would wait for itself.
        PermanentError: `cancellation` cancelled it. A caller that retries other errors does not retry this one.
    """
    cancellation = cancellation or Cancellation()
    try:
        with _run_on_background_loop(coroutine) as future, cancellation.watch(future.cancel):
            return future.result()
    except CancelledError as error:
        if cancellation.is_cancelled:
            raise PermanentError(
                "the read was cancelled by its caller", hint="Start it again, or resume it."
            ) from error
        raise


@contextmanager
def _run_on_background_loop(coroutine: Coroutine[Any, Any, T]) -> Iterator[Future[T]]:
    """Run a coroutine on the background loop, and cancel it at the end of the block unless it has ended.

    Its end is awaited, because until then it holds the lease of its run.
    """
    loop = _background_loop.get()
    if asyncio._get_running_loop() is loop:
        coroutine.close()
        raise RuntimeError("a synchronous call was made on the background loop; await the asynchronous one instead")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        yield future
    finally:
        future.cancel()  # the future is cancelled at once, the coroutine later
        if future.cancelled() and asyncio._get_running_loop() is not loop:
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_await_end(coroutine), loop).result(_CLEANUP_SECONDS)


async def _await_end(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Wait for the task of a coroutine. Its error or cancellation is already known to the caller."""
    for task in asyncio.all_tasks():
        if task.get_coro() is coroutine:
            await asyncio.wait({task})


def make_synchronous(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return the synchronous version of a method: the same arguments, result and errors."""

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_sync(method(*args, **kwargs))

    return _name_wrapper(wrapper, method)


def make_synchronous_stream(method: Callable[P, AsyncGenerator[T, None]]) -> Callable[P, Iterator[T]]:
    """Return the synchronous version of an asynchronous generator method, which runs on the background loop."""

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        end_marker = object()
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()

        async def produce() -> None:
            try:
                async for item in method(*args, **kwargs):
                    items.put(item)
            finally:
                items.put(end_marker)

        with _run_on_background_loop(produce()) as future:
            while (item := items.get()) is not end_marker:
                yield item
            future.result()  # raises its error

    return _name_wrapper(wrapper, method)


def _name_wrapper(wrapper: Callable[P, T], method: Callable[..., Any]) -> Callable[P, T]:
    update_wrapper(wrapper, method)
    wrapper.__name__ = method.__name__.removeprefix("a")
    wrapper.__qualname__ = method.__qualname__.replace(method.__name__, wrapper.__name__)
    wrapper.__doc__ = f"`{method.__name__}` for synchronous code."
    return wrapper


class PerLoop(Generic[T]):
    """One value per event loop: connections, semaphores and savers must not be shared between loops.

    A value ends with its loop: `asyncio.run` closes both, and values of closed loops are dropped.

    Args:
        make: creates a loop's value.
        close: closes a value, on its loop.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None) -> None:
        self._make = make
        self._close = close
        self._values: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None, None]]] = {}

    def get(self) -> T:
        """Return the running loop's value, created at first use."""
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            for known_loop in list(self._values):
                if known_loop.is_closed():
                    self._values.pop(known_loop, None)
            value = self._make()
            closer = self._close_at_loop_end(value)
            with suppress(StopIteration):
                closer.__anext__().send(None)  # the loop now knows the generator, and closes it at its end
            self._values[loop] = value, closer
        return self._values[loop][0]

    async def aclose(self) -> None:
        """Close the running loop's value, if there is one. The next use creates another."""
        if (value_and_closer := self._values.pop(asyncio.get_running_loop(), None)) is not None:
            await value_and_closer[1].aclose()

    async def _close_at_loop_end(self, value: T) -> AsyncGenerator[None, None]:
        """Close a value when the generator is closed, which a loop does at its end."""
        try:
            yield
        finally:
            self._values.pop(asyncio.get_running_loop(), None)
            if self._close is not None:
                await self._close(value)
