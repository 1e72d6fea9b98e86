"""The tools' results: typed, and the same as text for a model."""

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
"""How many quotes a result has: enough for a memory's lines, and not too many for the model's context."""
_LONGEST_QUOTE = 400
_CONTEXT = 80
"""Characters on each side of a quote."""
_LONGEST_IN_LIST = 120
_SURROGATES = re.compile("[\ud800-\udfff]")


class Report(BaseModel):
    """A tool's result, or a part of one; docstrings of attributes are in the schema that clients see."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _encodable(cls, value: Any) -> Any:
        """Half surrogate pairs, as in file names that are not UTF-8, become U+FFFD: the protocol does not allow
        them.
        """
        return _SURROGATES.sub("\ufffd", value) if isinstance(value, str) else value

    @classmethod
    def taken(cls, *sources: object, **given: Any) -> Self:
        """The report with the given values; other fields are those of the first source that has one of that name."""
        for name in cls.model_fields.keys() - given.keys():
            given[name] = next(getattr(source, name) for source in sources if hasattr(source, name))
        return cls(**given)


class Quote(Report):
    """Words of the document that support a line of the final memory."""

    line: str
    """The line of the final memory."""
    quote: str
    """The document's own words."""
    chunk: int
    """The chunk they are in, counted from 0."""
    start_char: int
    """Their first character, in the document."""
    end_char: int
    page: int | None
    """The page they begin on, counted from 1, where the document has pages."""
    section: str | None
    """The heading, numbered clause, page or source they are in, if the document has one."""
    context: str
    """The quote with the text around it in its chunk; empty if the document's text is no longer stored."""

    @classmethod
    def of(cls, evidence: Evidence, view: RunView) -> Quote:
        """From evidence, and the run that it belongs to."""
        quote = shortened(evidence.quote, _LONGEST_QUOTE)
        return cls.taken(evidence, quote=quote, chunk=evidence.chunk_index, context=_around(evidence, view))

    def in_words(self) -> str:
        """The quote and its place, in one line; a short quote with the text around it."""
        has_both = self.page is not None and self.section != f"page {self.page}"
        section = (f", page {self.page}" if has_both else "") + (f", {shortened(self.section)}" if self.section else "")
        context = f' in "{self.context}"' if self.context and len(self.quote) < _CONTEXT else ""
        return (
            f'"{self.quote}"{context} (chunk {self.chunk}, characters {self.start_char:,}-{self.end_char:,}{section})'
        )


class Answer(Report):
    """One question, and the result of reading the document for it."""

    question: str
    answer: str | None
    """None if the read failed, stopped at a limit, or ended without an answer. JSON if a form was asked for."""
    value: Any = None
    """The content of an answer in the form of `response_format`; None if it does not have that form."""
    stop_reason: str | None
    """"answered", "enough" (it was read in part), "no_answer", "invalid_answer" (not in the form asked for), or the
    limit it stopped at; None if it failed."""
    error: str | None
    """What went wrong and what to do, if the read failed."""
    memory: str
    """The notes on the document."""
    evidence: list[Quote]
    """The places in the document that the notes come from."""
    run_id: str | None
    """For ask_again, show_run, wait, resume_read and cancel_read."""
    is_reading: bool
    """Whether it is still running; wait returns its result."""
    progress: float | None
    """The share of the document that was read, 0 to 1, if it is still running and the document's length is known."""
    chunks_read: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    events: dict[str, int]
    """What happened that was not a plain success, and how often."""

    @classmethod
    def of(cls, result: ReadResult) -> Answer:
        """From a result. Evidence is looked up in the document's text, which may take a second."""
        return cls.taken(
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
        """For a question whose read failed while others did not."""
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
        """For a read that is still running."""
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

    def in_words(self) -> str:
        """Answer, evidence, and remarks on the read."""
        lines = [f"Question: {plain(self.question)}", f"Answer: {self._outcome()}"]
        if self.error is None and self.answer is None:
            lines.append(f"Noted so far: {plain(self.memory) or '(nothing)'}")
        if self.evidence:
            lines += ["Evidence:", *(f"- {each.in_words()}" for each in self.evidence)]
        if self.run_id is not None:
            lines.append(f"Run: {self.run_id} ({self.chunks_read:,} chunks, {self._tokens():,} tokens)")
        return "\n".join(lines)

    def _outcome(self) -> str:
        if self.error is not None:
            return f"none, the read failed: {plain(self.error)}"
        if self.answer is not None:
            invalid = self.stop_reason == StopReason.INVALID_ANSWER
            return plain(self.answer) + ("\n(It does not have the form that was asked for.)" if invalid else "")
        if self.is_reading:
            come = "" if self.progress is None else f", {self.progress:.0%} so far"
            return f"not yet, the document is still being read{come}; call wait with the run id"
        if self.stop_reason == StopReason.NO_ANSWER:
            return "none, though the document was read to its end"
        return (
            f"none, the read stopped at {self.stop_reason}; resume_read continues it, with a higher limit where the "
            "server allows one"
        )

    def _tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Reading(Report):
    """A document that was read, and its answers."""

    document: str
    """Its name."""
    document_bytes: int | None
    """The size of its text in UTF-8."""
    answers: list[Answer]
    """One for each question, in their order."""

    def in_words(self) -> str:
        """The answers, one after another."""
        return "\n\n".join(answer.in_words() for answer in self.answers)


class RunSummary(Report):
    """One run of the log."""

    run_id: str
    began: str
    """ISO 8601, with the zone of the server."""
    document: str
    """The document's name."""
    question: str
    answer: str | None
    stop_reason: str | None
    """How it ended; None while it runs, or where it was interrupted."""
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, record: RunRecord, totals: RunTotals) -> RunSummary:
        """From the log's entry."""
        return cls.taken(record, totals, began=moment(record.began), document=record.document["name"])

    def in_words(self) -> str:
        """The run in one line."""
        ended = self.stop_reason or "not ended"
        answer = "" if self.answer is None else f" -> {shortened(self.answer, _LONGEST_IN_LIST)}"
        return (
            f"{self.run_id}  {self.began}  {ended}  {shortened(self.document, _LONGEST_IN_LIST)}: "
            f"{shortened(self.question, _LONGEST_IN_LIST)}{answer}"
        )


class RunListing(Report):
    """Runs of the log, newest first."""

    runs: list[RunSummary]
    runs_in_log: int
    """How many the log has in total."""

    def in_words(self) -> str:
        """One line a run."""
        return "\n".join([*(run.in_words() for run in self.runs), f"{len(self.runs)} of {self.runs_in_log} runs"])


def quotes(evidence: Iterable[Evidence], view: RunView) -> list[Quote]:
    """The first quotes, at most `MOST_QUOTES`."""
    return [Quote.of(each, view) for each in islice(evidence, MOST_QUOTES)]


def _around(evidence: Evidence, view: RunView) -> str:
    update = view.updates[evidence.update]
    text = view.chunk_text(update) or ""
    start, end = evidence.start_char - update.start_char, evidence.end_char - update.start_char
    return shortened(text[max(0, start - _CONTEXT) : end + _CONTEXT], _LONGEST_QUOTE + 2 * _CONTEXT)


def shortened(text: str, longest: int = _LONGEST_IN_LIST) -> str:
    """A text in one line with a maximum number of characters, without control characters."""
    line = " ".join(plain(text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def moment(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
