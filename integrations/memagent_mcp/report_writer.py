"""The tool `write_report`. A report continues when the request that started it has ended.

A report takes as long as all of its reads together, so a call waits only for a limited time. The same call finds the
running or finished report again. With checkpoints, it also does so after a restart of the server.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Annotated, Final

from mcp.types import CallToolResult, TextContent
from pydantic import Field

from memagent_graph.documents import Document
from memagent_graph.plain_text import plain
from memagent_graph.reader import MemAgent
from memagent_graph.reading.state import Limits
from memagent_graph.trace import MemoryUpdate
from memagent_mcp.active_reads import DEFAULT_WAIT_SECONDS
from memagent_mcp.client_roots import Roots, ToolContext
from memagent_mcp.tool_results import ToolResult
from memagent_report import Report, areport

MOST_DOCUMENTS: Final = 64
MOST_REPORT_QUESTIONS: Final = 8
_REMEMBERED: Final = 16
"""How many ended reports are kept; the oldest are dropped first."""


class ReportResult(ToolResult):
    """A report, or the progress of one."""

    is_writing: bool
    """Whether the report is still being written; then make the same call again to wait for it."""
    report_id: str | None
    """The report's id; None while it is being written."""
    markdown: str
    """The report in Markdown; empty while it is being written."""
    documents_begun: int
    """How many documents this process has begun to read."""
    sentences: int
    """How many sentences the report has."""
    quoted: int
    """How many of them are quoted: their numbers, dates, names and quotations are in quotes from the documents."""


class ReportWriter:
    """Writes reports with one reader.

    Args:
        reader: the reader.
        roots: decides which files may be read.
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
        question: Annotated[str, Field(description="The question of the report.")],
        paths: Annotated[
            list[str],
            Field(min_length=1, max_length=MOST_DOCUMENTS, description="The files, below the allowed roots."),
        ],
        questions: Annotated[
            list[str],
            Field(
                max_length=MOST_REPORT_QUESTIONS,
                description="The questions for every file. If there are none, the policy writes some.",
            ),
        ] = [],  # noqa: B006  the SDK only copies the default into the schema
        seconds: Annotated[float, Field(gt=0, le=3600, description="The longest time to wait.")] = DEFAULT_WAIT_SECONDS,
    ) -> Annotated[CallToolResult, ReportResult]:
        """Write a report over several files: answers with quotes from each file, and sections that cite checked quotes.

        Every file is read for the same questions, however long it is. The report marks sentences whose numbers, dates
        or names are in no quote, and gives each quote with its page or position. If the report is not finished when the
        call returns, make the same call again; the work continues in between. For a single document, use read_document.
        """
        allowed = await self._roots.for_request(context)
        files = [await asyncio.to_thread(allowed.document, path) for path in paths]
        key = question, tuple(questions), tuple(files)
        writing = self._reports.get(key)
        if writing is None or writing.has_failed:
            writing = self._reports[key] = _Writing(self._reader, question, questions, files, self._limits)
            self._forget_oldest()
        await asyncio.wait([writing.task], timeout=seconds)
        result = writing.result()
        text = result.markdown or "The report is still being written; make the same call again to wait for it."
        return CallToolResult(
            content=[TextContent(type="text", text=plain(text))], structuredContent=result.model_dump(mode="json")
        )

    async def aclose(self) -> None:
        """Stop all reports that are being written; with checkpoints, the same call continues them later."""
        for writing in self._reports.values():
            writing.task.cancel()
        await asyncio.gather(*(writing.task for writing in self._reports.values()), return_exceptions=True)

    def _forget_oldest(self) -> None:
        ended = [key for key, writing in self._reports.items() if writing.task.done()]
        for key in ended[: max(0, len(self._reports) - _REMEMBERED)]:
            del self._reports[key]


class _Writing:
    """One report that is being written, or has ended."""

    def __init__(
        self, reader: MemAgent, question: str, questions: list[str], files: list[Document], limits: Limits | None
    ) -> None:
        self._begun: set[str] = set()
        self.task: asyncio.Task[Report] = asyncio.create_task(
            areport(reader, question, files, questions=questions, limits=limits, on_update=self._advance)
        )
        # Mark the exception as retrieved; `result` raises it in the next call.
        self.task.add_done_callback(lambda task: None if task.cancelled() else task.exception())

    def _advance(self, document: str, question: str, update: MemoryUpdate) -> None:
        self._begun.add(document)

    @property
    def has_failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def result(self) -> ReportResult:
        """Return the report, or its progress so far.

        Raises:
            MemAgentError: the report failed.
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
        )
