"""A thread that writes to a SQLite file for many reads. It commits all waiting jobs in one transaction.

A commit in WAL mode takes little more time for ten rows than for one. When a job's future is done, its rows are in the
file, and are not lost if the process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from memagent_graph.concurrency.background import register_after_fork

_MAX_BATCH_JOBS: Final = 128

Job: TypeAlias = Callable[[sqlite3.Connection], Any]
"""A function that writes, and returns a result for the caller. If its transaction fails, it runs again in another."""


class MovedFileError(OSError):
    """A file was moved, deleted or replaced while it was written."""


class DatabaseWriter:
    """Runs jobs on one connection, in the order of their submission.

    Args:
        path: the path of the file.
        connect: opens the file. It is called in the writer's thread.
        owner: the object that submits jobs. If nobody closes the writer, its thread ends when the owner is collected.
    """

    def __init__(self, path: Path, connect: Callable[[], sqlite3.Connection], owner: object) -> None:
        self._path, self._connect = path, connect
        self.after_fork()
        register_after_fork(self)
        # The process waits for this thread at its end, so that submitted jobs are written.
        weakref.finalize(owner, lambda: threading.Thread(target=self.close).start()).atexit = False

    def after_fork(self) -> None:
        """Forget the pending jobs in a forked process, because the parent process writes them."""
        self._job_queue: queue.SimpleQueue[_QueuedJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending_thread: threading.Thread | None = None
        """The thread that `close` waits for. The next thread starts work after its end."""
        self._lock = threading.Lock()

    def submit(self, job: Job) -> Future[Any]:
        """Submit a job and return its future, which is done when the job is committed or has failed.

        Futures are done in order. A future's exception is the error of its job, `MovedFileError` if the file was moved
        or replaced, or the `OSError` or `sqlite3.Error` of opening or writing it.
        """
        queued_job = _QueuedJob(job, Future())
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_thread,
                    args=(self._job_queue, self._ending_thread),
                    name="memagent-writer",
                    daemon=True,
                )
                self._thread.start()
                atexit.register(self.close)
            self._job_queue.put(queued_job)
        return queued_job.future

    def close(self) -> None:
        """Write the submitted jobs and end the thread. A later job, even at once, starts another one."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._job_queue.put(None)
                self._job_queue, self._ending_thread = queue.SimpleQueue(), thread
        if thread is not None:
            atexit.unregister(self.close)
            thread.join()

    def _run_thread(self, job_queue: queue.SimpleQueue[_QueuedJob | None], previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()
        file: _OpenFile | None = None
        is_last = False
        while not is_last:
            batch, is_last = self._take_batch(job_queue)
            file = self._write(file, batch)
            del batch  # the objects of its jobs must not stay in memory until the next batch
        if file is not None:
            file.connection.close()

    def _write(self, file: _OpenFile | None, batch: Sequence[_QueuedJob]) -> _OpenFile | None:
        """Run a batch and set its futures. Return the open file; None if the next batch must open it again."""
        if not batch:
            return file
        try:
            if file is not None and file.identity != _read_identity(self._path):
                file.connection.close()
                file = None  # later jobs go to a new file, or to a file that replaced it
                raise MovedFileError("it was moved, deleted or replaced while it was written")
            file = file or _OpenFile(self._connect(), _read_identity(self._path))
            outcomes = _run_jobs(file.connection, batch)
        except Exception as error:  # noqa: BLE001  any error is raised in the callers
            outcomes = [error] * len(batch)
        for queued_job, outcome in zip(batch, outcomes, strict=True):
            queued_job.settle(outcome)
        return file

    def _take_batch(self, job_queue: queue.SimpleQueue[_QueuedJob | None]) -> tuple[list[_QueuedJob], bool]:
        """Return the waiting jobs (at least one, except at the end), and whether the thread must end."""
        batch: list[_QueuedJob] = []
        while (queued_job := job_queue.get()) is not None:
            batch.append(queued_job)
            if len(batch) == _MAX_BATCH_JOBS or job_queue.empty():  # only this thread takes jobs from the queue
                return batch, False
        return batch, True


def _read_identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True)
class _OpenFile:
    connection: sqlite3.Connection
    identity: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class _QueuedJob:
    job: Job
    future: Future[Any]

    def settle(self, outcome: Any) -> None:
        """Set the result or the error of the future, unless the caller cancelled it."""
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


def _run_jobs(connection: sqlite3.Connection, batch: Sequence[_QueuedJob]) -> list[Any]:
    """Return the results or errors of jobs. They run in one transaction, or in separate ones if a job fails."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        results = [queued_job.job(connection) for queued_job in batch]
        connection.execute("COMMIT")
    except Exception as error:  # noqa: BLE001  any error is raised in the callers
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        if len(batch) == 1:
            return [error]
        outcomes: list[Any] = []
        for queued_job in batch:
            try:
                outcomes += _run_jobs(connection, [queued_job])
            except sqlite3.Error as begin_error:  # such as a lock: the jobs before it are committed
                return outcomes + [begin_error] * (len(batch) - len(outcomes))
        return outcomes
    return results
