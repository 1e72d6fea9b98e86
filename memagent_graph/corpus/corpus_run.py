"""The run of a corpus: what is left to read goes to an engine, and its rows go to the table, none twice."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from memagent_graph.corpus.corpus_documents import CorpusDocument, Total
from memagent_graph.corpus.corpus_inputs import Inputs, require_unique_ids
from memagent_graph.corpus.corpus_reader import POLICY_FAILURES, CorpusReader
from memagent_graph.corpus.corpus_rows import Row
from memagent_graph.corpus.engines import Engine, InThisProcess, Work
from memagent_graph.corpus.table_folder import TableFolder
from memagent_graph.corpus.table_writer import TableWriter
from memagent_graph.errors import CorpusError, PolicyOverloadedError, RunError, RunHeldError
from memagent_graph.storage.leases import lease

CHECKPOINTS: Final = "checkpoints.sqlite"
TEXTS: Final = "documents"
_AHEAD: Final = 64
"""Documents that are listed ahead of those that are read."""
_AHEAD_BYTES: Final = 16 * 2**20
_SKIPPED_AT_ONCE: Final = 4096
_TROUBLES: Final = 12
"""After so many documents in a row for which the policy failed, it is taken to be gone."""
_LATER: Final = POLICY_FAILURES | {RunHeldError.__name__}
"""Kinds of errors after which a document is tried again when all others have been read."""


class Ended(StrEnum):
    """Why a run of a corpus ended."""

    DONE = "done"
    """Every document has its rows."""
    MAX_DOCUMENTS = "max_documents"
    MAX_TOKENS = "max_tokens_total"
    MAX_SECONDS = "max_seconds"


@dataclass(frozen=True, slots=True)
class CorpusLimits:
    """Where a run stops early, counted from its start; what is in flight then continues next time."""

    max_documents: int | None = None
    max_tokens_total: int | None = None
    max_seconds: float | None = None


@dataclass(slots=True)
class CorpusSummary:
    """What a run did."""

    read: int = 0
    """Documents that were read in this run, failed ones included."""
    skipped: int = 0
    """Documents that had all of their rows before."""
    changed: int = 0
    """Documents whose source had changed since they were read."""
    failed: int = 0
    """Documents of this run with at least one row that has an error."""
    new_rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    ended: Ended = Ended.DONE
    rows: int = 0
    """Rows in the table, those of earlier runs included."""
    failed_rows: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    """How many rows of this run have which kind of error."""


class CorpusWatcher(Protocol):
    """Sees a run's progress."""

    def begins(self, total: Total) -> None:
        """The first document is about to be listed; `total` is what is known of their number."""
        ...

    def skips(self, documents: int, size: int) -> None:
        """So many documents have all of their rows already."""
        ...

    def ends(self, document: CorpusDocument, rows: Sequence[Row]) -> None:
        """A document has its rows."""
        ...


@contextlib.contextmanager
def exclusive(table: TableFolder) -> Iterator[Path]:
    """The table's folder for work, which only one process on this machine may hold.

    Raises:
        CorpusError: another process holds it; the message has its number. Or the folder cannot be written.
    """
    work = table.work
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lease(work / "lock", "the table"))
        except RunHeldError as error:
            who = error.message.removeprefix("the run is being read by ").removesuffix(" already")
            raise CorpusError(
                f"{who} writes to {table.location} now", hint="Wait for it, or end it; then start this one again."
            ) from error
        except RunError as error:
            raise CorpusError(f"{work} cannot be written: {error.message}", hint=error.hint) from error
        yield work


