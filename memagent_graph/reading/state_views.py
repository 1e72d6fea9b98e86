"""The public form of what the state stores: updates, events, results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memagent_graph.reading.state import Counters, ReaderContext, StepRecord
from memagent_graph.results import EventKind, MemoryUpdate, ReadEvent, ReadResult, StopReason, UpdateRule, Usage


def update_from_step(step: StepRecord, memory: str) -> MemoryUpdate:
    """The public form of a stored memory update."""
    return MemoryUpdate(
        chunk_index=step["chunk_index"] or 0,
        start_char=step["start_char"],
        end_char=step["end_char"],
        start_byte=step["start_byte"],
        end_byte=step["end_byte"],
        chunk_tokens=step["chunk_tokens"],
        memory=memory,
        changed=step["changed"],
        progress=step["progress"],
        prompt_tokens=step["prompt_tokens"],
        completion_tokens=step["completion_tokens"],
        seconds=step["seconds"],
        events=events_from_step(step),
    )


def events_from_step(step: StepRecord) -> tuple[ReadEvent, ...]:
    """The public form of a step's stored events."""
    return tuple(
        ReadEvent(
            kind=EventKind(event["kind"]),
            chunk_index=event["chunk_index"],
            detail=event["detail"],
            rule=UpdateRule(event["rule"]) if event["rule"] else None,
        )
        for event in step["events"]
    )


def result_from_state(state: Mapping[str, Any], updates: Sequence[MemoryUpdate], context: ReaderContext) -> ReadResult:
    """The outcome of a run from its last state."""
    step: StepRecord | None = state.get("step")
    return ReadResult(
        run_id=state["run_id"],
        question=state["question"],
        document=state["document"],
        model=(step["model"] if step else "") or context.policy.name,
        answer=state.get("answer"),
        raw_answer=state.get("raw_answer"),
        memory=state["memory"],
        stop_reason=StopReason(state["stop_reason"]),
        usage=_usage(state["usage"], context),
        chunks_read=state["chunks_read"],
        updates=tuple(updates),
        answer_events=events_from_step(step) if step and step["type"] == "answer" else (),
        store_root=context.store.root,
    )


def _usage(total: Counters, context: ReaderContext) -> Usage:
    full_context = None
    if context.shape is not None:
        budget = context.budget
        tokens = total["document_tokens"] + budget.question_tokens
        full_context = context.shape.forward_flops(tokens, budget.answer_tokens)
    return Usage(
        prompt_tokens=total["prompt_tokens"],
        completion_tokens=total["completion_tokens"],
        cached_tokens=total["cached_tokens"],
        turns=total["turns"],
        seconds=total["seconds"],
        flops=total["flops"] if context.shape is not None else None,
        full_context_flops=full_context,
    )
