"""The outcome of a read: its updates as they arrive, and its result from the last state."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from memagent_graph.calls import Call, Writes, load_calls
from memagent_graph.events import StopReason
from memagent_graph.reading.state import ReaderContext, zero_counters
from memagent_graph.results import ReadResult, Usage
from memagent_graph.trace import MemoryUpdate, Replayed, Trace


class Progress:
    """Collects a read's calls as they arrive, and computes their updates of the memory on request.

    `memory` is the memory before the first call.
    """

    def __init__(self, steps: Iterable[Call] = (), document_bytes: int | None = None, memory: str = "") -> None:
        self.document_bytes = document_bytes
        self.steps: list[Call] = list(steps)
        self._memory = memory
        self._replayed = Replayed(document_bytes)
        self._replayed_steps = 0

    def add(self, change: Mapping[str, Any]) -> None:
        """Add the steps of a change of the state."""
        self.steps += load_calls(change.get("steps", ()), {"memory": self._memory, **change})
        self._memory = change.get("memory", self._memory)

    def updates(self, change: Mapping[str, Any]) -> list[MemoryUpdate]:
        """Add the steps of a change and return their updates. The update of a chunk comes when all of it is read."""
        steps, complete = len(self.steps), bool(change.get("chunks_read"))
        self.add(change)
        for step in self.steps[self._replayed_steps :]:
            self._replayed.add(step)
        self._replayed_steps = len(self.steps)
        indices = dict.fromkeys(
            self._replayed.update_index[step.id]
            for step in self.steps[steps:]
            if (complete if step.reads else step.writes is Writes.MEMORY) and step.writes is not Writes.ANSWER
        )
        return [self._replayed.updates[index] for index in indices]

    @property
    def trace(self) -> Trace:
        """The trace so far."""
        return Trace(tuple(self.steps), self.document_bytes)


def result_from_state(state: Mapping[str, Any], trace: Trace, context: ReaderContext) -> ReadResult:
    """Return the result of a run from its last state and its trace."""
    form = context.structure.format if context.structure else None
    return ReadResult(
        run_id=state["run_id"],
        question=state["question"],
        document=state["document"],
        model=(trace.steps[-1].completion.model if trace.steps else "") or context.policy.name,
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
    total: Any = {**zero_counters(), **(state.get("usage") or {})}
    full_context = None
    if context.shape is not None:
        budget = context.budget
        tokens = _whole_document(state, trace, total["document_tokens"]) + budget.question_tokens
        full_context = context.shape.forward_flops(tokens, budget.answer_tokens)
    flops = total["flops"] if context.shape is not None else None
    return Usage(**{**total, "flops": flops, "full_context_flops": full_context})


def _whole_document(state: Mapping[str, Any], trace: Trace, counted: int) -> int:
    """Return the number of the document's tokens, estimated from its bytes if it was not read to the end."""
    chunks = {step.chunk_index: step.reads[0] for step in trace.steps if step.chunk_index is not None}
    if state.get("chunks_read", 0) in {0, len(chunks)} and state["stop_reason"] != StopReason.ENOUGH:
        return counted
    tokens = sum(span.tokens for span in chunks.values())
    length = sum(span.end_byte - span.start_byte for span in chunks.values())
    return round(tokens * max(1.0, (state["document"]["size"] or 0) / max(1, length)))


async def await_result(
    parts: AsyncGenerator[MemoryUpdate | ReadResult, None], report: Callable[[MemoryUpdate], None] | None = None
) -> ReadResult:
    """Return the result at the end of a reader's stream. Updates are reported as they arrive."""
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, ReadResult):
                return part
            if report is not None:
                report(part)
    raise AssertionError("a stream ends with its result")


def raise_first(outcomes: list[ReadResult | Exception]) -> list[ReadResult]:
    """Return the results if none is a failure.

    Raises:
        Exception: the first failure.
    """
    if failures := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
        if len(failures) > 1:
            failures[0].add_note(f"{len(failures)} of {len(outcomes)} reads failed; this is the first.")
        raise failures[0]
    return [outcome for outcome in outcomes if isinstance(outcome, ReadResult)]
