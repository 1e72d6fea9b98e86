"""The results of the tools, as typed data and as text for a model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from itertools import islice
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, field_validator

from memagent_graph.errors import MemAgentError
from memagent_graph.events import StopReason, count_events
from memagent_graph.plain_text import plain
from memagent_graph.provenance.evidence import Evidence
from memagent_graph.results import ReadResult
from memagent_graph.run_log import RunRecord, RunTotals
from memagent_graph.timeline import RunView
from memagent_graph.trace import MemoryUpdate

MOST_QUOTES = 20
"""The maximum number of quotes in a result: enough for a memory's lines, and few enough for a model's context."""
_LONGEST_QUOTE = 400
_CONTEXT = 80
"""How many characters of context are shown on each side of a quote."""
_LONGEST_IN_LIST = 120
_SURROGATES = re.compile("[\ud800-\udfff]")


class ToolResult(BaseModel):
    """A tool's result, or a part of one. The docstrings of attributes are in the schema that clients see."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _encodable(cls, value: Any) -> Any:
        """Replace half surrogate pairs, as in file names that are not UTF-8, by U+FFFD.

        The protocol does not allow them.
        """
        return _SURROGATES.sub("\ufffd", value) if isinstance(value, str) else value

    @classmethod
    def from_sources(cls, *sources: object, **given: Any) -> Self:
        """Build a result; fields that are not given are copied from the first source that has such an attribute."""
        for name in cls.model_fields.keys() - given.keys():
            given[name] = next(getattr(source, name) for source in sources if hasattr(source, name))
        return cls(**given)


class Quote(ToolResult):
    """A passage of the document that supports a line of the final memory."""

    line: str
    """The line of the final memory that it supports."""
    quote: str
    """The words of the document."""
    chunk: int
    """The chunk that contains the quote, counted from 0."""
    start_char: int
    """The first character of the quote in the document, counted from 0."""
    end_char: int
    """The character after the last one of the quote."""
    page: int | None
    """The page on which the quote begins, counted from 1; None if the document has no pages."""
    section: str | None
    """The heading, numbered clause, page or source that contains the quote; None if there is none."""
    context: str
    """The quote with the surrounding text of its chunk; empty if the document's text is no longer stored."""

    @classmethod
    def of(cls, evidence: Evidence, view: RunView) -> Quote:
        """Build a quote from a run's evidence."""
        quote = shortened(evidence.quote, _LONGEST_QUOTE)
        return cls.from_sources(evidence, quote=quote, chunk=evidence.chunk_index, context=_around(evidence, view))

    def as_text(self) -> str:
        """Return the quote and its position in one line; a short quote with its context."""
        has_both = self.page is not None and self.section != f"page {self.page}"
        section = (f", page {self.page}" if has_both else "") + (f", {shortened(self.section)}" if self.section else "")
        context = f' in "{self.context}"' if self.context and len(self.quote) < _CONTEXT else ""
        return (
            f'"{self.quote}"{context} (chunk {self.chunk}, characters {self.start_char:,}-{self.end_char:,}{section})'
        )


