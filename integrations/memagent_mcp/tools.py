"""The tools that a client's model calls. Their docstrings are what that model reads."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Annotated, Any, TypeVar

import anyio
from mcp.types import CallToolResult, TextContent
from pydantic import Field

from memagent_graph.concurrency.pace import Reach, in_passes
from memagent_graph.documents import Document, DocumentRef
from memagent_graph.errors import MemAgentError, RefusedSourceError, RunError
from memagent_graph.plain_text import plain
from memagent_graph.reader import MemAgent
from memagent_graph.reading.state import Limits
from memagent_graph.results import ReadResult
from memagent_graph.run_log import RunLog
from memagent_graph.timeline import build_timeline
from memagent_graph.timeline.run_views import view_of_run
from memagent_graph.trace import MemoryUpdate
from memagent_mcp.client_roots import Roots, ToolContext
from memagent_mcp.run_report import RunReport, run_text
from memagent_mcp.tool_results import Answer, Reading, RunListing, RunSummary

MOST_QUESTIONS = 16
"""How many questions one call may ask: each has a memory, and an answer, of its own."""

Result = TypeVar("Result")
Questions = Annotated[
    Annotated[list[str], Field(min_length=1, max_length=MOST_QUESTIONS)] | str,
    Field(description=f"What to find out: one question, or up to {MOST_QUESTIONS}, each answered on its own."),
]
# Empty strings stand for "not given": the SDK takes an argument that may be a string or null for JSON where it looks
# like JSON, and a document that is JSON would arrive as a dictionary.
PathArgument = Annotated[str, Field(description="The file to read, below the allowed roots. Give either path or text.")]
TextArgument = Annotated[str, Field(description="The text to read, instead of a file.")]
RunId = Annotated[str, Field(description="A run's id, as read_document and list_runs give it.")]
MaxChunks = Annotated[int | None, Field(ge=1, description="Stop each question's read after so many chunks.")]
MaxTokens = Annotated[int | None, Field(ge=1, description="Stop it after so many tokens, in and out.")]
MaxSeconds = Annotated[float | None, Field(gt=0, description="Stop it after so many seconds.")]


class Tools:
    """`read_document` on one reader, and `ask_again`, `list_runs` and `show_run` on its log of runs, if it has one.

    Args:
        reader: reads.
        roots: where files may lie, and how long a text may be.
        ceilings: limits of each read that a call can only lower.
    """

    def __init__(self, reader: MemAgent, roots: Roots, *, ceilings: Limits) -> None:
        self._reader = reader
        self._roots = roots
        self._ceilings = ceilings

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
        max_chunks: MaxChunks = None,
        max_tokens: MaxTokens = None,
        max_seconds: MaxSeconds = None,
    ) -> Annotated[CallToolResult, Reading]:
        """Read a document of any length, from beginning to end, with a question in mind, and answer from it.

        Use it for what does not fit your own context: books, logs, transcripts, long reports. The document is read
        chunk by chunk by a language model of its own; you get the answer, quotes that support it with their places in
        the document, and a run id with which ask_again asks the same document something else. A call costs a
        pass over the whole document, which its questions share, so ask precisely, and everything at once.
        """
        asked = [questions] if isinstance(questions, str) else questions
        document = await self._document(context, path, text)
        return await undisturbed(self._answers(context, document, asked, Limits(max_chunks, max_tokens, max_seconds)))

    async def ask_again(
        self,
        context: ToolContext,
        run_id: RunId,
        question: Annotated[str, Field(description="What to find out now.")],
        max_chunks: MaxChunks = None,
        max_tokens: MaxTokens = None,
        max_seconds: MaxSeconds = None,
    ) -> Annotated[CallToolResult, Reading]:
        """Read the document of an earlier run again, with another question.

        The document need not be passed again, nor be where it was. It costs another pass over the whole document.
        """
        record = await asyncio.to_thread(self._log.get, run_id)
        limits = Limits(max_chunks, max_tokens, max_seconds)
        return await undisturbed(self._answers(context, record.document, [question], limits))

    async def list_runs(
        self,
        limit: Annotated[int, Field(ge=1, le=200, description="At most so many, the newest.")] = 20,
        contains: Annotated[str, Field(description="Only those with this in question or document name.")] = "",
    ) -> Annotated[CallToolResult, RunListing]:
        """List what was read before: run ids, documents, questions and answers, newest first."""
        listing = await asyncio.to_thread(self._listing, limit, contains)
        return _result(listing, listing.in_words())

    async def show_run(self, run_id: RunId) -> Annotated[CallToolResult, RunReport]:
        """Show how a run came to its answer: where the memory changed, what in the document supports it, what was lost.

        Use it to check an answer, or to see why there is none.
        """
        report, words = await asyncio.to_thread(self._shown, run_id)
        return _result(report, words)

    async def _answers(
        self, context: ToolContext, document: Document | DocumentRef, questions: Sequence[str], limits: Limits
    ) -> CallToolResult:
        """Read a document once for several questions; of equal ones, the first is read for, and all have its answer.

        Raises:
            MemAgentError: every one of them failed; this is the first one's error. Others are raised likewise once all
                reads have ended.
        """
        store, prepared = self._reader.store, await self._reader.aprepare()
        bounds = tightest(self._ceilings, limits)
        if isinstance(document, Document):
            # Once, and not by each question's read.
            reference = await store.add_async(document, replace_undecodable=prepared.replace_undecodable)
        else:
            reference = document
        different = list(dict.fromkeys(questions))
        progress = _Progress(context, reference["name"], len(different))

        async def one(index: int, question: str, pace: Reach) -> Answer:
            try:
                async with aclosing(self._reader.astream(reference, question, limits=bounds, pace=pace)) as parts:
                    async for part in parts:
                        if isinstance(part, ReadResult):
                            return await asyncio.to_thread(Answer.of, part)
                        await progress.advance(index, part)
            except (sqlite3.Error, OSError) as error:
                raise RunError(
                    f"the read ended with {type(error).__name__}: {error}",
                    hint="See that the server's disk has room and its checkpoints and documents are whole; ask again.",
                ) from error
            raise AssertionError("a stream ends with its result")

        reads = [partial(one, index, question) for index, question in enumerate(different)]
        answers: dict[str, Answer] = {}
        failures: list[MemAgentError] = []
        for question, outcome in zip(different, await in_passes(reads, MOST_QUESTIONS), strict=True):
            if isinstance(outcome, Answer):
                answers[question] = outcome
            elif isinstance(outcome, MemAgentError):
                answers[question] = Answer.failed(question, outcome)
                failures.append(outcome)
            else:
                raise outcome
        if len(failures) == len(answers):
            raise failures[0]
        size = await asyncio.to_thread(store.size, reference)
        reading = Reading(
            document=reference["name"], document_bytes=size, answers=[answers[each] for each in questions]
        )
        return _result(reading, reading.in_words())

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
        # Not `Document.of`, which would tell whether a file of that name exists.
        return Document.from_text(text)

    def _listing(self, limit: int, contains: str) -> RunListing:
        part = contains.casefold()
        every = self._log.runs()
        chosen = (run for run in every if part in run.question.casefold() or part in run.document["name"].casefold())
        records = list(islice(chosen, limit))
        totals = self._log.totals(record.run_id for record in records)
        runs = [RunSummary.of(record, totals[record.run_id]) for record in records]
        return RunListing(runs=runs, runs_in_log=self._log.counts()[0])

    def _shown(self, run_id: str) -> tuple[RunReport, str]:
        timeline = build_timeline(view_of_run(self._log, run_id, self._reader.store))
        return RunReport.of(timeline), run_text(timeline)


class _Progress:
    """How far the reads that answer one request have come, reported with every update. It never falls.

    One share from 0 to 1 for all of them, of a total of 1; for a stream whose end is not known, the bytes read, of no
    known total.

    Args:
        context: of the request; a client that asked for no progress gets none.
        name: the document's.
        reads: how many read it side by side.
    """

    def __init__(self, context: ToolContext, name: str, reads: int) -> None:
        self._context = context
        self._name = plain(name)
        self._shares = [0.0] * reads
        self._bytes = [0] * reads

    async def advance(self, read: int, update: MemoryUpdate) -> None:
        """A read has come one update further."""
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
    """Await work that a cancellation reaches once, and see it closed before the cancellation goes on.

    The SDK cancels a request through a scope that cancels every further wait, too, and so would cut off the writing of
    a run's last entries.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(task, return_exceptions=True)
        raise


def _result(report: Reading | RunListing | RunReport, words: str) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text=words)], structuredContent=report.model_dump(mode="json")
    )
