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

from memagent_graph.plain_text import plain
from memagent_graph.reader import MemAgent
from memagent_graph.reading.state import Limits
from memagent_mcp.active_reads import DEFAULT_WAIT_SECONDS
from memagent_mcp.client_roots import Roots, ToolContext
from memagent_mcp.tool_results import ToolResult
from memagent_report import Report, areport

MAX_DOCUMENTS: Final = 64
MAX_QUESTIONS: Final = 8
_MAX_REPORTS: Final = 16
"""How many reports are kept; of those that have ended, the oldest are dropped first."""


class ReportResult(ToolResult):
    """A report, or that it is being written."""

    is_writing: bool
    """Whether the report is still being written; then make the same call again to wait for it."""
    report_id: str | None
    """The report's id; None while it is being written."""
    markdown: str
    """The report in Markdown; empty while it is being written."""
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
        self._tasks: OrderedDict[tuple[object, ...], asyncio.Task[Report]] = OrderedDict()
        """The reports that are being written, or have ended, by the arguments of their calls."""

    async def write_report(
        self,
        context: ToolContext,
        question: Annotated[str, Field(description="The question of the report.")],
        paths: Annotated[
            list[str],
            Field(min_length=1, max_length=MAX_DOCUMENTS, description="The files, below the allowed roots."),
        ],
        questions: Annotated[
            list[str],
            Field(
                max_length=MAX_QUESTIONS,
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
        task = self._tasks.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._tasks[key] = asyncio.create_task(
                areport(self._reader, question, files, questions=questions, limits=self._limits)
            )
            # Mark the exception as retrieved; the next call raises it.
            task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
            self._drop_oldest()
        await asyncio.wait([task], timeout=seconds)
        report = task.result() if task.done() else None
        totals = report.totals if report else {}
        result = ReportResult(
            is_writing=report is None,
            report_id=report.report_id if report else None,
            markdown=report.to_markdown() if report else "",
            sentences=totals.get("sentences", 0),
            quoted=totals.get("quoted", 0),
        )
        text = result.markdown or "The report is still being written; make the same call again to wait for it."
        return CallToolResult(
            content=[TextContent(type="text", text=plain(text))], structuredContent=result.model_dump(mode="json")
        )

    async def aclose(self) -> None:
        """Stop all reports that are being written; with checkpoints, the same call continues them later."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _drop_oldest(self) -> None:
        ended = [key for key, task in self._tasks.items() if task.done()]
        for key in ended[: max(0, len(self._tasks) - _MAX_REPORTS)]:
            del self._tasks[key]