class Answer(ToolResult):
    """The result of reading a document for one question."""

    question: str
    answer: str | None
    """The answer, as JSON if `response_format` was given. None if the read failed, was stopped, or found no answer."""
    value: Any = None
    """The parsed answer, if `response_format` was given; None if the answer does not match it."""
    stop_reason: str | None
    """"answered", "enough" (answered before the end), "no_answer", "invalid_answer" (does not match `response_format`),
    or the limit at which the read stopped. None if the read is running or failed."""
    error: str | None
    """If the read failed or was cancelled: what went wrong and what to do."""
    memory: str
    """The policy's notes on the document."""
    evidence: list[Quote]
    """The passages of the document that the notes come from."""
    run_id: str | None
    """The run's id, for ask_again, show_run, wait, resume_read and cancel_read."""
    is_reading: bool
    """Whether the read is still running; wait returns its result."""
    progress: float | None
    """While the read is running: the share of the document read so far, 0 to 1; None if its length is not known."""
    chunks_read: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    events: dict[str, int]
    """Events that a user should know about, and how often each occurred."""

    @classmethod
    def of(cls, result: ReadResult) -> Answer:
        """Build an answer from the result of a read. Looking up the evidence in the document may take a second."""
        return cls.from_sources(
            result,
            result.usage,
            value=result.json_value,
            stop_reason=result.stop_reason.value,
            error=None,
            is_reading=False,
            progress=None,
            evidence=quotes(result.evidence, result.view()),
            seconds=round(result.usage.seconds, 3),
            events={kind.value: count for kind, count in count_events(result.events).items()},
        )

    @classmethod
    def failed(cls, question: str, error: MemAgentError) -> Answer:
        """Build an answer for a question whose read failed."""
        return cls(
            question=question,
            answer=None,
            stop_reason=None,
            error=str(error),
            memory="",
            evidence=[],
            run_id=error.run_id,
            is_reading=False,
            progress=None,
            chunks_read=0,
            prompt_tokens=0,
            completion_tokens=0,
            seconds=0.0,
            events={},
        )

    @classmethod
    def pending(cls, run_id: str, question: str, update: MemoryUpdate | None) -> Answer:
        """Build an answer for a read that is still running."""
        return cls(
            question=question,
            answer=None,
            stop_reason=None,
            error=None,
            memory=update.memory if update else "",
            evidence=[],
            run_id=run_id,
            is_reading=True,
            progress=update.progress if update else 0.0,
            chunks_read=0 if update is None or update.chunk_index is None else update.chunk_index + 1,
            prompt_tokens=0,
            completion_tokens=0,
            seconds=0.0,
            events={},
        )

    def as_text(self) -> str:
        """Return the question, the answer, its evidence and the run as text."""
        lines = [f"Question: {plain(self.question)}", f"Answer: {self._outcome()}"]
        if self.error is None and self.answer is None:
            lines.append(f"Noted so far: {plain(self.memory) or '(nothing)'}")
        if self.evidence:
            lines += ["Evidence:", *(f"- {each.as_text()}" for each in self.evidence)]
        if self.run_id is not None:
            lines.append(f"Run: {self.run_id} ({self.chunks_read:,} chunks, {self._tokens():,} tokens)")
        return "\n".join(lines)

    def _outcome(self) -> str:
        if self.error is not None:
            return f"none, the read failed: {plain(self.error)}"
        if self.answer is not None:
            invalid = self.stop_reason == StopReason.INVALID_ANSWER
            return plain(self.answer) + ("\n(The answer does not match response_format.)" if invalid else "")
        if self.is_reading:
            share = "" if self.progress is None else f", {self.progress:.0%} so far"
            return f"not yet, the document is still being read{share}; call wait with the run id"
        if self.stop_reason == StopReason.NO_ANSWER:
            return "none, although the whole document was read"
        return (
            f"none, the read stopped at {self.stop_reason}; resume_read continues it, with a higher limit if the "
            "server allows it"
        )

    def _tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Reading(ToolResult):
    """A document, and the answers to the questions about it."""

    document: str
    """The document's name."""
    document_bytes: int | None
    """The size of its text in UTF-8; None if it is not known."""
    answers: list[Answer]
    """The answers, in the order of the questions."""

    def as_text(self) -> str:
        """Return the answers as text."""
        return "\n\n".join(answer.as_text() for answer in self.answers)


class RunSummary(ToolResult):
    """One run of the log."""

    run_id: str
    began: str
    """When it began: ISO 8601, in the server's time zone."""
    document: str
    """The document's name."""
    question: str
    answer: str | None
    stop_reason: str | None
    """How it ended; None if it is running or was interrupted."""
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, record: RunRecord, totals: RunTotals) -> RunSummary:
        """Build a summary from the run's entry in the log."""
        return cls.from_sources(record, totals, began=moment(record.began), document=record.document["name"])

    def as_text(self) -> str:
        """Return the run as one line of text."""
        ended = self.stop_reason or "not ended"
        answer = "" if self.answer is None else f" -> {shortened(self.answer, _LONGEST_IN_LIST)}"
        return (
            f"{self.run_id}  {self.began}  {ended}  {shortened(self.document, _LONGEST_IN_LIST)}: "
            f"{shortened(self.question, _LONGEST_IN_LIST)}{answer}"
        )


class RunListing(ToolResult):
    """Runs of the log, newest first."""

    runs: list[RunSummary]
    runs_in_log: int
    """How many runs the log has in total."""

    def as_text(self) -> str:
        """Return one line of text for each run."""
        return "\n".join([*(run.as_text() for run in self.runs), f"{len(self.runs)} of {self.runs_in_log} runs"])


def quotes(evidence: Iterable[Evidence], view: RunView) -> list[Quote]:
    """Return the first quotes, at most `MOST_QUOTES`."""
    return [Quote.of(each, view) for each in islice(evidence, MOST_QUOTES)]


def _around(evidence: Evidence, view: RunView) -> str:
    before, after = view.quote_context(evidence, _CONTEXT)
    return shortened(before + evidence.quote + after, _LONGEST_QUOTE + 2 * _CONTEXT)


def shortened(text: str, longest: int = _LONGEST_IN_LIST) -> str:
    """Return a text as one line of at most `longest` characters, without control characters."""
    line = " ".join(plain(text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def moment(seconds: float) -> str:
    """Convert seconds since 1970 to ISO 8601."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
