"""The functions that a strategy's steps may call, and the steps that several strategies use.

A step is a coroutine that takes the state and returns a change of it. Its `StepContext` gives access to the question,
the chunks and the policy. The node around the step (`nodes`) counts cost and chunks, and writes the log.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from langgraph.graph import END
from langgraph.types import Send

from memagent_graph.documents.chunking import Chunk, Cursor, start_cursor
from memagent_graph.errors import StrategyError
from memagent_graph.events import ReadEvent, StopReason
from memagent_graph.reading.execution import StepExecution
from memagent_graph.reading.policy_request import PolicyRequest, Reply
from memagent_graph.reading.state import ReaderState, SequentialState, add_cost
from memagent_graph.reading.structured import ERROR_TOKENS
from memagent_graph.roles import ANSWER, REPAIR, UPDATE, Role
from memagent_graph.trace import Call, Span

Change: TypeAlias = dict[str, Any]
"""A change of the state, returned by a step."""
State: TypeAlias = Any
"""A strategy's state, a TypedDict, or the values that a branch was sent."""
Step: TypeAlias = Callable[[State, "StepContext"], Awaitable[Change]]
Route: TypeAlias = Callable[[State], "str | Sequence[str | Send]"]
"""Chooses the next node, or the next branches."""


@dataclass(slots=True)
class StepContext(StepExecution):
    """The data and functions for one execution of a step. Of its fields, strategies use only `state` and `context`."""

    @property
    def question(self) -> str:
        """The run's question."""
        return str(self.state["question"])

    @property
    def branch(self) -> str:
        """The branch that the step belongs to; "" is the trunk."""
        return str(self.state.get("branch") or "")

    # The document

    async def next_chunk(self, cursor: Cursor, *, needs_text: bool = True) -> tuple[Span, Cursor] | None:
        """Return the chunk at `cursor`, and the next cursor; None at the document's end.

        If escaping makes a chunk longer than its budget, it is shortened.

        Args:
            cursor: the start of the chunk.
            needs_text: whether its text will be read soon; otherwise only its position is needed.

        Raises:
            DocumentError: the text is no longer in the store.
        """
        await asyncio.sleep(0)  # a step may choose all chunks of a document, and other reads must not wait for it
        chunker = self.execution.get_chunker(self.state["document"], self.context.budget.chunk_tokens)
        chunk = chunker.next_chunk(cursor)
        if chunk is None:
            return None
        fitting_chunk = self._shorten_to_budget(chunk, cursor)
        span = Span.of(fitting_chunk, shortened=fitting_chunk is not chunk)
        if needs_text and self.context.barrier is not None:
            self.processor_turn.end()
            await self.context.barrier(self.state.get("chunks_read") or 0)
            await self.processor_turn.begin()
        if needs_text:
            self.execution.chunk_texts[span] = fitting_chunk.text
        return span, fitting_chunk.next

    def read_text(self, span: Span) -> str:
        """Return the text of a chunk, from the cache or from the store (after a resume).

        Raises:
            DocumentError: the text is no longer in the store.
        """
        if (text := self.execution.chunk_texts.pop(span, None)) is not None:
            return text
        return self.context.store.read(self.state["document"], span.start_byte, span.end_byte)

    def mark_read(self, span: Span) -> None:
        """Count a chunk as read, for limits, totals and progress. Call this once per chunk, after all calls for it.

        The `span` of the state becomes None, so the next chunk can be chosen.
        """
        self.chunk_count += 1
        self.count_document_tokens(span.tokens)

    def count_document_tokens(self, tokens: int) -> None:
        """Count document tokens that the step processed, even if the policy did not see them."""
        self.cost = add_cost(self.cost, {"document_tokens": tokens})

    def _shorten_to_budget(self, chunk: Chunk, cursor: Cursor) -> Chunk:
        """Return the chunk, or a shorter one if escaping made it longer than its budget."""
        context = self.context
        while chunk.tokens > 1 and (escaped := context.prompts.neutralise(chunk.text)) != chunk.text:
            if context.tokenizer.count(escaped) <= context.budget.chunk_tokens:
                break
            chunker = self.execution.get_chunker(self.state["document"], chunk.tokens // 2)
            chunk = next(iter(chunker.chunks(cursor)))
        return chunk

    # The policy

    async def read(self, role: Role, span: Span, *, others: Sequence[Span] = (), **call: Any) -> Reply:
        """Show the policy a chunk in a role, and count the chunk as read.

        Args:
            role: a role of the strategy with the field {chunk}.
            span: the chunk.
            others: other parts of the document whose text is in the fields.
            call: further arguments for `ask`.
        """
        reply = await self.ask(role, chunk=self.read_text(span), reads=[span, *others], **call)
        self.mark_read(span)
        return reply

    async def ask(
        self,
        role: Role,
        *,
        previous: str = "",
        reads: Sequence[Span] = (),
        parents: Iterable[str] | None = None,
        slot: int | None = None,
        question: str | None = None,
        events: Sequence[ReadEvent] = (),
        **fields: str,
    ) -> Reply:
        """Call the policy in a role, apply the reader's rules to the reply, and log the call.

        A structured answer that does not match its schema is repaired; see `memagent_graph.reading.structured`.

        Args:
            role: a role of the strategy.
            previous: the memory that is kept if no reply is accepted.
            reads: the chunks whose text is in the fields.
            parents: the ids of the calls whose output is in the fields. The default is the branch's newest call.
            slot: a unique index among the branch's calls of the role. The default is the index of the first chunk in
                `reads`, or 0.
            question: the text of {prompt}, by default the run's question.
            events: events of the call that happened before it.
            fields: further fields of the role's template.

        Raises:
            PolicyError: the policy could not be called.
            StrategyError: the strategy does not list the role.
        """
        if role.name not in self.context.prompts.templates:
            raise StrategyError(
                f"the role {role.name!r} has no template here", hint="List it in the strategy's `roles`."
            )
        continues_branch = parents is None
        if parents is None:
            tips = {**self.state.get("tips", {}), **self.tips}
            tip = tips.get(self.branch) or tips.get("")
            parents = (tip,) if tip else ()
        if slot is None:
            slot = reads[0].index if reads else 0
        call_id = secrets.token_hex(12)  # unique across processes, also forked ones
        place = self.node, self.branch, role.name, slot, role.writes
        call = Call(call_id, *place, reads=(*reads,), parents=(*parents,), events=(*events,))
        request = PolicyRequest(self, role, call, fields, previous, question, continues_branch=continues_branch)
        reply = await request.request_reply()
        if reply.format_error is None or role is REPAIR:
            return reply
        return await self._repair(reply, fields.get("memory", ""), slot, question)

    async def _repair(self, reply: Reply, memory: str, slot: int, question: str | None) -> Reply:
        """Ask for repairs until a reply matches the schema; return that reply, or else the last one."""
        context, tries = self.context, self.context.rules.retries
        for attempt in range(tries if REPAIR.name in context.prompts.templates else 0):
            repaired_reply = await self.ask(
                REPAIR,
                parents=(reply.call_id,),
                slot=slot * tries + attempt,
                question=question,
                memory=memory,
                reply=context.truncate(reply.value or "", context.budget.answer_tokens),
                error=context.truncate(reply.format_error or "", ERROR_TOKENS),
            )
            reply = repaired_reply if repaired_reply.text else replace(reply, call=repaired_reply.call)
            if not reply.format_error:
                break
        return reply

    async def load_previous_calls(self) -> list[Call]:
        """Return the run's calls so far, in order; for strategies that set `uses_previous_calls`.

        Inside another graph, the calls before a resume come from the run's log; without a log they are missing.

        Raises:
            RunLogError: the log cannot be read.
        """
        previous_trace, recording = self.context.previous_trace, self.execution.recording
        if previous_trace is None and recording is not None:
            await recording.settle()
            if recording.failure is None:
                previous_trace = await asyncio.to_thread(recording.log.trace, self.state["run_id"])
        calls = [*(previous_trace.calls if previous_trace else ()), *self.execution.calls]
        return list({call.id: call for call in calls}.values())

    # Limits and failures

    def stop_if_limit_reached(self) -> Change | None:
        """Return the change that stops the run if a limit is reached. The run can be resumed."""
        reason = self.execution.find_reached_limit()
        return None if reason is None else {"stop_reason": reason.value}

    def count_chunks_left(self, limit: int) -> int:
        """Return the number of chunks that may be read before `max_chunks` is reached, at most `limit`."""
        max_chunks = self.context.limits.max_chunks
        return limit if max_chunks is None else max(0, min(limit, max_chunks - self.execution.chunk_count))

    def log_failure(self, reason: str) -> None:
        """Log that the run ended with an error. Use it if resuming the run would lead to the same error."""
        if recording := self.execution.recording:
            recording.end(self.state["run_id"], reason, None)


def branch(node: str, state: Any, name: str, **values: Any) -> Send:
    """Make a branch, to be returned by a route: `node` runs on these values, in parallel with other branches.

    Args:
        node: the node's name.
        state: the state at which the branch begins.
        name: the branch's name. The name of an existing branch continues it.
        values: further values for the branch's state, such as a span and the branch's memory.
    """
    tips = state.get("tips", {})
    shared = {key: state[key] for key in ("run_id", "question", "document", "chunks_read") if key in state}
    branch_tips = {tip: tips[tip] for tip in ("", name) if tip in tips}
    return Send(node, {**shared, "tips": branch_tips, "branch": name, **values})


async def read_chunk(state: SequentialState, step: StepContext) -> Change:
    """Choose the next chunk. At a limit the read stops.

    The state has only the position of the chunk. `span` is None at the document's end. A chunk that was chosen but not
    read before a failure or an edit is chosen again.

    Raises:
        StrategyError: a chunk was chosen twice in one call, because the step that reads it does not call `mark_read`.
    """
    if stop := step.stop_if_limit_reached():
        return stop
    if state.get("span") is not None:
        pending = get_chosen_chunk(state).index
        if step.execution.pending_chunk == pending:  # the loop would not end
            hint = "Call step.mark_read(span) in the step that reads it."
            raise StrategyError(f"chunk {pending} was chosen twice but not read", hint=hint)
        step.execution.pending_chunk = pending
        return {"span": state["span"]}
    cursor = state.get("cursor") or start_cursor()
    span, next_cursor = await step.next_chunk(cursor) or (None, cursor)
    return {"span": None if span is None else span.stored, "cursor": next_cursor}


async def overwrite_memory(state: SequentialState, step: StepContext) -> Change:
    """Show the policy the chosen chunk. The reply becomes the memory, by the reader's rules."""
    return {"memory": (await read_with_memory(UPDATE, state, step)).text}


async def read_with_memory(role: Role, state: Mapping[str, Any], step: StepContext) -> Reply:
    """Show the policy the memory and the chosen chunk in a role. The reply's text becomes the memory."""
    memory, chunk = state.get("memory") or "", get_chosen_chunk(state)
    slot = (state.get("earlier_chunks") or 0) + chunk.index
    return await step.read(role, chunk, memory=memory, previous=memory, slot=slot)


async def answer(state: ReaderState, step: StepContext) -> Change:
    """Ask for the answer from the trunk's memory alone, and end the run with it."""
    memory = state.get("memory") or ""
    return end_with_answer(await step.ask(ANSWER, memory=memory), memory, step)


def end_with_answer(reply: Reply, memory: str, step: StepContext) -> Change:
    """Return the change that ends the run with an answer, which is based on `memory`."""
    reason = StopReason.ANSWERED if reply.text else StopReason.NO_ANSWER
    if reply.format_error is not None:
        reason = StopReason.INVALID_ANSWER
    elif reply.text and step.state.get("enough"):
        cursor = step.state.get("cursor") or start_cursor()
        has_read_all = step.state.get("earlier_chunks") or cursor["byte"] == step.state["document"]["size"]
        reason = StopReason.ANSWERED if has_read_all else StopReason.ENOUGH
    return {"memory": memory, "answer": reply.value, "raw_answer": reply.completion_text, "stop_reason": reason.value}


def get_chosen_chunk(state: Mapping[str, Any]) -> Span:
    """Return the chunk that `read_chunk` chose, or that a branch was sent to read.

    Raises:
        StrategyError: no chunk was chosen.
    """
    span = state.get("span")
    if span is None:
        raise StrategyError(
            "a step that reads a chunk ran without a chunk",
            hint="A strategy may lead from read_chunk to such a step only while a span is set.",
        )
    return Span(**span)


def route_after_read_chunk(read_node: str, choose_other: Callable[[Any], str | None] = lambda state: None) -> Route:
    """Return the route after `read_chunk`: the node that reads the chunk, "answer" after the last, or END at a limit.

    Args:
        read_node: the node that reads the chosen chunk.
        choose_other: a function of the state that names another node, if any. It is not called at a limit.
    """

    def route(state: SequentialState) -> str:
        if state.get("stop_reason"):
            return END
        return choose_other(state) or ("answer" if state.get("span") is None else read_node)

    return route
