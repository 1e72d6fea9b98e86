"""One thread that writes what many reads hand in, several at a time in one transaction.

A commit in WAL mode costs little more for ten rows than for one. Whoever waits for a job knows, when it is done, that
it is in the file: killing the process loses nothing of it.
"""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeAlias

from memagent_graph.run_log.schema import connect

Job: TypeAlias = Callable[[sqlite3.Connection], Any]
_LARGEST_BATCH: Final = 256


class Writer:
    """Runs jobs on one connection, in the order in which they were handed in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: queue.SimpleQueue[tuple[Job, Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, job: Job) -> Future[Any]:
        """Hand in a job; the future is done once it is committed, or has failed.

        The future's exception is what the job raised, or `sqlite3.Error` where the file could not be written.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="memagent-run-log", daemon=True)
                self._thread.start()
            self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Finish what was handed in and end the thread; a later job starts another."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        connection: sqlite3.Connection | None = None
        try:
            while True:
                batch, last = self._next_batch()
                if batch:
                    try:
                        connection = connection or connect(self._path)
                        _run(connection, batch)
                    except Exception as error:  # noqa: BLE001  it belongs to those who wait, whatever it is
                        for _, future in batch:
                            if not future.done():
                                future.set_exception(error)
                if last:
                    return
        finally:
            if connection is not None:
                connection.close()

    def _next_batch(self) -> tuple[list[tuple[Job, Future[Any]]], bool]:
        """The jobs that wait, at least one unless the end has come, and whether it has."""
        batch: list[tuple[Job, Future[Any]]] = []
        entry = self._jobs.get()
        while entry is not None:
            batch.append(entry)
            if len(batch) == _LARGEST_BATCH:
                return batch, False
            try:
                entry = self._jobs.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True


def _run(connection: sqlite3.Connection, batch: list[tuple[Job, Future[Any]]]) -> None:
    """Run a batch in one transaction; if any job fails, each in its own, so that only the failing one does."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        results = [job(connection) for job, _ in batch]
        connection.execute("COMMIT")
    except Exception as error:  # noqa: BLE001  whatever it is, it belongs to those who wait
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        if len(batch) == 1:
            batch[0][1].set_exception(error)
            return
        for entry in batch:
            _run(connection, [entry])
        return
    for (_, future), result in zip(batch, results, strict=True):
        future.set_result(result)
