"""The tools that a client's model calls. Their docstrings are the descriptions that the model reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Annotated, Any, TypeVar

import anyio
from mcp.types import CallToolResult, TextContent
from pydantic import Field

from memagent_graph.concurrency.shared_pass import Barrier, read_in_passes
from memagent_graph.documents import Document, DocumentRef
from memagent_graph.errors import MemAgentError, RefusedSourceError, RunError
from memagent_graph.plain_text import make_printable
from memagent_graph.reader import MemAgent
from memagent_graph.reading.inputs import check_questions, store_document
from memagent_graph.reading.state import Limits, new_run_id
from memagent_graph.reading.structured import with_response_format
from memagent_graph.response_format import ResponseFormat
from memagent_graph.results import ReadResult
from memagent_graph.run_log import RunLog
from memagent_graph.timeline.model import build_timeline
from memagent_graph.timeline.view import load_run_view
from memagent_graph.trace import MemoryUpdate
from memagent_mcp.active_reads import DEFAULT_WAIT_SECONDS, ActiveRead, ActiveReads
from memagent_mcp.client_roots import RequestRoots, ToolContext
from memagent_mcp.tool_results import (
    Reading,
    RunListing,
    RunReport,
    RunSummary,
    format_answer,
    format_run,
    format_time,
    make_answer_data,
    shorten_line,
)

MAX_QUESTIONS = 16
"""The maximum number of questions in a call. Each has its own memory and answer."""

T = TypeVar("T")
Questions = Annotated[
    Annotated[list[str], Field(min_length=1, max_length=MAX_QUESTIONS)] | str,
    Field(description=f"What to find out: one question, or up to {MAX_QUESTIONS}, each answered separately."),
]
# An empty string means that an argument is not given. The type cannot be `str | None`: for such arguments, the SDK
# parses texts that look like JSON, so a JSON document would arrive as a dictionary.
PathArgument = Annotated[str, Field(description="The file to read, below the allowed roots. Give either path or text.")]
TextArgument = Annotated[str, Field(description="The text to read, instead of a file.")]
Pages = Annotated[
    str, Field(description="The pages to read of a PDF file: 5, 5-10, 12- or 1-3,7. All pages by default.")
]
AnswerSchema = Annotated[
    dict[str, Any] | None,
    Field(description="A JSON Schema for the answer, for tables and fields. `value` then has the parsed answer."),
]
RunId = Annotated[str, Field(description="A run's id, from read_document or list_runs.")]
MaxChunks = Annotated[int | None, Field(ge=1, description="Stop each question's read after this many chunks.")]
MaxTokens = Annotated[
    int | None, Field(ge=1, description="Stop each question's read after this many tokens, input and output.")
]
MaxSeconds = Annotated[float | None, Field(gt=0, description="Stop each question's read after this many seconds.")]
Background = Annotated[
    bool, Field(description="Do not wait for the answer; return the run id at once, to be used with wait.")
]


@dataclass(eq=False)
class Tools:
    """The tools for one reader: read, wait, cancel and resume; with a log, also ask again, list and show."""

    reader: MemAgent
    roots: RequestRoots
    """Decides which files may be read, and how long a text may be."""
    max_limits: Limits
    """Limits of each read. A call can only lower them."""
    active_reads: ActiveReads = field(default_factory=ActiveReads)
    _resume_lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @property
    def supported_tools(self) -> list[Callable[..., Any]]:
        """The tools that this reader supports."""
        tools: list[Callable[..., Any]] = [self.read_document, self.wait, self.cancel_read]
        if self.reader.keeps_checkpoints:
            tools.append(self.resume_read)
        if self.reader.run_log is not None:
            tools += [self.ask_again, self.list_runs, self.show_run]
        return tools

    @property
    def _log(self) -> RunLog:
        assert self.reader.run_log is not None  # noqa: S101  without a log, its tools are not supported
        return self.reader.run_log

    async def read_document(
        self,
        context: ToolContext,
        questions: Questions,
        path: PathArgument = "",
        text: TextArgument = "",
        pages: Pages = "",
        response_format: AnswerSchema = None,
        max_chunks: MaxChunks = None,
        max_tokens: MaxTokens = None,
        max_seconds: MaxSeconds = None,
        background: Background = False,
    ) -> Annotated[CallToolResult, Reading]:
        """Answer questions from a document of any length.

        Use it for documents that do not fit in your context: books, logs, transcripts, long reports. Another language
        model reads the document for you. You get the answer, supporting quotes with their positions in the document,
        how much of it was read, and a run id; with ask_again and this id you can ask further questions. A call reads
        the document once for all its questions, so ask precisely, and ask everything in one call. If a document has
        more than a few hundred pages, read it in the background, and call wait until the answer is ready.
        """
        document = (await self._open_document(context, path, text)).only(pages or None)
        limits = Limits(max_chunks, max_tokens, max_seconds)
        return await shield_work(
            self._read_all(context, document, questions, limits, response_format, background=background)
        )

    async def ask_again(
        self,
        context: ToolContext,
        run_id: RunId,
        questions: Questions,
        response_format: AnswerSchema = None,
        max_chunks: MaxChunks = None,
        max_tokens: MaxTokens = None,
        max_seconds: MaxSeconds = None,
        background: Background = False,
    ) -> Annotated[CallToolResult, Reading]:
        """Read the document of an earlier run again, with other questions.

        You do not have to pass the document again, and its file may have been moved or deleted.
        """
        document = (await asyncio.to_thread(self._log.get, run_id)).document
        limits = Limits(max_chunks, max_tokens, max_seconds)
        return await shield_work(
            self._read_all(context, document, questions, limits, response_format, background=background)
        )

    async def wait(
        self,
        context: ToolContext,
        run_id: RunId,
        seconds: Annotated[float, Field(gt=0, le=3600, description="The longest time to wait.")] = DEFAULT_WAIT_SECONDS,
    ) -> Annotated[CallToolResult, Reading]:
        """Wait for a running read: one in the background, or one whose call timed out.

        Returns the answer, or the progress if there is none after `seconds`. The read goes on; call this again to wait.
        """
        read = self.active_reads.find(run_id)
        if read is None:
            hint = "If it was interrupted, or the server was restarted, call resume_read to continue it."
            raise RunError(f"no read with this id is running here: {shorten_line(run_id)}", hint=hint)
        return await shield_work(self._await_result(context, read, seconds))

    async def cancel_read(self, run_id: RunId) -> Annotated[CallToolResult, Reading]:
        """Cancel a running read. Its progress is kept, and resume_read continues it."""
        read = self.active_reads.find(run_id)
        if read is None or read.outcome is not None:
            raise RunError(
                f"no read with this id is running here: {shorten_line(run_id)}",
                hint="There is nothing to cancel.",
            )
        await self.active_reads.cancel(read)
        return await _make_reading_result(read.document, None, [read])

    async def resume_read(
        self,
        context: ToolContext,
        run_id: RunId,
        max_chunks: MaxChunks = None,
        max_tokens: MaxTokens = None,
        max_seconds: MaxSeconds = None,
        background: Background = False,
    ) -> Annotated[CallToolResult, Reading]:
        """Continue a read that was cancelled or killed, that failed, or that stopped at a limit.

        If the read is running, this waits for it. If it is finished, this returns its answer again, at no cost.
        """
        async with self._resume_lock:  # calls at the same time wait for one read
            read = self.active_reads.find(run_id)
            if read is None or read.outcome is not None:
                read_limits = self.max_limits.tighten(Limits(max_chunks, max_tokens, max_seconds))
                read = ActiveRead(run_id, "", "the document")
                if self.reader.run_log is not None:
                    record = await asyncio.to_thread(self.reader.run_log.get, run_id)
                    read = ActiveRead(run_id, record.question, record.document["name"])
                self.active_reads.register(read)
                self.active_reads.start_in_background(
                    self.active_reads.run(read, self.reader.astream_resume(run_id, limits=read_limits), None)
                )
        return await shield_work(self._await_result(context, read, 0 if background else None))

    async def list_runs(
        self,
        limit: Annotated[int, Field(ge=1, le=200, description="The maximum number; the newest are returned.")] = 20,
        contains: Annotated[
            str, Field(description="Only runs with this text in the question or the document's name.")
        ] = "",
    ) -> Annotated[CallToolResult, RunListing]:
        """List earlier runs: run ids, documents, questions and answers, newest first."""
        listing = await asyncio.to_thread(self._list_newest_runs, limit, contains)
        return _make_result(listing, listing.to_text())

    async def show_run(self, run_id: RunId) -> Annotated[CallToolResult, RunReport]:
        """Show how a run got its answer: changes of the memory, supporting passages of the document, and lost notes.

        Use it to check an answer, or to see why there is none.
        """
        report, text = await asyncio.to_thread(self._make_run_report, run_id)
        return _make_result(report, text)

    async def _read_all(
        self,
        context: ToolContext,
        document: Document | DocumentRef,
        questions: list[str] | str,
        limits: Limits,
        schema: dict[str, Any] | None,
        *,
        background: bool,
    ) -> CallToolResult:
        """Read a document once for several questions. Equal questions share one read and its answer.

        Raises:
            MemAgentError: all reads failed; this is the first one's error. Any other error of a read is raised as soon
                as all reads have ended.
        """
        answer_format = None if schema is None else await asyncio.to_thread(ResponseFormat.of, schema)
        texts = check_questions(questions, with_response_format(await self.reader.aprepare(), answer_format))
        read_limits = self.max_limits.tighten(limits)
        reference = await store_document(document, self.reader.store)
        reads = {text: ActiveRead(new_run_id(), text, reference["name"]) for text in texts}
        progress = None if background else _Progress(context, reference["name"], len(reads))

        async def read_one(index: int, read: ActiveRead, barrier: Barrier) -> ReadResult:
            stream = self.reader.astream(
                reference,
                read.question,
                response_format=answer_format,
                run_id=read.run_id,
                limits=read_limits,
                barrier=barrier,
            )
            return await self.active_reads.run(read, stream, partial(progress.advance, index) if progress else None)

        for read in reads.values():
            self.active_reads.register(read)
        readers = [partial(read_one, index, read) for index, read in enumerate(reads.values())]
        outcomes = read_in_passes(readers, MAX_QUESTIONS)
        if background:
            self.active_reads.start_in_background(outcomes)
        else:
            failures = [outcome for outcome in await outcomes if isinstance(outcome, Exception)]
            unexpected_errors = [failure for failure in failures if not isinstance(failure, MemAgentError)]
            if unexpected_errors or len(failures) == len(reads):
                raise (unexpected_errors or failures)[0]
        return await _make_reading_result(reference["name"], reference["size"], [reads[text] for text in texts])

    async def _await_result(self, context: ToolContext, read: ActiveRead, seconds: float | None) -> CallToolResult:
        """Wait for a read, report its progress, and return its state after `seconds` (None: no limit) or at its end."""
        progress, last_update = _Progress(context, read.document, 1), None
        with anyio.move_on_after(seconds):
            while read.outcome is None:
                await read.change_event.wait()
                if read.update is not None and read.update is not last_update:
                    last_update = read.update
                    await progress.advance(0, last_update)
        if isinstance(read.outcome, Exception):
            raise read.outcome
        return await _make_reading_result(read.document, None, [read])

    async def _open_document(self, context: ToolContext, path: str, text: str) -> Document:
        if bool(path) == bool(text):
            raise RefusedSourceError(
                "both a path and a text were given" if path else "neither a path nor a text was given",
                hint="Pass exactly one of them.",
            )
        if path:
            allowed_roots = await self.roots.find_allowed(context)
            return await asyncio.to_thread(allowed_roots.find_document, path)
        self.roots.server_roots.require_text(text, "the text")
        # `Document.of` would reveal whether a file with this name exists.
        return Document.from_text(text)

    def _list_newest_runs(self, limit: int, contains: str) -> RunListing:
        """Return the newest runs with a text in the question or the document's name; letter case is ignored."""
        query = contains.casefold()
        runs = self._log.runs()
        matches = (run for run in runs if query in run.question.casefold() or query in run.document["name"].casefold())
        records = list(islice(matches, limit))
        totals = self._log.totals(record.run_id for record in records)
        summaries = [
            RunSummary.from_sources(
                record, totals[record.run_id], began=format_time(record.began), document=record.document["name"]
            )
            for record in records
        ]
        return RunListing(runs=summaries, runs_in_log=self._log.counts()[0])

    def _make_run_report(self, run_id: str) -> tuple[RunReport, str]:
        """Return a run as data and as text. Raises `RunNotFoundError`."""
        timeline = build_timeline(load_run_view(self._log, run_id, self.reader.store))
        return RunReport.from_timeline(timeline), format_run(timeline)


