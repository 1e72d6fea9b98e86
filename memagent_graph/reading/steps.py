"""The steps that strategies have in common: open the document, choose a chunk, update memory, answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from langgraph.graph import END

from memagent_graph.documents.chunking import start_cursor
from memagent_graph.errors import StrategyError
from memagent_graph.events import StopReason
from memagent_graph.reading.ask import Reply
from memagent_graph.reading.nodes import Change, Route, StepContext
from memagent_graph.reading.state import ChunkSpan, LineState, ReaderState
from memagent_graph.roles import ANSWER, UPDATE, Role


async def read_chunk(state: LineState, step: StepContext) -> Change:
    """Choose the next chunk, or find that the document has ended or that a limit stops the read.

    Only the chunk's position is in the state. `span` is None when there is nothing more to read. A chunk that was
    chosen before a failure or an edit and was not read is the next one.
    """
    cursor, pending = state.get("cursor") or start_cursor(), state.get("span")
    if reason := step.limit():
        return step.stopped(reason, pending["index"] if pending else cursor["index"])
    if pending is not None:
        step.require_progress(pending)
        return {"span": pending}
    span, following = await step.next_chunk(cursor) or (None, cursor)
    return {"span": span, "cursor": following}


async def update_memory(state: LineState, step: StepContext) -> Change:
    """Show the policy the chosen chunk and use its reply as the new memory, by the reader's rules."""
    return {"memory": (await read_with_memory(UPDATE, state, step)).text}


async def read_with_memory(role: Role, state: LineState, step: StepContext) -> Reply:
    """Show the policy the memory and the chosen chunk in a role; the reply's text is the new memory."""
    span, memory = chosen(state), state.get("memory") or ""
    reply = await step.ask(role, memory=memory, chunk=step.text(span), previous=memory, reads=[span])
    step.has_read(span)
    return reply


async def answer(state: ReaderState, step: StepContext) -> Change:
    """Ask for the answer from the trunk's memory alone."""
    return await answer_from(state.get("memory") or "", step)


async def answer_from(memory: str, step: StepContext, parents: Iterable[str] | None = None) -> Change:
    """Ask for the answer from a memory, and end the run with it.

    Args:
        memory: the memory.
        step: the step that asks.
        parents: the steps that wrote the memory; the trunk's newest if left out.
    """
    return answered(await step.ask(ANSWER, memory=memory, parents=parents), memory, step)


def answered(reply: Reply, memory: str, step: StepContext) -> Change:
    """The change that ends the run with an answer; `memory` is what it is based on."""
    reason = StopReason.ANSWERED if reply.text else StopReason.NO_ANSWER
    if reply.invalid is not None:
        reason = StopReason.INVALID_ANSWER
    elif reply.text and step.state.get("enough") and not step.context.is_at_end(step.state):
        reason = StopReason.ENOUGH
    step.finished(reason, reply.value)
    return {"memory": memory, "answer": reply.value, "raw_answer": reply.raw, "stop_reason": reason.value}


def chosen(state: LineState) -> ChunkSpan:
    """The chunk that `read_chunk` chose.

    Raises:
        StrategyError: there is none.
    """
    span = state.get("span")
    if span is None:
        raise StrategyError(
            "a step that reads a chunk ran without a chunk",
            hint="A strategy may lead from read_chunk to such a step only while a span is set.",
        )
    return span


def unless_enough(read_on: str, then: str = "answer") -> Route:
    """The route after a step that may find that there is enough to answer from."""

    def unless_enough(state: ReaderState) -> str:
        return then if state.get("enough") else read_on

    return unless_enough


def after_read_chunk(
    read_on: str,
    then: Callable[[Any], str] = lambda state: "answer",
    before: Callable[[Any], str | None] = lambda state: None,
) -> Route:
    """The route after `read_chunk`: to the node that reads the chunk, or at a limit to the end.

    Args:
        read_on: the node that reads the chosen chunk.
        then: a function of the state that names the node after the last chunk.
        before: a function of the state that names a node to run first, if any; not at a limit.
    """

    def after_read_chunk(state: LineState) -> str:
        if state.get("stop_reason"):
            return END
        return before(state) or (then(state) if state.get("span") is None else read_on)

    return after_read_chunk
