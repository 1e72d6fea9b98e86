"""Reads a corpus: gives the unfinished documents to an engine and writes each row to the table exactly once.

An engine reads documents: in this process (`read_concurrently`), or on a cluster (`on_ray.RayEngine`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from memagent_corpus.corpus_inputs import CorpusInputs, require_unique_ids
from memagent_corpus.corpus_reader import POLICY_ERRORS, CorpusReader, DocumentTask
from memagent_corpus.corpus_rows import CorpusRow
from memagent_corpus.source_access import CorpusDocument, CorpusSize
from memagent_corpus.table_folder import TableFolder
from memagent_corpus.table_writer import TableWriter
from memagent_graph.errors import CorpusError, PolicyOverloadedError, PromptCutError, RunError, RunHeldError
from memagent_graph.events import EventKind
from memagent_graph.storage.file_locks import lease

CHECKPOINTS_FILE: Final = "checkpoints.sqlite"
TEXTS_FOLDER: Final = "documents"
_MAX_QUEUED_DOCUMENTS: Final = 64
"""Maximum number of documents that are listed before they are read."""
_MAX_QUEUED_BYTES: Final = 16 * 2**20
_MAX_SKIPPED_DOCUMENTS: Final = 4096
"""Maximum number of documents that are skipped before the progress is updated."""
_MAX_NAMED_FAILURES: Final = 5
_MAX_CONSECUTIVE_FAILURES: Final = 12
"""The run stops if the policy fails for this many documents in a row, because the server is probably down."""
_RETRIED_ERRORS: Final = POLICY_ERRORS - {PromptCutError.__name__} | {RunHeldError.__name__}
"""After these errors, a document is read again once all others are finished."""


class StopCause(StrEnum):
    """Why a run of a corpus ended."""

    DONE = "done"
    """Every document has its rows."""
    MAX_DOCUMENTS = "max_documents"
    MAX_TOKENS = "max_tokens_total"
    MAX_SECONDS = "max_seconds"


@dataclass(frozen=True, slots=True)
class CorpusLimits:
    """Limits of one run. Documents that are in flight when it stops continue in the next run."""

    max_documents: int | None = None
    max_tokens_total: int | None = None
    max_seconds: float | None = None


@dataclass(slots=True)
class CorpusSummary:
    """The counts of one run."""

    read: int = 0
    """Documents that this run read, including failed ones."""
    skipped: int = 0
    """Documents that already had all of their rows."""
    without_question: int = 0
    """Documents without a question."""
    changed: int = 0
    """Documents whose source may have changed since they were read."""
    failed: int = 0
    """Documents of this run with at least one failed row."""
    failures: list[str] = field(default_factory=list)
    """The names of the first failed documents."""
    incomplete: int = 0
    """Documents of this run with content that could not be converted to text."""
    tokens: int = 0
    seconds: float = 0.0
    ended: StopCause = StopCause.DONE
    rows: int = 0
    """Rows in the table, including rows of earlier runs."""
    failed_rows: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    """The number of failed rows of this run for each kind of error."""


class CorpusWatcher(Protocol):
    """Is informed of the progress of a run."""

    def on_start(self, total: CorpusSize) -> None:
        """Receive the size of the corpus, when the run begins."""

    def on_skip(self, documents: int, size: int) -> None:
        """Receive the number of documents that already have all of their rows, and their size in bytes."""

    def on_document(self, document: CorpusDocument, rows: Sequence[CorpusRow]) -> None:
        """Receive a finished document and its rows."""


NextTask: TypeAlias = Callable[[], Awaitable[DocumentTask | None]]
"""Returns the next document to read; None if there are no more. Several tasks may call it at the same time."""
StoreRows: TypeAlias = Callable[[DocumentTask, Sequence[CorpusRow]], Awaitable[bool]]
"""Stores a document's rows, which are safe when it returns. It returns False when a limit is reached: an engine that
has taken documents in advance should then stop. Several tasks may call it at the same time."""


CorpusEngine: TypeAlias = Callable[[NextTask, StoreRows], Coroutine[Any, Any, None]]
"""Reads all documents, in this process or elsewhere, and stores their rows. It may be cancelled. A document whose rows
are not stored, for any reason, is read again in the next pass or run. Raises errors that every document would cause."""


async def read_concurrently(
    documents_in_flight: int,
    read_document: Callable[[DocumentTask], Awaitable[Sequence[CorpusRow]]],
    next_task: NextTask,
    store_rows: StoreRows,
) -> None:
    """Read documents until there are no more, `documents_in_flight` at the same time. The first error stops all."""

    async def run_worker() -> None:
        while (task := await next_task()) is not None:
            await store_rows(task, await read_document(task))

    workers = [asyncio.create_task(run_worker()) for _ in range(max(1, documents_in_flight))]
    try:
        ended_workers, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
        for worker in ended_workers:
            worker.result()
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


@contextlib.contextmanager
def lock_table(table: TableFolder) -> Iterator[Path]:
    """Lock a table against other processes on this machine, and yield its work folder.

    Raises:
        CorpusError: another process has the lock, the table is a file or cannot be written, or its work folder or
            something in it is a link.
    """
    work_folder = table.work_folder
    if work_folder.parent.is_file():
        raise CorpusError(f"a table must be a folder, got the file {table.location}", hint="Set --out to a folder.")
    for path in (work_folder, *work_folder.glob("*"), *work_folder.glob("*/*")):
        if path.is_symlink():  # it could lead writes to another place
            raise CorpusError(f"{path} is a link to another place", hint="Remove it, or choose a new folder.")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lease(work_folder / "lock", "the table"))
        except RunHeldError as error:
            owner = re.search(r"this process|process \d+", error.message)
            raise CorpusError(
                f"{owner[0] if owner else 'another process'} is writing to {table.location}",
                hint="Wait until it ends, or stop it. Then try again.",
            ) from error
        except RunError as error:
            raise CorpusError(f"{work_folder} cannot be written: {error.message}", hint=error.hint) from error
        yield work_folder


async def run_corpus(
    inputs: CorpusInputs,
    reader: CorpusReader,
    table: TableFolder,
    *,
    engine: CorpusEngine | None = None,
    documents_in_flight: int = 64,
    rows_per_part: int = 10_000,
    retry_failed: bool = False,
    limits: CorpusLimits | None = None,
    watcher: CorpusWatcher | None = None,
) -> CorpusSummary:
    """Read all documents without rows and write their rows. The caller must hold `lock_table(table)`.

    Args:
        inputs: the documents.
        reader: has the questions and settings. Its checkpoints are usually in the table's work folder.
        table: where the rows are written.
        engine: reads the documents; by default `reader` does, in this process and event loop.
        documents_in_flight: the number of documents that are read at the same time, by `engine` too.
        rows_per_part: rows in each part of the table. The last part of a run has fewer.
        retry_failed: read documents again that have failed rows, or whose part of the table is damaged or missing.
        limits: when to stop early.
        watcher: called as the run progresses.

    Raises:
        CorpusError: the table has other settings, another run writes to it, a part of it is damaged, or a disk is full.
        DocumentError: the inputs cannot be listed, lack a column, or have duplicate ids.
        PolicyError: the policy failed for many documents in a row. Finished rows are not lost.
    """
    settings = await reader.collect_settings()
    await asyncio.to_thread(require_unique_ids, inputs)
    manifest = await asyncio.to_thread(table.take_over, settings, inputs.description)
    # Other machines may use checkpoints that are outside the work folder, such as on a server.
    has_shared_checkpoints = not await reader.keeps_checkpoints_below(table.work_folder)
    delete_checkpoints = (
        partial(_delete_checkpoints, reader, asyncio.get_running_loop()) if has_shared_checkpoints else None
    )
    writer = await asyncio.to_thread(TableWriter, table, reader.columns, rows_per_part, delete_checkpoints)
    with contextlib.closing(writer.ledger):
        await asyncio.to_thread(writer.recover, manifest.parts, drop_damaged=retry_failed)
        max_failures = max(_MAX_CONSECUTIVE_FAILURES, documents_in_flight // 4)
        limits = limits or CorpusLimits()
        run = _CorpusRun(inputs, reader, writer, has_shared_checkpoints, retry_failed, limits, watcher, max_failures)
        local_engine = partial(read_concurrently, documents_in_flight, lambda task: task.read(reader))
        return await run.run(engine or local_engine)


def _delete_checkpoints(reader: CorpusReader, loop: asyncio.AbstractEventLoop, ids: Iterable[str]) -> None:
    """Delete the checkpoints of rows. Called in a thread other than the event loop's."""
    asyncio.run_coroutine_threadsafe(reader.delete_checkpoints(list(ids)), loop).result()


