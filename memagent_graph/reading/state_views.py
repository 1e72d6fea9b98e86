"""The public form of the stored state: steps, updates, events, results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memagent_graph.events import EventKind, ReadEvent, StopReason, UpdateRule
from memagent_graph.reading.ask import as_span
from memagent_graph.reading.state import Counters, ReaderContext, StepRecord, no_cost
from memagent_graph.results import ReadResult, Usage
from memagent_graph.trace import MemoryUpdate, Replayed, Trace, TraceStep, Writes

_WRITES = {"memory_update": Writes.MEMORY, "decision": Writes.DECISION, "answer": Writes.ANSWER}


def trace_step(record: StepRecord, state: Mapping[str, Any]) -> TraceStep:
    """The public form of a stored step; `state` is the one after it."""
    return TraceStep(
        id=record["id"],
        node=record["node"],
        branch=record["branch"],
        role=record["role"],
        slot=record["slot"],
        writes=_WRITES[record["type"]],
        text=record["text"] if record["text"] is not None else state.get("memory", ""),
        reads=tuple(map(as_span, record["reads"])),
        parents=tuple(record["parents"]),
        prompt_tokens=record["prompt_tokens"],
        completion_tokens=record["completion_tokens"],
        seconds=record["seconds"],
        model=record["model"],
        finish_reason=record["finish_reason"],
        events=tuple(
            ReadEvent(
                kind=EventKind(event["kind"]),
                chunk_index=event["chunk_index"],
                detail=event["detail"],
                rule=UpdateRule(event["rule"]) if event["rule"] else None,
            )
            for event in record["events"]
        ),
    )


def trace_steps(records: Iterable[StepRecord], state: Mapping[str, Any]) -> list[TraceStep]:
    """The steps among a superstep's records."""
    return [trace_step(record, state) for record in records if record["type"] in _WRITES]


class Progress:
    """A read's steps as they arrive, and their updates, computed on request."""

    def __init__(self, steps: Iterable[TraceStep] = (), document_bytes: int | None = None) -> None:
        self.document_bytes = document_bytes
        self.steps: list[TraceStep] = list(steps)
        self._replayed = Replayed(document_bytes)
        self._replayed_steps = 0

    def updates_since(self, steps: int, *, complete: bool) -> list[MemoryUpdate]:
        """The updates from the steps after a number; those of a chunk only when it is `complete`."""
        for step in self.steps[self._replayed_steps :]:
            self._replayed.add(step)
        self._replayed_steps = len(self.steps)
        places = dict.fromkeys(
            self._replayed.place(step.id)
            for step in self.steps[steps:]
            if (complete if step.reads else step.writes is Writes.MEMORY) and step.writes is not Writes.ANSWER
        )
        return [self._replayed.updates[place] for place in places]

    @property
    def trace(self) -> Trace:
        """The trace so far."""
        return Trace(tuple(self.steps), self.document_bytes)


def result_from_state(state: Mapping[str, Any], trace: Trace, context: ReaderContext) -> ReadResult:
    """The outcome of a run from its last state and its trace."""
    form = context.structure.format if context.structure else None
    return ReadResult(
        run_id=state["run_id"],
        question=state["question"],
        document=state["document"],
        model=(trace.steps[-1].model if trace.steps else "") or context.policy.name,
        answer=state.get("answer"),
        raw_answer=state.get("raw_answer"),
        memory=state.get("memory") or "",
        stop_reason=StopReason(state["stop_reason"]),
        usage=_usage(state, trace, context),
        chunks_read=state.get("chunks_read", 0),
        updates=trace.updates,
        answer_events=trace.answers[-1].events if trace.answers else (),
        strategy=context.strategy.name,
        strategy_fingerprint=context.strategy.fingerprint,
        trace=trace,
        store_root=context.store.root,
        value=form.value(state.get("answer")) if form else None,
        response_format=form.schema if form else None,
    )


def _usage(state: Mapping[str, Any], trace: Trace, context: ReaderContext) -> Usage:
    total: Counters = state.get("usage") or no_cost()
    full_context = None
    if context.shape is not None:
        budget = context.budget
        tokens = _whole_document(state, trace, total["document_tokens"]) + budget.question_tokens
        full_context = context.shape.forward_flops(tokens, budget.answer_tokens)
    return Usage(
        prompt_tokens=total["prompt_tokens"],
        completion_tokens=total["completion_tokens"],
        cached_tokens=total["cached_tokens"],
        turns=total["turns"],
        seconds=total["seconds"],
        flops=total["flops"] if context.shape is not None else None,
        full_context_flops=full_context,
        document_tokens=total["document_tokens"],
    )


def _whole_document(state: Mapping[str, Any], trace: Trace, counted: int) -> int:
    """The document's tokens: counted, or estimated from its bytes if it was read several times or not to its end."""
    read = {step.chunk_index: step.reads[0] for step in trace.steps if step.chunk_index is not None}
    if state.get("chunks_read", 0) in {0, len(read)} and state["stop_reason"] != StopReason.ENOUGH:
        return counted
    tokens = sum(span.tokens for span in read.values())
    length = sum(span.end_byte - span.start_byte for span in read.values())
    return round(tokens * max(1.0, (state["document"]["size"] or 0) / max(1, length)))
