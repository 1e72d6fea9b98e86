"""A logged run's trace: its conversations as a graph of steps, with attempts grouped and edits applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from memagent_graph.calls import Call, Writes
from memagent_graph.events import EventKind, ReadEvent, UpdateRule
from memagent_graph.policy import Completion, FinishReason, TokenUsage
from memagent_graph.run_log.records import Conversation, LoggedEvent, Outcome
from memagent_graph.trace import Trace


def trace_of(
    conversations: Iterable[Conversation], edits: Sequence[LoggedEvent] = (), *, document_bytes: int | None = None
) -> Trace:
    """The trace of conversations. Those that no longer count are left out.

    Args:
        conversations: a run's; a step that has only discarded attempts is left out.
        edits: what a person changed, from `RunLog.events`.
        document_bytes: the document's length, for progress.
    """
    counted = sorted((each for each in conversations if not each.superseded), key=lambda each: each.seq or 0)
    attempts: dict[str, list[Conversation]] = {}
    for each in counted:
        attempts.setdefault(each.step, []).append(each)
    edited = _by_step(edits, counted)
    steps: list[Call] = []
    texts: dict[str, str | None] = {}
    for step_id, tries in attempts.items():
        last = tries[-1]
        if last.outcome is Outcome.DISCARDED:
            continue
        step = _step(tries)
        if last.outcome is Outcome.KEPT_PREVIOUS:
            kept = last.memory if last.memory is not None else _before(step, steps, texts)
            step = replace(step, text=kept if step.writes is Writes.MEMORY else "")
        for edit in edited.get(step_id, ()):
            events = (*step.events, as_read_event(edit))
            step = replace(step, writes=Writes.MEMORY, text=edit.text or "", events=events)
        steps.append(step)
        texts[step_id] = step.text if step.writes is Writes.MEMORY else _before(step, steps, texts)
    return Trace(tuple(steps), document_bytes)


def as_read_event(event: LoggedEvent) -> ReadEvent:
    """A logged event in the form of results."""
    rule = UpdateRule(event.rule) if event.rule else None
    return ReadEvent(EventKind(event.kind), event.position, event.detail, rule)


def _step(tries: Sequence[Conversation]) -> Call:
    last = tries[-1]
    return Call(
        id=last.step,
        node=last.node,
        branch=last.branch,
        role=last.role,
        slot=last.slot,
        writes=last.writes,
        text=last.text if last.writes is Writes.ANSWER else last.written,
        reads=last.reads,
        parents=last.parents,
        completion=Completion("", FinishReason(last.finish_reason), last.policy, policy_version=last.policy_version),
        usage=TokenUsage(
            sum(each.prompt_tokens for each in tries),
            sum(each.completion_tokens for each in tries),
            sum(each.cached_tokens for each in tries),
        ),
        seconds=sum(each.seconds for each in tries),
        events=tuple(
            replace(as_read_event(event), chunk_index=None) if last.writes is Writes.ANSWER else as_read_event(event)
            for each in tries
            for event in each.events
        ),
    )


def _before(step: Call, steps: Sequence[Call], texts: dict[str, str | None]) -> str:
    """The memory that a step started from: its parents' memories, joined."""
    return "\n".join(filter(None, (texts.get(parent) for parent in step.parents)))


def _by_step(edits: Sequence[LoggedEvent], counted: Sequence[Conversation]) -> dict[str, list[LoggedEvent]]:
    """The edits of memories, by the step whose memory they replaced; older logs have the position instead."""
    found: dict[str, list[LoggedEvent]] = {}
    for edit in edits:
        if edit.kind != EventKind.MEMORY_EDITED:
            continue
        step = edit.step
        if step is None:
            at = (e.step for e in counted if e.position == edit.position and e.began <= edit.time and e.reads)
            step = next(at, None)
        if step is not None:
            found.setdefault(step, []).append(edit)
    return found