@dataclass
class _CorpusRun:
    """One call of `run_corpus`."""

    _inputs: CorpusInputs
    _reader: CorpusReader
    _writer: TableWriter
    _has_shared_checkpoints: bool
    _retry_failed: bool
    _limits: CorpusLimits
    _watcher: CorpusWatcher | None
    _max_failures: int
    _summary: CorpusSummary = field(default_factory=CorpusSummary)
    _started_at: float = field(default_factory=time.monotonic)
    _listing_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _writing_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _documents: Iterator[CorpusDocument] = field(init=False)
    _queue: deque[DocumentTask] = field(default_factory=deque)
    _is_exhausted: bool = False
    _task_count: int = 0
    _postponed_count: int = 0
    _consecutive_failures: int = 0
    """Documents in a row for which the policy failed."""
    _is_last_pass: bool = False

    async def run(self, engine: CorpusEngine) -> CorpusSummary:
        """Read all documents. Those for which the policy failed are read again in a second pass."""
        if self._watcher:
            self._watcher.on_start(await asyncio.to_thread(self._inputs.total))
        try:
            await self._read_pass(engine)
            if self._postponed_count and self._summary.ended is StopCause.DONE:
                self._is_last_pass = True
                await self._read_pass(engine)
        finally:
            await asyncio.to_thread(self._writer.write_parts, all_rows=True)
            self._summary.seconds = time.monotonic() - self._started_at
            self._summary.rows, self._summary.failed_rows = self._writer.ledger.count_rows()
        if self._summary.ended is StopCause.DONE and not self._writer.ledger.is_reading():
            await self._reader.agent.aclose()
            await asyncio.to_thread(self._remove_work_files)
        return self._summary

    # Reading

    async def _read_pass(self, engine: CorpusEngine) -> None:
        """Run the engine over all documents once, until it has finished or the time limit is reached."""
        self._documents, self._is_exhausted = self._inputs.documents(), False
        self._queue.clear()
        engine_task = asyncio.create_task(engine(self._take_task, self._store_rows))
        seconds = self._limits.max_seconds
        seconds_left = None if seconds is None else max(0.0, self._started_at + seconds - time.monotonic())
        try:
            await asyncio.wait([engine_task], timeout=seconds_left)
            if engine_task.done() or not self._is_limit_reached():
                await engine_task
        finally:
            engine_task.cancel()
            await asyncio.gather(engine_task, return_exceptions=True)

    async def _store_rows(self, task: DocumentTask, rows: Sequence[CorpusRow]) -> bool:
        """Store a document's rows. Questions with an error that is retried are postponed to the last pass."""
        document = task.document
        failures = [row for row in rows if row.error_kind in POLICY_ERRORS]
        self._consecutive_failures = self._consecutive_failures + 1 if failures else 0
        if self._consecutive_failures >= self._max_failures:
            raise PolicyOverloadedError(
                f"the policy failed for {self._consecutive_failures} documents in a row; "
                f"the last error: {failures[0].error}",
                hint="Check the server (`memagent doctor`), then run the same command again. Finished rows are kept.",
            )
        if not self._is_last_pass and any(row.error_kind in _RETRIED_ERRORS for row in rows):
            self._postponed_count += 1
            if rows := [row for row in rows if row.error_kind not in _RETRIED_ERRORS]:
                await self._add_rows(task, "", rows)
            await asyncio.to_thread(self._writer.ledger.mark_begun, document.name)
            return not self._is_limit_reached()
        await self._add_rows(task, document.version, rows)
        summary = self._summary
        summary.read += 1
        if any(row.error is not None for row in rows):
            summary.failed += 1
            summary.failures += [document.name] * (len(summary.failures) < _MAX_NAMED_FAILURES)
        summary.incomplete += EventKind.DOCUMENT_INCOMPLETE in {event.kind for row in rows for event in row.events}
        for row in rows:
            if row.error_kind:
                summary.kinds[row.error_kind] = summary.kinds.get(row.error_kind, 0) + 1
        if self._watcher:
            self._watcher.on_document(document, rows)
        return not self._is_limit_reached()

    async def _add_rows(self, task: DocumentTask, version: str, rows: Sequence[CorpusRow]) -> None:
        """Add rows to the ledger, and write a part of the table if one is due."""
        await asyncio.to_thread(self._writer.add_rows, task.document.name, version, rows, task.questions)
        if not self._has_shared_checkpoints:
            await self._reader.delete_checkpoints(row.id for row in rows if row.chunks)
        self._summary.tokens += sum(row.usage.prompt_tokens + row.usage.completion_tokens for row in rows)
        if self._writer.is_part_due:
            async with self._writing_lock:
                if self._writer.is_part_due:
                    await asyncio.to_thread(self._writer.write_parts)

    def _is_limit_reached(self) -> bool:
        """Return whether a limit is reached. The first time, record it as the reason why the run ended."""
        limits, summary = self._limits, self._summary
        if summary.ended is not StopCause.DONE:
            return True
        if limits.max_seconds is not None and time.monotonic() - self._started_at >= limits.max_seconds:
            summary.ended = StopCause.MAX_SECONDS
        elif limits.max_tokens_total is not None and summary.tokens >= limits.max_tokens_total:
            summary.ended = StopCause.MAX_TOKENS
        return summary.ended is not StopCause.DONE

    # Listing

    async def _take_task(self) -> DocumentTask | None:
        """Return the next document with unanswered questions; None if there are no more or a limit is reached."""
        async with self._listing_lock:
            while not self._queue and not self._is_exhausted:
                await asyncio.to_thread(self._queue_documents)
            if not self._queue or self._is_limit_reached():
                return None
            limit = self._limits.max_documents
            if limit is not None and self._task_count >= limit:
                self._summary.ended = StopCause.MAX_DOCUMENTS
                return None
            self._task_count += 1
            task = self._queue.popleft()
        await asyncio.to_thread(self._writer.ledger.mark_begun, task.document.name)
        return task

    def _queue_documents(self) -> None:
        """List some documents and queue those with unanswered questions. This blocks, so it runs in a thread."""
        ledger = self._writer.ledger
        queued_bytes = skipped_count = skipped_bytes = unasked_count = 0
        for document in self._documents:
            questions = self._reader.expand_questions(document)
            task = ledger.find_task(document, questions, retry_failed=self._retry_failed)
            if self._is_last_pass and task.questions and not task.is_begun:  # it was not postponed in this run
                task = ledger.find_task(document, questions)
            self._summary.changed += task.is_changed and not self._is_last_pass
            if task.questions:
                # With shared checkpoints, another machine may have begun the document.
                self._queue.append(replace(task, is_begun=task.is_begun or self._has_shared_checkpoints))
                queued_bytes += len(document.text or "")
            else:
                skipped_count += 1
                unasked_count += not questions
                skipped_bytes += document.size or 0
            if (
                len(self._queue) >= _MAX_QUEUED_DOCUMENTS
                or queued_bytes >= _MAX_QUEUED_BYTES
                or skipped_count >= _MAX_SKIPPED_DOCUMENTS
            ):
                break
        else:
            self._is_exhausted = True
        if not self._is_last_pass:
            self._summary.skipped += skipped_count - unasked_count
            self._summary.without_question += unasked_count
            if self._watcher and skipped_count:
                self._watcher.on_skip(skipped_count, skipped_bytes)

    def _remove_work_files(self) -> None:
        """Remove the files that only unfinished reads need."""
        work_folder, texts_folder = self._writer.table.work_folder, self._reader.agent.store.root
        for path in work_folder.glob(f"{CHECKPOINTS_FILE}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not self._reader.keeps_texts and work_folder in texts_folder.parents:
            shutil.rmtree(texts_folder, ignore_errors=True)
