"""The results of the tools, as typed data and as text for a model."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, field_validator
from rich.console import Console

from memagent_graph.events import StopReason
from memagent_graph.plain_text import make_printable, remove_folders, replace_lone_surrogates
from memagent_graph.provenance.evidence import Evidence
from memagent_graph.results import ReadResult
from memagent_graph.timeline.model import Timeline
from memagent_graph.timeline.terminal import render_timeline
from memagent_graph.timeline.view import RunView
from memagent_graph.tokenizers.pieces import shorten_text
from memagent_mcp.active_reads import ActiveRead

MAX_QUOTES = 20
"""The maximum number of quotes in a result: enough for a memory's lines, and few enough for a model's context."""
_MAX_QUOTE_LENGTH = 400
_CONTEXT_LENGTH = 80
"""The number of characters of context on each side of a quote."""
_MAX_LINE_LENGTH = 120
_TEXT_WIDTH = 120
_MAX_RUN_TEXT_LENGTH = 20_000
"""The maximum number of characters of a run's text."""


class ToolResult(BaseModel):
    """A tool's result, or a part of one. The docstrings of attributes are in the schema that clients see."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _replace_surrogates_in_text(cls, value: Any) -> Any:
        return replace_surrogates(value) if isinstance(value, str) else value

    @classmethod
    def from_sources(cls, *sources: object, **values: Any) -> Self:
        """Build a result; a field without a value is copied from the first source that has an attribute of its name."""
        for name in cls.model_fields.keys() - values.keys():
            values[name] = next(getattr(source, name) for source in sources if hasattr(source, name))
        return cls(**values)


class Reading(ToolResult):
    """A document, and the answers to the questions about it."""

    document: str
    """The document's name."""
    document_bytes: int | None
    """The size of its text in UTF-8; None if it is not known."""
    answers: list[dict[str, Any]]
    """One for each question, in order. Every answer has: question, run_id (for ask_again, show_run, wait, resume_read
    and cancel_read), answer (null if there is none), stop_reason ("answered", "enough", "no_answer", "invalid_answer",
    or the limit at which the read stopped; null if it is running or failed), error (what went wrong and what to do),
    memory (the notes), evidence (quotes that support the answer, with their places), is_reading (then wait returns the
    result), progress (0 to 1) and chunks_read. One that ended also has extent (how much of the document was read),
    value (the parsed answer, if `response_format` was given), usage and events."""


def make_answer_data(read: ActiveRead) -> dict[str, Any]:
    """Return a read as JSON values. Looking up the evidence in the document may take a second."""
    outcome, update = read.outcome, read.update
    if isinstance(outcome, ReadResult):
        values = {**outcome.to_dict(), "extent": outcome.extent, "progress": None}
        values |= {"document": outcome.document["name"], "evidence": list_quotes(outcome.evidence, outcome.view())}
    else:
        values = {
            "question": read.question,
            "run_id": read.run_id,
            "answer": None,
            "stop_reason": None,
            "memory": update.memory if update else "",
            "evidence": [],
            "progress": update.progress if update else 0.0,
            "chunks_read": 0 if update is None else update.chunk_number or 0,
        }
    error = format_error(outcome) if isinstance(outcome, Exception) else None
    data: dict[str, Any] = replace_surrogates({**values, "error": error, "is_reading": outcome is None})
    return data


def format_answer(read: ActiveRead) -> str:
    """Return the question, the answer, its evidence and the run as text."""
    outcome = read.outcome
    lines = [f"Question: {make_printable(read.question)}"]
    if outcome is None:
        progress = f", {read.update.progress:.0%} so far" if read.update and read.update.progress is not None else ""
        lines.append(f"Answer: not yet, the document is still being read{progress}; call wait with the run id")
        lines.append(f"Noted so far: {make_printable(read.update.memory if read.update else '') or '(nothing)'}")
    elif isinstance(outcome, Exception):
        lines.append(f"Answer: none, the read failed: {format_error(outcome)}")
    else:
        lines += [f"Answer: {_format_answer_line(outcome)}", outcome.extent]
        if outcome.answer is None:
            lines.append(f"Noted so far: {make_printable(outcome.memory) or '(nothing)'}")
        if outcome.evidence:
            lines += [
                "Evidence:",
                *(f"- {format_quote(quote)}" for quote in list_quotes(outcome.evidence, outcome.view())),
            ]
    lines.append(f"Run: {read.run_id}")
    if isinstance(outcome, ReadResult):
        lines[-1] += f" ({outcome.chunks_read:,} chunks, {outcome.usage.total_tokens:,} tokens)"
    return "\n".join(lines)