class _Progress:
    """Reports the progress of the reads of one request: their mean, from 0 to 1. It never decreases.

    Args:
        context: the request's context; nothing is reported to a client that did not ask for progress.
        name: the document's name.
        read_count: how many reads run in parallel.
    """

    def __init__(self, context: ToolContext, name: str, read_count: int) -> None:
        self._context, self._name = context, make_printable(name)
        self._fractions = [0.0] * read_count

    async def advance(self, index: int, update: MemoryUpdate) -> None:
        """Report one more update of a read."""
        self._fractions[index] = max(self._fractions[index], update.progress or 0.0)
        step = "findings merged" if update.chunk_number is None else f"chunk {update.chunk_number}"
        read_count = len(self._fractions)
        question = f" for question {index + 1} of {read_count}" if read_count > 1 else ""
        mean = sum(self._fractions) / read_count
        await self._context.report_progress(mean, 1.0, f"{self._name}: {step}{question}, {mean:.0%} read")


async def shield_work(work: Coroutine[Any, Any, T]) -> T:
    """Await work. A cancellation cancels the work once, waits until it has ended, and is then raised.

    The SDK cancels a request through a scope that cancels every later await too. Without this, the last entries of a
    run would not be written.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(task, return_exceptions=True)
        raise


async def _make_reading_result(document: str, document_bytes: int | None, reads: list[ActiveRead]) -> CallToolResult:
    answers = await asyncio.to_thread(lambda: [make_answer_data(read) for read in reads])
    text = await asyncio.to_thread(lambda: "\n\n".join(map(format_answer, reads)))
    return _make_result(Reading(document=document, document_bytes=document_bytes, answers=answers), text)


def _make_result(report: Reading | RunListing | RunReport, text: str) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structuredContent=report.model_dump(mode="json")
    )
