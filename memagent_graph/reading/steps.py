"""The steps that ways of reading have in common: open the document, choose a chunk, update memory, answer."""

from __future__ import annotations

from memagent_graph.documents.chunking import start_cursor
from memagent_graph.errors import StrategyError
from memagent_graph.events import StopReason
from memagent_graph.reading.nodes import Change, StepContext
from memagent_graph.reading.state import LineState, ReaderState
from memagent_graph.roles import ANSWER, UPDATE


async def read_chunk(state: LineState, step: StepContext) -> Change:
    """Choose the next chunk, or find that the document has ended, or that a limit stops the read.

    Only the chunk's position enters the state. `span` is None once there is nothing more to read.
    """
    cursor = state.get("cursor") or start_cursor()
    if reason := step.limit():
        return {"span": None, **step.stopped(reason, cursor["index"])}
    span, following = await step.next_chunk(cursor) or (None, cursor)
    return {"span": span, "cursor": following}


async def update_memory(state: LineState, step: StepContext) -> Change:
    """Show the policy the chosen chunk and take what it writes as the new memory, by the stated rules."""
    span, memory = state.get("span"), state.get("memory") or ""
    if span is None:
        raise StrategyError(
            "update_memory ran without a chunk",
            hint="A strategy must lead from read_chunk to update_memory only while a span is set.",
        )
    reply = await step.ask(UPDATE, memory=memory, chunk=step.text(span), previous=memory, reads=[span])
    step.has_read(span)
    return {"memory": reply.text}


async def answer(state: ReaderState, step: StepContext) -> Change:
    """Ask for the answer from the trunk's memory alone."""
    reply = await step.ask(ANSWER, memory=state.get("memory") or "")
    reason = StopReason.ANSWERED if reply.text else StopReason.NO_ANSWER
    step.finished(reason, reply.value)
    return {"answer": reply.value, "raw_answer": reply.raw, "stop_reason": reason.value}


def has_chunk(state: LineState) -> bool:
    """Whether a chunk is chosen."""
    return state.get("span") is not None


def is_stopped(state: ReaderState) -> bool:
    """Whether a limit stopped the read."""
    return bool(state.get("stop_reason"))