def _format_answer_line(result: ReadResult) -> str:
    if result.answer is not None:
        is_invalid = result.stop_reason is StopReason.INVALID_ANSWER
        return make_printable(result.answer) + ("\n(The answer does not match response_format.)" if is_invalid else "")
    if result.stop_reason.resumable:
        return "none yet; resume_read continues the read, with a higher limit if the server allows it"
    return "none was written"


def list_quotes(evidence: Iterable[Evidence], view: RunView) -> list[dict[str, Any]]:
    """Return the first quotes as JSON values, each with its location and the surrounding text, without file paths."""
    rows = []
    for quote in islice(evidence, MAX_QUOTES):
        text_before, text_after = view.get_quote_context(quote, _CONTEXT_LENGTH)
        context = shorten_line(text_before + quote.quote + text_after, _MAX_QUOTE_LENGTH + 2 * _CONTEXT_LENGTH)
        row = {
            **asdict(quote),
            "quote": shorten_line(quote.quote, _MAX_QUOTE_LENGTH),
            "context": context,
            "place": quote.place,
        }
        rows.append({name: value for name, value in row.items() if name != "link"})
    return rows


def format_quote(quote: Mapping[str, Any]) -> str:
    """Format a quote of `list_quotes` as one line; a short quote with the surrounding text."""
    is_short = len(quote["quote"]) < _CONTEXT_LENGTH and quote["context"] != quote["quote"]
    context = f' in "{quote["context"]}"' if is_short else ""
    place_suffix = f", {shorten_line(quote['place'])}" if quote["place"] else ""
    character_range = f"{quote['start_char']:,}-{quote['end_char']:,}"
    return f'"{quote["quote"]}"{context} (chunk {quote["chunk_index"] + 1}, characters {character_range}{place_suffix})'


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

    def to_text(self) -> str:
        """Return the run as one line of text."""
        outcome = self.stop_reason or "not ended"
        answer = "" if self.answer is None else f" -> {shorten_line(self.answer)}"
        return (
            f"{self.run_id}  {self.began}  {outcome}  {shorten_line(self.document)}: "
            f"{shorten_line(self.question)}{answer}"
        )


class RunListing(ToolResult):
    """Runs of the log, newest first."""

    runs: list[RunSummary]
    runs_in_log: int
    """How many runs the log has in total."""

    def to_text(self) -> str:
        """Return one line of text for each run."""
        return "\n".join([*(run.to_text() for run in self.runs), f"{len(self.runs)} of {self.runs_in_log} runs"])


class RunReport(ToolResult):
    """One run: its question, its answer, and how its memory was built."""

    run_id: str
    question: str
    document: str
    """The document's name."""
    model: str
    began: str | None
    stop_reason: str | None
    """How it ended; None if it is running or was interrupted."""
    answer: str | None
    memory: str
    """The final memory."""
    evidence: list[dict[str, Any]]
    """The passages of the document that support the answer, each with its place."""
    chunks: int
    changes: int
    """How many chunks changed the memory."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float

    @classmethod
    def from_timeline(cls, timeline: Timeline) -> RunReport:
        """Build the report of a run from its timeline."""
        view = timeline.view
        return cls.from_sources(
            view,
            timeline,
            document=view.document["name"],
            began=None if view.began is None else format_time(view.began),
            memory=view.trace.final_memory,
            evidence=replace_surrogates(list_quotes(view.evidence, view)),
            seconds=round(timeline.seconds, 3),
        )


def format_run(timeline: Timeline) -> str:
    """Return a run as `memagent show` prints it. Of a very long text, only the beginning and the end are returned."""
    output = io.StringIO()
    Console(file=output, width=_TEXT_WIDTH, color_system=None).print(render_timeline(timeline))
    lines = (line.rstrip() for line in output.getvalue().splitlines())
    return shorten_text("\n".join(lines), _MAX_RUN_TEXT_LENGTH, len)


def format_error(error: BaseException) -> str:
    """Return an error's message for a client, without folders of this machine."""
    return make_printable(remove_folders(str(error)))


def replace_surrogates(value: Any) -> Any:
    """Replace lone surrogates in JSON values with U+FFFD, because the protocol does not allow them.

    File names that are not UTF-8 contain lone surrogates.
    """
    return json.loads(replace_lone_surrogates(json.dumps(value, ensure_ascii=False)))


def shorten_line(text: str, max_length: int = _MAX_LINE_LENGTH) -> str:
    """Return a text as one line of at most `max_length` characters, without control characters."""
    line = " ".join(make_printable(text).split())
    return line if len(line) <= max_length else line[: max_length - 1] + "…"


def format_time(seconds: float) -> str:
    """Convert seconds since 1970 to ISO 8601."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
