"""The tools that a client's model calls. The model reads their docstrings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Annotated, Any, TypeVar

import anyio
from mcp.types import CallToolResult, TextContent
from pydantic import Field

from memagent_graph.concurrency.pace import Reach, in_passes
from memagent_graph.documents import Document, DocumentRef, DocumentStore
from memagent_graph.errors import MemAgentError, RefusedSourceError, RunError
from memagent_graph.plain_text import plain
from memagent_graph.reader import MemAgent
from memagent_graph.reading.graph import checked_questions
from memagent_graph.reading.state import Limits, new_run_id
from memagent_graph.reading.structured import structured
from memagent_graph.response_format import ResponseFormat
from memagent_graph.run_log import RunLog, RunRecord
from memagent_graph.timeline import RunView, build_timeline
from memagent_graph.timeline.run_views import view_of_run
from memagent_graph.trace import MemoryUpdate
from memagent_mcp.active_reads import PATIENCE, ActiveRead, ActiveReads
from memagent_mcp.client_roots import Roots, ToolContext
from memagent_mcp.run_report import RunReport, run_text
from memagent_mcp.tool_results import Answer, Reading, RunListing, RunSummary, shortened

MOST_QUESTIONS = 16
"""How many questions one call may ask: each has a memory, and an answer, of its own."""

Result = TypeVar("Result")
Questions = Annotated[
    Annotated[list[str], Field(min_length=1, max_length=MOST_QUESTIONS)] | str,
    Field(description=f"What to find out: one question, or up to {MOST_QUESTIONS}, each answered on its own."),
]
# Empty strings mean "not given": for an argument that may be a string or null the SDK parses a text that looks like
# JSON, so a document that is JSON would arrive as a dictionary.
PathArgument = Annotated[str, Field(description="The file to read, below the allowed roots. Give either path or text.")]
TextArgument = Annotated[str, Field(description="The text to read, instead of a file.")]
Pages = Annotated[str, Field(description="Of a PDF file, the pages to read: 5, 5-10, 12- or 1-3,7. All if left out.")]
AnswerSchema = Annotated[
    dict[str, Any] | None,
    Field(
        description="A JSON Schema: the answer is then JSON of that form, and `value` has it. For tables and fields."
    ),
]
RunId = Annotated[str, Field(description="A run's id, from read_document or list_runs.")]
MaxChunks = Annotated[int | None, Field(ge=1, description="Stop each question's read after this many chunks.")]
MaxTokens = Annotated[int | None, Field(ge=1, description="Stop it after this many tokens, input and output.")]
MaxSeconds = Annotated[float | None, Field(gt=0, description="Stop it after this many seconds.")]
Background = Annotated[bool, Field(description="Do not wait for the answer: return the run id at once, for wait.")]


class Tools:
    """What a client's model can do with one reader: read, follow, end and resume; with a log, ask again, list and show.

    Args:
        reader: reads.
        roots: which files may be read, and how long a text may be.
        ceilings: limits of each read that a call can only lower.
    """

    def __init__(self, reader: MemAgent, roots: Roots, *, ceilings: Limits) -> None:
        self._reader = reader
        self._roots = roots
        self._ceilings = ceilings
        self.active = ActiveReads()

    @property
    def offered(self) -> list[Callable[..., Any]]:
        """The tools that are possible with this reader."""
        tools: list[Callable[..., Any]] = [self.read_document, self.wait, self.cancel_read]
        if self._reader.keeps_checkpoints:
            tools.append(self.resume_read)
        if self._reader.run_log is not None:
            tools += [self.ask_again, self.list_runs, self.show_run]
        return tools

    @property
    def store(self) -> DocumentStore:
        """Where the documents' text is."""
        return self._reader.store

    @property
    def _log(self) -> RunLog:
        assert self._reader.run_log is not None  # noqa: S101  without one, no tool that needs it is offered
        return self._reader.run_log

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
        """Read a document of any length, from beginning to end, for a question, and answer from it.

        Use it for what does not fit your own context: books, logs, transcripts, long reports. Another language model
        reads the document chunk by chunk; you get the answer, quotes that support it with their places in the document,
        and a run id, with which ask_again asks the same document something else. A call costs a pass over the whole
        document, which its questions share, so ask precisely, and ask everything at once. For a document of more than a
        few hundred pages, read in the background, and call wait until the answer is there.
        """
        asked = [questions] if isinstance(questions, str) else questions
        form = None if response_format is None else ResponseFormat.of(response_format)
        document = (await self._document(context, path, text)).only(pages or None)
        limits = Limits(max_chunks, max_tokens, max_seconds)
        return await undisturbed(self._answers(context, document, asked, limits, form, background=background))

    async def ask_again(
        self,
        context: ToolContext,
        run_id: RunId,
        question: Annotated[str, Field(description="What to find out now.")],
        response_format: AnswerSchema = None,
        max_chunks: MaxChunks = None,
        max_tokens: MaxTokens = None,
        max_seconds: MaxSeconds = None,
        background: Background = False,
    ) -> Annotated[CallToolResult, Reading]:
        """Read the document of an earlier run again, with another question.

        The document does not have to be passed again, nor still be at its place. It costs another pass over the whole
        document.
        """
        form = None if response_format is None else ResponseFormat.of(response_format)
        record = await asyncio.to_thread(self.record, run_id)
        limits = Limits(max_chunks, max_tokens, max_seconds)
        answers = self._answers(context, record.document, [question], limits, form, background=background)
        return await undisturbed(answers)

    async def wait(
        self,
        context: ToolContext,
        run_id: RunId,
        seconds: Annotated[float, Field(gt=0, le=3600, description="The longest time to wait.")] = PATIENCE,
    ) -> Annotated[CallToolResult, Reading]:
        """Wait for a running read: one in the background, or one whose call was given up too early.

        Returns the answer, or the progress when the time is over; then call it again. The read continues meanwhile.
        """
        read = self.active.find(run_id)
        if read is None:
            raise RunError(
                f"no read with this id is running here: {shortened(run_id)}",
                hint="If it was interrupted, or the server was restarted since, resume_read continues it.",
            )
        return await undisturbed(self._awaited(context, read, seconds))

    async def cancel_read(self, run_id: RunId) -> Annotated[CallToolResult, Reading]:
        """End a running read. What it has read so far is kept, and resume_read continues it from there."""
        read = self.active.find(run_id)
        if read is None or not read.is_at_work:
            raise RunError(
                f"no read with this id is running here: {shortened(run_id)}", hint="There is nothing to cancel."
            )
        await self.active.cancel(read)
        answer = Answer.pending(read.run_id, read.question, read.update)
        cancelled = answer.model_copy(update={"is_reading": False, "error": "cancelled; resume_read continues it"})
        return _reading(read.document, None, [cancelled])

    async def resume_read(
        self,
        context: ToolContext,
        run_id: RunId,
        max_chunks: MaxChunks = None,
        max_tokens: MaxTokens = None,
        max_seconds: MaxSeconds = None,
        background: Background = False,
    ) -> Annotated[CallToolResult, Reading]:
        """Continue a read that was cancelled, killed, failed, or stopped at a limit, where it was.

        A running read is waited for, and a finished one returns its answer again; neither costs anything.
        """
        read = self.active.find(run_id)
        if read is None or not read.is_at_work:
            bounds = tightest(self._ceilings, Limits(max_chunks, max_tokens, max_seconds))
            read = await asyncio.to_thread(self._earlier, run_id)
            self.active.announce(read)
            self.active.begin(self.active.drive(read, self._reader.astream_resume(run_id, limits=bounds), None))
        return await undisturbed(self._awaited(context, read, 0 if background else None))

    async def list_runs(
        self,
        limit: Annotated[int, Field(ge=1, le=200, description="The maximum number; the newest are returned.")] = 20,
        contains: Annotated[
            str, Field(description="Only those with this text in the question or the document's name.")
        ] = "",
    ) -> Annotated[CallToolResult, RunListing]:
        """List earlier runs: run ids, documents, questions and answers, newest first."""
        listing = await asyncio.to_thread(self.listing, limit, contains)
        return _result(listing, listing.in_words())

    async def show_run(self, run_id: RunId) -> Annotated[CallToolResult, RunReport]:
        """Show how a run got its answer: where the memory changed, what in the document supports it, what was lost.

        Use it to check an answer, or to see why there is none.
        """
        report, words = await asyncio.to_thread(self.shown, run_id)
        return _result(report, words)

    async def _answers(
        self,
        context: ToolContext,
        document: Document | DocumentRef,
        questions: Sequence[str],
        limits: Limits,
        form: ResponseFormat | None,
        *,
        background: bool,
    ) -> CallToolResult:
        """Read a document once for several questions; equal ones are read for once, and share the answer.

        Raises:
            MemAgentError: all of them failed; this is the first one's error. Other errors are raised in the same way
                when all reads have ended.
        """
        store, prepared = self._reader.store, structured(await self._reader.aprepare(), form)
        bounds = tightest(self._ceilings, limits)
        if isinstance(document, Document):
            # Once, and not for each question.
            reference = await store.add_async(document, replace_undecodable=prepared.replace_undecodable)
        else:
            reference = document
        reads = [ActiveRead(new_run_id(), each, reference["name"]) for each in dict.fromkeys(questions)]
        progress = None if background else _Progress(context, reference["name"], len(reads))

        async def one(number: int, read: ActiveRead, pace: Reach) -> Answer:
            parts = self._reader.astream(
                reference, read.question, response_format=form, run_id=read.run_id, limits=bounds, pace=pace
            )
            return await self.active.drive(read, parts, partial(progress.advance, number) if progress else None)

        if background:
            checked_questions(questions, prepared)
        for read in reads:
            self.active.announce(read)
        passes = in_passes([partial(one, number, read) for number, read in enumerate(reads)], MOST_QUESTIONS)
        if background:
            self.active.begin(passes)
            outcomes: Sequence[Answer | Exception] = [read.answer() for read in reads]
        else:
            outcomes = await passes
        answers: dict[str, Answer] = {}
        failures: list[MemAgentError] = []
        for read, outcome in zip(reads, outcomes, strict=True):
            if isinstance(outcome, Answer):
                answers[read.question] = outcome
            elif isinstance(outcome, MemAgentError):
                answers[read.question] = Answer.failed(read.question, outcome)
                failures.append(outcome)
            else:
                raise outcome
        if len(failures) == len(answers):
            raise failures[0]
        size = await asyncio.to_thread(store.size, reference)
        return _reading(reference["name"], size, [answers[each] for each in questions])

    def _earlier(self, run_id: str) -> ActiveRead:
        """An earlier run to continue.

        Raises:
            RunNotFoundError: the log has no such run.
        """
        if self._reader.run_log is None:
            return ActiveRead(run_id, "", "the document")
        record = self.record(run_id)
        return ActiveRead(run_id, record.question, record.document["name"])

    async def _awaited(self, context: ToolContext, read: ActiveRead, seconds: float | None) -> CallToolResult:
        """Wait for a read for this many seconds (None for no limit) and return its state; its progress is reported."""
        progress, shown = _Progress(context, read.document, 1), None
        with anyio.move_on_after(seconds):
            while read.is_at_work:
                await read.next_change()
                if read.update is not None and read.update is not shown:
                    shown = read.update
                    await progress.advance(0, shown)
        return _reading(read.document, None, [read.answer()])

    async def _document(self, context: ToolContext, path: str, text: str) -> Document:
        if bool(path) == bool(text):
            raise RefusedSourceError(
                "both a path and a text were given" if path else "neither a path nor a text was given",
                hint="Give exactly one of the two.",
            )
        if path:
            allowed = await self._roots.for_request(context)
            return Document.from_path(await asyncio.to_thread(allowed.resolve, path))
        self._roots.own.require_text(text, "the text")
        # Not `Document.of`, which would reveal whether a file of that name exists.
        return Document.from_text(text)

    def record(self, run_id: str) -> RunRecord:
        """A run's entry in the log. Raises `RunNotFoundError`."""
        return self._log.get(run_id)

    def view(self, run_id: str) -> RunView:
        """A run with its updates. Raises `RunNotFoundError`."""
        return view_of_run(self._log, run_id, self._reader.store)

    def listing(self, limit: int, contains: str) -> RunListing:
        """The newest runs with a text in their question or document's name."""
        part = contains.casefold()
        every = self._log.runs()
        chosen = (run for run in every if part in run.question.casefold() or part in run.document["name"].casefold())
        records = list(islice(chosen, limit))
        totals = self._log.totals(record.run_id for record in records)
        runs = [RunSummary.of(record, totals[record.run_id]) for record in records]
        return RunListing(runs=runs, runs_in_log=self._log.counts()[0])

    def shown(self, run_id: str) -> tuple[RunReport, str]:
        """A run as data and as text. Raises `RunNotFoundError`."""
        timeline = build_timeline(self.view(run_id))
        return RunReport.of(timeline), run_text(timeline)


