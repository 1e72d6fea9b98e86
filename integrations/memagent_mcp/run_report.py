"""The result of `show_run`: one run as typed data, and as plain text that is short enough for a model's context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memagent_graph.plain_text import counted, plain
from memagent_graph.provenance.word_diff import DiffOp
from memagent_graph.timeline import Timeline
from memagent_graph.timeline.model import Step
from memagent_mcp.tool_results import MOST_QUOTES, ToolResult, encodable, moment, quote_text, quotes, shortened

_MOST_STEPS = 24
_MOST_LOST = 8


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
    """The passages of the document that the lines of the memory come from, each with its place."""
    chunks: int
    changes: int
    """How many chunks changed the memory."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float

    @classmethod
    def of(cls, timeline: Timeline) -> RunReport:
        """Build the report of a run from its timeline."""
        view, totals = timeline.view, timeline.totals
        return cls.from_sources(
            view,
            totals,
            document=view.document["name"],
            began=None if view.began is None else moment(view.began),
            memory=timeline.memory,
            evidence=encodable(quotes(timeline.provenance.evidence, view)),
            seconds=round(totals.seconds, 3),
        )


def run_text(timeline: Timeline) -> str:
    """Return the run as text: question, answer and quotes, changes of the memory and their sources, lost lines."""
    parts = [_head(timeline), _changes(timeline), _excerpt(timeline), _memory(timeline), _lost(timeline)]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _head(timeline: Timeline) -> Iterator[str]:
    view, totals = timeline.view, timeline.totals
    yield f"Run: {view.run_id}" + ("" if view.began is None else f", {moment(view.began)}")
    yield f"Document: {shortened(view.document['name'])}"
    yield f"Question: {plain(view.question)}"
    yield f"Answer: {'none' if view.answer is None else plain(view.answer)}"
    yield f"Ended: {view.stop_reason or 'not yet; it is running or was interrupted'}"
    yield f"Model: {shortened(view.model)}"
    read = f"Read: {counted(totals.chunks, 'chunk')}, {totals.changes:,} changed the memory"
    if timeline.excerpt is not None:
        read = f"Shown: {view.trace.tokens_shown:,} tokens of the document"
    yield f"{read}; {totals.prompt_tokens:,} tokens in, {totals.completion_tokens:,} out; {totals.seconds:.1f} s"
    if totals.events:
        yield "Events: " + ", ".join(f"{kind.value} {count}" for kind, count in totals.events.items())


def _changes(timeline: Timeline) -> Iterator[str]:
    steps = [step for step in timeline.steps if step.notable]
    if not steps:
        return
    shown = sorted(steps, key=lambda step: -step.density)[:_MOST_STEPS]
    yield "Where memory changed:"
    yield from (f"- {_step(step)}" for step in steps if step in shown)
    if len(steps) > len(shown):
        yield f"- and {len(steps) - len(shown):,} chunks with smaller changes"


def _step(step: Step) -> str:
    update = step.update
    read = "" if update.chunk_index is None else f", characters {update.start_char:,}-{update.end_char:,}"
    text = f"{plain(step.name)}{read}: "
    text += f"+{step.inserted_words} -{step.deleted_words} words" if step.changed else "unchanged"
    if inserted := shortened(" … ".join(part.text for part in step.diff if part.op is DiffOp.INSERT)):
        text += f', new: "{inserted}"'
    return "; ".join([text, *(event.kind.value for event in update.events)])


def _excerpt(timeline: Timeline) -> Iterator[str]:
    if timeline.excerpt is None:
        return
    yield "What supports the answer:"
    yield from (f"- {quote_text(quote)}" for quote in quotes(timeline.excerpt, timeline.view))
    if not timeline.excerpt:
        yield f"({timeline.unquoted})"


def _memory(timeline: Timeline) -> Iterator[str]:
    if timeline.excerpt is not None and not timeline.memory:
        return
    yield "Final memory, with the source of each line:"
    shown = 0
    for index, line in enumerate(timeline.provenance.lines):
        first = plain(timeline.step(line.update).name)
        origin = f"edited by a person at {first}" if line.edited else first
        if line.reworded:
            later = [timeline.step(update).short_name for update in line.reworded_updates]
            origin += f", reworded at {shortened(', '.join(later), 60)}"
        yield f"- {plain(line.line)} [{origin}]"
        for quote in quotes(timeline.quotes(index)[: max(0, MOST_QUOTES - shown)], timeline.view):
            shown += 1
            yield f"  {quote_text(quote)}"
    if not timeline.provenance.lines:
        yield "(empty)"


def _lost(timeline: Timeline) -> Iterator[str]:
    lost = timeline.provenance.lost
    if not lost:
        return
    longest = timeline.longest_held(_MOST_LOST)
    yield "Noted, and later lost:"
    yield from (f"- {shortened(line.line)} [{plain(timeline.held(line))}]" for line in longest)
    if len(lost) > len(longest):
        yield f"- and {len(lost) - len(longest):,} lines that were kept for fewer chunks"
