"""One thread that writes what many reads submit; everything that waits is one transaction.

A commit in WAL mode costs little more for ten rows than for one. A caller that waited for a job knows that
it is in the file: killing the process loses nothing of it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from memagent_graph.concurrency.forks import renew_in_children
from memagent_graph.errors import RunLogError
from memagent_graph.run_log.schema import connect, migrate, prepare
from memagent_graph.storage.private_files import private_file

_LARGEST_BATCH: Final = 128
_LINGER_SECONDS: Final = 0.05
"""How long a batch from an event loop waits for further jobs while no caller waits for it. Each transaction takes the
interpreter's lock from the loop a few times, for any number of rows."""
_LINGER_IN_HASTE_SECONDS: Final = 0.003
"""The same when a caller waits."""


class Job(Protocol):
    """Something to write. Called within a transaction; if that fails, it is called again in another one."""

    def __call__(self, connection: sqlite3.Connection) -> Any:
        """Write, and return the result for the caller."""
        ...


Together: TypeAlias = Callable[[sqlite3.Connection, Sequence[Any]], list[Any]]
"""Does several jobs at once, in order. Jobs with the same `together` are done like this: every statement
costs the event loop's thread the interpreter's lock once or twice."""


class Writer:
    """Runs jobs on one connection, in the order of their submission."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.after_fork()
        renew_in_children(self)

    def after_fork(self) -> None:
        """What was submitted before belongs to the parent process, whose thread writes it."""
        self._entries: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending: threading.Thread | None = None
        """The writer that `close` waits for; the next one begins when it is done."""
        self._lock = threading.Lock()
        self._haste = threading.Event()

    def submit(self, job: Job) -> Future[Any]:
        """Submit a job; the future is done when it is committed or has failed.

        The future's exception is what the job raised, or `sqlite3.Error` if the file could not be written.
        """
        future: Future[Any] = Future()
        self._put(_Entry(job, future, None))
        return future

    def submit_from_loop(self, job: Job) -> asyncio.Future[Any]:
        """`submit` for the running event loop, which is woken once for all of its jobs in a transaction.

        A caller that waits for the future calls `hurry`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._put(_Entry(job, future, loop))
        return future

    def hurry(self) -> None:
        """A caller waits for what was submitted."""
        self._haste.set()

    def close(self) -> None:
        """Finish what was submitted and end the thread; a later job starts another."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._entries.put(None)
                self._entries, self._ending = queue.SimpleQueue(), thread
                self._haste.set()
        if thread is not None:
            atexit.unregister(self.close)
            thread.join()

    def _put(self, entry: _Entry) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, args=(self._entries, self._ending), name="memagent-run-log", daemon=True
                )
                self._thread.start()
                atexit.register(self.close)
            self._entries.put(entry)

    def _work(self, entries: queue.SimpleQueue[_Entry | None], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        connection: sqlite3.Connection | None = None
        opened: tuple[int, int] | None = None
        try:
            while True:
                batch, last = self._next_batch(entries)
                if batch:
                    try:
                        if connection is not None and _identity(self._path) != opened:
                            connection.close()
                            connection = None  # later entries go to a new file, or to the one that is there now
                            raise _moved(self._path)
                        if connection is None:
                            connection, opened = _opened(self._path)
                        outcomes = _run(connection, batch)
                    except Exception as error:  # noqa: BLE001  any error goes to the callers that wait
                        outcomes = [error] * len(batch)
                    _tell(batch, outcomes)
                if last:
                    return
        finally:
            if connection is not None:
                connection.close()

    def _next_batch(self, entries: queue.SimpleQueue[_Entry | None]) -> tuple[list[_Entry], bool]:
        """The entries that wait (at least one, except at the end), and whether this is the end."""
        batch: list[_Entry] = []
        entry = entries.get()
        if entry is not None and entry.loop is not None and self._haste.wait(_LINGER_SECONDS):
            time.sleep(_LINGER_IN_HASTE_SECONDS)
        self._haste.clear()
        while entry is not None:
            batch.append(entry)
            if len(batch) == _LARGEST_BATCH:
                return batch, False
            try:
                entry = entries.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file has this name now; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _moved(path: Path) -> RunLogError:
    return RunLogError(
        f"{path} was moved, deleted or replaced while it was written",
        hint="Put it back before its runs continue; what was written before is in the old file. Do not move "
        "a log while programs use it: copy it with `memagent export`.",
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    job: Job
    future: Future[Any] | asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop | None
    """The loop of an asyncio future."""


def _run(connection: sqlite3.Connection, batch: Sequence[_Entry]) -> list[Any]:
    """What each job returned or raised. All run in one transaction; if one fails, each runs in its own."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        results: list[Any] = []
        for together, group in groupby((entry.job for entry in batch), lambda job: getattr(job, "together", None)):
            jobs = list(group)
            results += together(connection, jobs) if together else [job(connection) for job in jobs]
        connection.execute("COMMIT")
    except Exception as error:  # noqa: BLE001  any error goes to the callers that wait
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        if len(batch) == 1:
            return [error]
        return [outcome for entry in batch for outcome in _run(connection, [entry])]
    return results


def _tell(batch: Sequence[_Entry], outcomes: Sequence[Any]) -> None:
    """Wake the callers that wait."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Any, Any]]] = {}
    for entry, outcome in zip(batch, outcomes, strict=True):
        if entry.loop is None:
            _settle([(entry.future, outcome)])
        else:
            by_loop.setdefault(entry.loop, []).append((entry.future, outcome))
    for loop, settled in by_loop.items():
        with contextlib.suppress(RuntimeError):  # The loop was closed, and no caller waits any more.
            loop.call_soon_threadsafe(_settle, settled)


def _settle(settled: Sequence[tuple[Any, Any]]) -> None:
    for future, outcome in settled:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _opened(path: Path) -> tuple[sqlite3.Connection, tuple[int, int] | None]:
    """A connection to the log's file, created or migrated if necessary, and the file's identity."""
    private_file(path)
    connection = connect(path)
    try:
        prepare(connection, path)
        migrate(connection, path)
        return connection, _identity(path)
    except BaseException:
        connection.close()
        raise
