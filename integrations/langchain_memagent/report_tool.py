"""`WriteReport`: a tool with which an agent has a report written over several documents.

    agent = create_agent(model, tools=[WriteReport(agent=MemAgent(..., checkpoints="c.sqlite"), roots=["cases"])])

The model gets the report in Markdown; the program around it gets all of it in the tool message's artifact. With
checkpoints, the same call after a failure continues the report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from langchain_core.tools import BaseTool, ToolException
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SkipValidation

from memagent_graph import MemAgent
from memagent_graph.concurrency.background import run_sync
from memagent_graph.documents.allowed_paths import AllowedRoots
from memagent_graph.errors import MemAgentError
from memagent_graph.reading.state import Limits
from memagent_report import areport

_DESCRIPTION = (
    "Write a report over several documents of any length. Every document is read with the same questions; the reader "
    "is shown {shows}. The report has an answer with quotes from each, and sections whose sentences are bound to "
    "quotes that are checked. Sentences that no quote supports are marked. Use it for one question over several "
    "documents."
)


class _ReportArguments(BaseModel):
    question: str = Field(min_length=1, description="What the report is about.")
    paths: list[str] = Field(min_length=1, max_length=64, description="The documents' paths.")
    questions: list[str] = Field(
        default_factory=list, max_length=8, description="What every document is asked. Without any, they are made up."
    )


class WriteReport(BaseTool):
    """Writes a report over documents with a `MemAgent`; see `memagent_report`.

    Errors come back as tool messages with status "error", never as exceptions.

    Args:
        agent: the reader.
        roots: folders, or single files, below which the model may name paths, links followed.
        max_bytes: the largest document.
        limits: where the read of one question on one document stops early.
        extractive: show the answers as they are, even if the policy could write sections.
        judge: let the policy judge whether answers that differ contradict each other.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = "write_report"
    description: str = ""
    args_schema: Any = _ReportArguments
    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"
    handle_tool_error: Any = True

    agent: SkipValidation[MemAgent] = Field(exclude=True, repr=False)
    roots: Sequence[Path | str] = ()
    max_bytes: int = Field(default=256 * 2**20, gt=0)
    limits: SkipValidation[Limits] | None = None
    extractive: bool = False
    judge: bool = False

    _allowed: AllowedRoots = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Set the description and the allowed roots."""
        super().model_post_init(context)
        self.description = self.description or _DESCRIPTION.format(shows=self.agent.strategy.shows)
        self._allowed = AllowedRoots(self.roots, max_bytes=self.max_bytes)

    def _run(self, question: str, paths: list[str], questions: list[str] | None = None) -> tuple[str, dict[str, Any]]:
        return run_sync(self._arun(question, paths, questions))

    async def _arun(
        self, question: str, paths: list[str], questions: list[str] | None = None
    ) -> tuple[str, dict[str, Any]]:
        try:
            files = [await asyncio.to_thread(self._allowed.document, path) for path in paths]
            report = await areport(
                self.agent,
                question,
                files,
                questions=questions or (),
                extractive=self.extractive,
                judge=self.judge,
                limits=self.limits,
            )
        except MemAgentError as error:
            raise ToolException(str(error)) from error
        return report.to_markdown(), report.to_dict()