class _Progress:
    """The progress of the reads for one request, reported with every update. It never decreases.

    One share from 0 to 1 for all of them, with a total of 1; for a stream of unknown length, the bytes read, without a
    total.

    Args:
        context: the request's; a client that did not ask for progress gets none.
        name: the document's.
        reads: how many read it in parallel.
    """

    def __init__(self, context: ToolContext, name: str, reads: int) -> None:
        self._context = context
        self._name = plain(name)
        self._shares = [0.0] * reads
        self._bytes = [0] * reads

    async def advance(self, read: int, update: MemoryUpdate) -> None:
        """Report one more update of a read."""
        self._shares[read] = update.progress or 0.0
        self._bytes[read] = max(self._bytes[read], update.end_byte)
        done = "findings merged" if update.chunk_index is None else f"chunk {update.chunk_index}"
        which = f" for question {read + 1} of {len(self._bytes)}" if len(self._bytes) > 1 else ""
        if update.progress is None:
            come, total, read_so_far = float(sum(self._bytes)), None, f"{sum(self._bytes):,} bytes"
        else:
            come, total = sum(self._shares) / len(self._shares), 1.0
            read_so_far = f"{come:.0%}"
        await self._context.report_progress(come, total, f"{self._name}: {done}{which}, {read_so_far} read")


def tightest(ceilings: Limits, wishes: Limits) -> Limits:
    """The lower of each pair of limits."""
    lowest: dict[str, Any] = {}
    for each in fields(Limits):
        values = (getattr(ceilings, each.name), getattr(wishes, each.name))
        lowest[each.name] = min((value for value in values if value is not None), default=None)
    return Limits(**lowest)


async def undisturbed(work: Coroutine[Any, Any, Result]) -> Result:
    """Await work; a cancellation reaches it once, and continues after the work has been closed.

    The SDK cancels a request through a scope that also cancels every later wait, so a run's last entries would not be
    written.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(task, return_exceptions=True)
        raise


def _reading(document: str, size: int | None, answers: list[Answer]) -> CallToolResult:
    reading = Reading(document=document, document_bytes=size, answers=answers)
    return _result(reading, reading.in_words())


def _result(report: Reading | RunListing | RunReport, words: str) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text=words)], structuredContent=report.model_dump(mode="json")
    )
