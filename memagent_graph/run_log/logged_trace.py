"""Builds the trace of a logged run: its conversations as a graph of calls, with attempts joined and edits applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from memagent_graph.events import EventKind, ReadEvent
from memagent_graph.grouping import group_values
from memagent_graph.policy import Completion, FinishReason, TokenUsage
from memagent_graph.run_log.records import Conversation, LoggedEvent, Outcome
from memagent_graph.trace import Call, Trace, Writes


def build_trace(
    conversations: Iterable[Conversation], edits: Sequence[LoggedEvent] = (), *, document_bytes: int | None = None
) -> Trace:
    """Return the trace of conversations, without superseded ones.

    Args:
        conversations: the conversations of a run. A call with only discarded attempts is left out.
        edits: the edits of memories, from `RunLog.events`.
        document_bytes: the size of the document, for progress.
    """
    trajectory = [conversation for conversation in conversations if not conversation.superseded]
    trajectory.sort(key=lambda conversation: conversation.id or 0)
    attempts_by_call = group_values((conversation.call_id, conversation) for conversation in trajectory)
    edits_by_call = group_values((edit.call_id, edit) for edit in edits if edit.kind == EventKind.MEMORY_EDITED)
    calls: list[Call] = []
    memories: dict[str, str | None] = {}
    for call_id, attempts in attempts_by_call.items():
        last_attempt = attempts[-1]
        if last_attempt.outcome is Outcome.DISCARDED:
            continue
        call = _make_call(attempts)
        if last_attempt.outcome is Outcome.KEPT_PREVIOUS:
            memory = last_attempt.memory if last_attempt.memory is not None else _join_parent_memories(call, memories)
            call = replace(call, text=memory if call.writes is Writes.MEMORY else "")
        for edit in edits_by_call.get(call_id, ()):
            event = ReadEvent(EventKind.MEMORY_EDITED, edit.position, edit.detail)
            call = replace(call, writes=Writes.MEMORY, text=edit.text or "", events=(*call.events, event))
        calls.append(call)
        memories[call_id] = call.text if call.writes is Writes.MEMORY else _join_parent_memories(call, memories)
    return Trace(calls, document_bytes)


def _make_call(attempts: Sequence[Conversation]) -> Call:
    last_attempt = attempts[-1]
    return Call(
        id=last_attempt.call_id,
        node=last_attempt.node,
        branch=last_attempt.branch,
        role=last_attempt.role,
        slot=last_attempt.slot,
        writes=last_attempt.writes,
        text=last_attempt.text if last_attempt.writes is Writes.ANSWER else last_attempt.result,
        reads=last_attempt.reads,
        parents=last_attempt.parents,
        completion=Completion("", FinishReason(last_attempt.finish_reason), last_attempt.policy, **last_attempt.origin),
        usage=TokenUsage(
            sum(attempt.prompt_tokens for attempt in attempts),
            sum(attempt.completion_tokens for attempt in attempts),
            sum(attempt.cached_tokens for attempt in attempts),
        ),
        seconds=sum(attempt.seconds for attempt in attempts),
        events=tuple(event for attempt in attempts for event in attempt.events),
    )


def _join_parent_memories(call: Call, memories: dict[str, str | None]) -> str:
    """Return the memory before a call: the joined memories of its parents."""
    return "\n".join(filter(None, (memories.get(parent) for parent in call.parents)))
