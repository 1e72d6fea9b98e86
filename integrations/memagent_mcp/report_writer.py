"""The tool that writes a report over several files, behind the request that began it.

A report takes as long as all of its reads, so a call waits only for a while. The same call again waits on: the report
is found by what it is about, at work or finished, and with checkpoints also after the server was started again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import Annotated, Final

from mcp.types import CallToolResult, TextContent
from pydantic import Field

from memagent_graph.plain_text import plain
from memagent_graph.reader import MemAgent
from memagent_graph.reading.state import Limits
from memagent_graph.reports import Report as DocumentsReport
from memagent_graph.reports import areport
from memagent_graph.trace import MemoryUpdate
from memagent_mcp.active_reads import PATIENCE
from memagent_mcp.client_roots import Roots, ToolContext
from memagent_mcp.tool_results import Report

MOST_DOCUMENTS: Final = 64
MOST_REPORT_QUESTIONS: Final = 8
_REMEMBERED: Final = 16
"""Reports that have ended and are still known here; the oldest goes first."""


class ReportResult(Report):
    """A report, or how far it is."""

    is_writing: bool
    """Whether it is still at work; then the same call again waits for it."""
    report_id: str | None
    """None while it is at work."""
    markdown: str
    """The report; empty while it is at work."""
    documents_begun: int
    """Of how many documents at least one chunk was read, in this process."""
    sentences: int
    quoted: int
    """Sentences whose numbers, dates, names and quotations stand in their quotes, and these in their documents."""
    contradictions: int


class ReportWriter:
    """Writes reports with one reader.

    Args:
        reader: reads.
        roots: where files may lie.
        ceilings: limits of each read.
    """

    def __init__(self, reader: MemAgent, roots: Roots, *, ceilings: Limits) -> None:
        self._reader = reader
        self._roots = roots
        self._limits = None if ceilings == Limits() else ceilings
        self._reports: OrderedDict[tuple[object, ...], _Writing] = OrderedDict()

    async def write_report(
        self,
        context: ToolContext,
        question: Annotated[str, Field(description="What the report is about.")],
        paths: Annotated[
            list[str],
            Field(min_length=1, max_length=MOST_DOCUMENTS, description="The files, below the allowed roots."),
        ],
        questions: Annotated[
            list[str],
            Field(
                max_length=MOST_REPORT_QUESTIONS, description="What every file is asked; without any, they are made up."
            ),
        ] = [],  # noqa: B006  the SDK takes the default for the schema and never changes it
        seconds: Annotated[float, Field(gt=0, le=3600, description="Wait no longer than this.")] = PATIENCE,
    ) -> Annotated[CallToolResult, ReportResult]:
        """Write a report over several files: an answer with quotes from each, and sections bound to checked quotes.

        Every file is read from beginning to end with the same questions, however long it is. In the report, sentences
        whose numbers, dates or names are in no quote are marked, answers that contradict each other are listed, and
        quotes are given with their page or place. If the report is still at work when the call returns, make the same
        call again: it continues meanwhile. For one document, read_document is enough.
        """
        allowed = await self._roots.for_request(context)
        files = [await asyncio.to_thread(allowed.resolve, path) for path in paths]
        key = question, tuple(questions), tuple(files)
        writing = self._reports.get(key)
        if writing is None or writing.has_failed:
            writing = self._reports[key] = _Writing(self._reader, question, questions, files, self._limits)
            self._forget_oldest()
        await asyncio.wait([writing.task], timeout=seconds)
        result = writing.result()
        words = result.markdown or "The report is still being written; make the same call again to wait for it."
        return CallToolResult(
            content=[TextContent(type="text", text=plain(words))], structuredContent=result.model_dump(mode="json")
        )

    async def aclose(self) -> None:
        """End the reports that are at work; with checkpoints, the same call continues them later."""
        for writing in self._reports.values():
            writing.task.cancel()
        await asyncio.gather(*(writing.task for writing in self._reports.values()), return_exceptions=True)

    def _forget_oldest(self) -> None:
        ended = [key for key, writing in self._reports.items() if writing.task.done()]
        for key in ended[: max(0, len(self._reports) - _REMEMBERED)]:
            del self._reports[key]


class _Writing:
    """One report at work, or ended."""

    def __init__(
        self, reader: MemAgent, question: str, questions: list[str], files: list[Path], limits: Limits | None
    ) -> None:
        self._begun: set[str] = set()
        self.task: asyncio.Task[DocumentsReport] = asyncio.create_task(
            areport(reader, question, files, questions=questions, limits=limits, on_update=self._advance)
        )
        # An error that nobody waits for any longer is raised by the next call.
        self.task.add_done_callback(lambda task: None if task.cancelled() else task.exception())

    def _advance(self, document: str, question: str, update: MemoryUpdate) -> None:
        self._begun.add(document)

    @property
    def has_failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def result(self) -> ReportResult:
        """What came of it so far.

        Raises:
            MemAgentError: it failed.
        """
        report = self.task.result() if self.task.done() else None
        totals = report.totals if report else {}
        return ReportResult(
            is_writing=report is None,
            report_id=report.report_id if report else None,
            markdown=report.to_markdown() if report else "",
            documents_begun=len(self._begun),
            sentences=totals.get("sentences", 0),
            quoted=totals.get("quoted", 0),
            contradictions=totals.get("contradictions", 0),
        )