async def run_corpus(
    inputs: Inputs,
    reader: CorpusReader,
    table: TableFolder,
    *,
    engine: Engine | None = None,
    documents_in_flight: int = 64,
    rows_per_part: int = 10_000,
    retry_failed: bool = False,
    limits: CorpusLimits | None = None,
    watcher: CorpusWatcher | None = None,
) -> CorpusSummary:
    """Read what has no rows yet, and write the rows. The caller holds `exclusive(table)`.

    Args:
        inputs: the documents.
        reader: knows the questions and settings; its agent keeps checkpoints in the table's folder for work.
        table: where the rows go.
        engine: reads the documents; if left out, `reader` does, in this process.
        documents_in_flight: how many are read at once, by the engine as well.
        rows_per_part: how many rows a part of the table has; the last one of a run has fewer.
        retry_failed: read what has a row with an error again.
        limits: where to stop early.
        watcher: called as the run progresses.

    Raises:
        CorpusError: the table has other settings, another run writes to it, or a disk is full.
        DocumentError: the inputs cannot be listed, lack a column, or have ids that are not unique.
        PolicyError: the policy is gone. Nothing that was read is lost.
    """
    table.take_over(await reader.settings(), inputs.description)
    writer = await asyncio.to_thread(TableWriter, table, rows_per_part)
    engine = engine or InThisProcess(reader, documents_in_flight)
    most_troubles = max(_TROUBLES, documents_in_flight // 4)
    run = _Run(inputs, reader, writer, engine, most_troubles, retry_failed, limits or CorpusLimits(), watcher)
    try:
        return await run.all()
    finally:
        writer.close()


class _Run:
    """One call of `run_corpus`."""

    def __init__(
        self,
        inputs: Inputs,
        reader: CorpusReader,
        writer: TableWriter,
        engine: Engine,
        most_troubles: int,
        retry_failed: bool,
        limits: CorpusLimits,
        watcher: CorpusWatcher | None,
    ) -> None:
        self._inputs, self._reader, self._writer, self._engine = inputs, reader, writer, engine
        self._ledger = writer.ledger
        self._most_troubles, self._retry_failed = most_troubles, retry_failed
        self._limits, self._watcher = limits, watcher
        self._summary = CorpusSummary()
        self._began = time.monotonic()
        self._listing = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._source: Iterator[CorpusDocument] = iter(())
        self._listed: deque[Work] = deque()
        self._exhausted = False
        self._taken = 0
        self._postponed = 0
        self._troubles = 0
        self._is_last_sweep = False
        self._outlives = False
        """Whether checkpoints outlive the folder for work, as on a server that other machines use too."""

    async def all(self) -> CorpusSummary:
        """Everything."""
        await asyncio.to_thread(require_unique_ids, self._inputs)
        self._outlives = not await self._reader.keeps_checkpoints_below(self._writer.table.work)
        if self._outlives:
            self._writer.forget = partial(self._forget, asyncio.get_running_loop())
        await asyncio.to_thread(self._writer.recover)
        if self._watcher:
            self._watcher.begins(await asyncio.to_thread(self._inputs.total))
        try:
            await self._sweep()
            if self._postponed and self._summary.ended is Ended.DONE:
                self._is_last_sweep = True
                await self._sweep()
        finally:
            await asyncio.to_thread(self._writer.write_parts, all_rows=True)
            self._summary.seconds = time.monotonic() - self._began
            self._summary.rows, self._summary.failed_rows = self._ledger.counts()
        if self._summary.ended is Ended.DONE and not self._ledger.is_reading():
            await self._clear()
        return self._summary

    # Reading

    async def _sweep(self) -> None:
        """Go over all documents once, until the engine is done or the time is over."""
        self._source, self._exhausted = self._inputs.documents(), False
        self._listed.clear()
        reading = asyncio.create_task(self._engine.read(self._next, self._keep))
        try:
            await asyncio.wait([reading], timeout=self._seconds_left())
            if reading.done() or not self._is_over():
                await reading
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _keep(self, work: Work, rows: Sequence[Row]) -> bool:
        """Enter a document's rows. If the policy failed for some, it is read for these again at the end."""
        document = work.document
        failures = [row for row in rows if row.error_kind in POLICY_FAILURES]
        self._troubles = self._troubles + 1 if failures else 0
        if self._troubles >= self._most_troubles:
            raise PolicyOverloadedError(
                f"the policy failed for {self._troubles} documents in a row; the last time: {failures[0].error}",
                hint="Check the server (`memagent doctor`), then start the same command again: nothing is lost.",
            )
        if not self._is_last_sweep and any(row.error_kind in _LATER for row in rows):
            self._postponed += 1
            if rows := [row for row in rows if row.error_kind not in _LATER]:
                await self._enter(document, "", rows)
            await asyncio.to_thread(self._ledger.begin, document.name)
            return not self._is_over()
        await self._enter(document, document.version, rows)
        summary = self._summary
        summary.read += 1
        summary.failed += any(row.failed for row in rows)
        for row in rows:
            if row.error_kind:
                summary.kinds[row.error_kind] = summary.kinds.get(row.error_kind, 0) + 1
        if self._watcher:
            self._watcher.ends(document, rows)
        return not self._is_over()

    async def _enter(self, document: CorpusDocument, version: str, rows: Sequence[Row]) -> None:
        await asyncio.to_thread(self._writer.enter, document.name, version, rows)
        if not self._outlives:
            await self._reader.forget(rows)
        self._summary.new_rows += len(rows)
        self._summary.tokens += sum(row.usage.prompt_tokens + row.usage.completion_tokens for row in rows)
        if self._writer.is_part_due:
            async with self._writing:
                if self._writer.is_part_due:
                    await asyncio.to_thread(self._writer.write_parts)

    def _seconds_left(self) -> float | None:
        most = self._limits.max_seconds
        return None if most is None else max(0.0, most - (time.monotonic() - self._began))

    def _is_over(self) -> bool:
        """Whether a limit is reached; the run has ended then."""
        limits, summary = self._limits, self._summary
        if summary.ended is not Ended.DONE:
            return True
        if limits.max_seconds is not None and time.monotonic() - self._began >= limits.max_seconds:
            summary.ended = Ended.MAX_SECONDS
        elif limits.max_tokens_total is not None and summary.tokens >= limits.max_tokens_total:
            summary.ended = Ended.MAX_TOKENS
        return summary.ended is not Ended.DONE

    # Listing

    async def _next(self) -> Work | None:
        """The next document that has something to be read for, noted as begun; None at the end, or at a limit."""
        async with self._listing:
            while not self._listed and not self._exhausted:
                await asyncio.to_thread(self._list_some)
            if not self._listed or self._is_over():
                return None
            most = self._limits.max_documents
            if most is not None and self._taken >= most:
                self._summary.ended = Ended.MAX_DOCUMENTS
                return None
            self._taken += 1
            work = self._listed.popleft()
        await asyncio.to_thread(self._ledger.begin, work.document.name)
        return work

    def _list_some(self) -> None:
        """List documents until there is some work; in a thread."""
        size = skipped = skipped_bytes = 0
        while len(self._listed) < _AHEAD and size < _AHEAD_BYTES and skipped < _SKIPPED_AT_ONCE:
            document = next(self._source, None)
            if document is None:
                self._exhausted = True
                break
            asked = self._reader.questions_of(document)
            left = self._ledger.open_of(
                document.name, document.version, asked, retry_failed=self._retry_failed and not self._is_last_sweep
            )
            self._summary.changed += left.changed and not self._is_last_sweep
            if left.questions:
                begun = left.begun or left.changed or self._outlives  # perhaps on another machine
                self._listed.append(Work(document, left.questions, begun, left.answered))
                size += len(document.text or "")
            else:
                skipped += 1
                skipped_bytes += document.size or 0
        if not self._is_last_sweep:
            self._summary.skipped += skipped
            if self._watcher and skipped:
                self._watcher.skips(skipped, skipped_bytes)

    def _forget(self, loop: asyncio.AbstractEventLoop, ids: Iterable[str]) -> None:
        """Remove the checkpoints of rows; from a thread, while the loop waits for it."""
        asyncio.run_coroutine_threadsafe(self._reader.forget_ids(list(ids)), loop).result()

    async def _clear(self) -> None:
        """Remove what only an unfinished read needs."""
        await self._reader.agent.aclose()
        await asyncio.to_thread(self._remove_leftovers)

    def _remove_leftovers(self) -> None:
        work, texts = self._writer.table.work, self._reader.agent.store.root
        for path in work.glob(f"{CHECKPOINTS}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not self._reader.keeps_texts and work in texts.parents:
            shutil.rmtree(texts, ignore_errors=True)
