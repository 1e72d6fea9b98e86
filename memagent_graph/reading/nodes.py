"""The steps that every strategy is wired from: read a chunk, update the memory, answer.

Each step is a pure-looking coroutine from tracked state to a change of it; all input and output goes through the
`ReaderContext`. `as_runnable` makes a step a graph node that works under both `invoke` and `ainvoke`.

A superstep of LangGraph costs nearly as much processor time as all else that a chunk needs. It is there so that what
lies between two steps can be saved and seen. Where nobody does either, a step that follows itself does so at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.runtime import Runtime, get_runtime

from memagent_graph.concurrency.background import run_sync
from memagent_graph.documents.chunking import Chunk, Chunker, Cursor, start_cursor
from memagent_graph.errors import MemAgentError
from memagent_graph.reading.ask import Drafts
from memagent_graph.reading.state import (
    NO_COST,
    ChunkSpan,
    ReaderContext,
    ReaderState,
    StepRecord,
    event_record,
    new_run_id,
)
from memagent_graph.reading.tracing import observed, trace_ids
from memagent_graph.results import EventKind, StopReason
from memagent_graph.run_log.recording import Recording

Change: TypeAlias = dict[str, Any]
"""What a step changes in the state."""
Step: TypeAlias = Callable[[ReaderState, ReaderContext], Awaitable[Change]]
Route: TypeAlias = Callable[[ReaderState], str]
"""Names the node that follows."""

CHECKPOINTER: Final = "__pregel_checkpointer"
"""Where LangGraph puts a graph's checkpointer, its own or its parent's, in the config."""


async def open_document(state: ReaderState, context: ReaderContext) -> Change:
    """Begin a run: set everything that an earlier run on the same thread may have left behind."""
    run_id = state.get("run_id") or new_run_id()
    if recording := context.meter.recording:
        recording.begin(run_id, state["question"], state["document"], context.prompts, anew=True)
    return {
        "run_id": run_id,
        "settings": context.settings,
        "cursor": start_cursor(),
        "span": None,
        "step": None,
        "memory": "",
        "usage": NO_COST,
        "chunks_read": 0,
        "answer": None,
        "raw_answer": None,
        "stop_reason": None,
    }


async def read_chunk(state: ReaderState, context: ReaderContext) -> Change:
    """Choose the next chunk, or find that the document has ended, or that a limit stops the read.

    Only the chunk's position enters the state. `span` is None once there is nothing more to read.
    """
    cursor = state.get("cursor") or start_cursor()
    if reason := context.meter.exceeded(context.limits):
        if recording := context.meter.recording:
            recording.end(state.get("run_id", ""), reason.value, None)
        return {"span": None, "stop_reason": reason.value, "step": _stopped(reason, cursor)}
    return await _choose_chunk(cursor, state, context) or {"span": None, "cursor": cursor}


async def update_memory(state: ReaderState, context: ReaderContext) -> Change:
    """Show the policy the chosen chunk and take what it writes as the new memory, by the stated rules.

    Where the next chunk is at hand, it is chosen in the same step, so that a chunk costs one superstep and not two.
    """
    span = state.get("span")
    if span is None:
        raise MemAgentError(
            "update_memory ran without a chunk",
            hint="A strategy must lead from read_chunk to update_memory only while a span is set.",
        )
    begin = time.perf_counter()
    previous = state.get("memory", "")
    chunk = _text(span, state, context)
    messages = context.prompts.update_messages(state["question"], previous, chunk)
    drafts = Drafts(state, context, span)
    if span["shortened"]:
        drafts.note(EventKind.SHORTENED_CHUNK, "escaping made the chunk longer than its budget")
    memory = await drafts.memory(messages, previous)
    context.meter.chunks += 1
    return {
        **await _look_ahead(state, context),
        "memory": memory,
        "chunks_read": state.get("chunks_read", 0) + 1,
        "usage": drafts.add_to(state.get("usage", NO_COST), time.perf_counter() - begin, span["tokens"]),
        "step": StepRecord(
            type="memory_update",
            chunk_index=span["index"],
            start_char=span["start_char"],
            end_char=span["end_char"],
            start_byte=span["start_byte"],
            end_byte=span["end_byte"],
            chunk_tokens=span["tokens"],
            changed=memory != previous,
            progress=_progress(state, span["end_byte"]),
            prompt_tokens=drafts.prompt_tokens,
            completion_tokens=drafts.completion_tokens,
            seconds=time.perf_counter() - begin,
            finish_reason=drafts.finish_reason,
            model=drafts.model,
            events=drafts.events,
        ),
    }


async def answer(state: ReaderState, context: ReaderContext) -> Change:
    """Ask for the answer from the memory alone."""
    begin = time.perf_counter()
    messages = context.prompts.answer_messages(state["question"], state.get("memory", ""))
    drafts = Drafts(state, context)
    text, extracted = await drafts.answer(messages)
    reason = StopReason.ANSWERED if text else StopReason.NO_ANSWER
    if recording := context.meter.recording:
        recording.end(state.get("run_id", ""), reason.value, extracted)
    cursor = state.get("cursor") or start_cursor()
    return {
        "answer": extracted,
        "raw_answer": drafts.raw_text,
        "stop_reason": reason.value,
        "usage": drafts.add_to(state.get("usage", NO_COST), time.perf_counter() - begin),
        "step": StepRecord(
            type="answer",
            chunk_index=None,
            start_char=0,
            end_char=cursor["char"],
            start_byte=0,
            end_byte=cursor["byte"],
            chunk_tokens=0,
            changed=False,
            progress=1.0,
            prompt_tokens=drafts.prompt_tokens,
            completion_tokens=drafts.completion_tokens,
            seconds=time.perf_counter() - begin,
            finish_reason=drafts.finish_reason,
            model=drafts.model,
            events=drafts.events,
        ),
    }


async def _choose_chunk(cursor: Cursor, state: ReaderState, context: ReaderContext) -> Change | None:
    """The change of state that chooses the chunk at `cursor`; None at the document's end."""
    chunk = await _chunker(state, context, context.budget.chunk_tokens).next_chunk(cursor)
    if chunk is None:
        return None
    fitting = await _fitting(chunk, cursor, state, context)
    span = ChunkSpan(
        index=chunk.index,
        start_char=fitting.start_char,
        end_char=fitting.end_char,
        start_byte=fitting.start_byte,
        end_byte=fitting.end_byte,
        tokens=fitting.tokens,
        shortened=fitting is not chunk,
    )
    context.meter.chosen = span, fitting.text
    return {"span": span, "cursor": fitting.next}


def _text(span: ChunkSpan, state: ReaderState, context: ReaderContext) -> str:
    """The chosen chunk's text; after a resume, and on any doubt, anew from the store."""
    if (chosen := context.meter.chosen) is not None and chosen[0] == span:
        return chosen[1]
    return context.store.read(state["document"], span["start_byte"], span["end_byte"])


async def _look_ahead(state: ReaderState, context: ReaderContext) -> Change:
    """What `read_chunk` would do next, if that is to choose a chunk; all else is left to it.

    It does not wait for a live stream, whose next chunk may be long in coming, nor let a failure that belongs to the
    next chunk cost the memory that was just written.
    """
    cursor = state.get("cursor")
    if cursor is None or state["document"]["size"] is None or context.meter.exceeded(context.limits):
        return {"span": None}
    try:
        return await _choose_chunk(cursor, state, context) or {"span": None}
    except MemAgentError:
        return {"span": None}


def _chunker(state: ReaderState, context: ReaderContext, chunk_tokens: int) -> Chunker:
    document = state["document"]
    key = document["key"], chunk_tokens
    if key not in context.meter.chunkers:
        chunker = Chunker(context.store, document, context.tokenizer, chunk_tokens, context.boundary)
        context.meter.chunkers[key] = chunker
    return context.meter.chunkers[key]


async def _fitting(chunk: Chunk, cursor: Cursor, state: ReaderState, context: ReaderContext) -> Chunk:
    """The chunk, or a shorter one where escaping made it longer than its budget."""
    budget = context.budget.chunk_tokens
    while (guarded := context.prompts.neutralise(chunk.text)) != chunk.text:
        if context.tokenizer.count(guarded) <= budget or chunk.tokens <= 1:
            break
        shorter = await _chunker(state, context, max(1, chunk.tokens // 2)).next_chunk(cursor)
        if shorter is None:
            break
        chunk = shorter
    return chunk


def _progress(state: ReaderState, end_byte: int) -> float | None:
    size = state["document"]["size"]
    return min(1.0, end_byte / size) if size else None


def _stopped(reason: StopReason, cursor: Cursor) -> StepRecord:
    return StepRecord(
        type="stopped",
        chunk_index=cursor["index"],
        start_char=cursor["char"],
        end_char=cursor["char"],
        start_byte=cursor["byte"],
        end_byte=cursor["byte"],
        chunk_tokens=0,
        changed=False,
        progress=None,
        prompt_tokens=0,
        completion_tokens=0,
        seconds=0.0,
        finish_reason=reason.value,
        model="",
        events=[],
    )


async def _settle(recording: Recording, change: Change) -> None:
    """See that what the step logged is in the file before the step counts; that it is not is an event."""
    await recording.settle()
    step: StepRecord | None = change.get("step")
    if recording.failure is not None and step is not None and not recording.told:
        recording.told = True
        step["events"].append(event_record(EventKind.LOGGING_STOPPED, step["chunk_index"], recording.failure))


def _is_seen(context: ReaderContext, config: RunnableConfig | None) -> bool:
    """Whether checkpoints or callbacks would tell a superstep that has several steps in it."""
    checkpointer = (config or {}).get("configurable", {}).get(CHECKPOINTER)
    return checkpointer is not None or observed(context, config) is not context


@dataclass(frozen=True)
class _Node(Runnable[ReaderState, Change]):
    """A step as a graph node: finds its context, reports progress, and says where in the read an error happened."""

    step: Step
    follows_itself: Callable[[ReaderState], bool] | None = None

    async def ainvoke(self, input: ReaderState, config: RunnableConfig | None = None, **kwargs: Any) -> Change:  # noqa: A002
        runtime = get_runtime(ReaderContext)
        context, state = runtime.context, input
        change = total = await self._step(state, runtime, config)
        if self.follows_itself is None or context.pass_by is None or _is_seen(context, config):
            return change
        while self.follows_itself(state := cast("ReaderState", {**state, **change})):
            context.pass_by(change)
            # As between supersteps, others have their turn, though the policy and all else may never wait.
            await asyncio.sleep(0)
            change = await self._step(state, runtime, config)
            total = {**total, **change}
        return total

    def invoke(self, input: ReaderState, config: RunnableConfig | None = None, **kwargs: Any) -> Change:  # noqa: A002
        runtime = get_runtime(ReaderContext)
        change = run_sync(self._run(input, runtime.context, config))
        self._report(change, input, runtime.stream_writer)
        return change

    async def _step(self, state: ReaderState, runtime: Runtime[ReaderContext], config: RunnableConfig | None) -> Change:
        change = await self._run(state, runtime.context, config)
        self._report(change, state, runtime.stream_writer)
        return change

    async def _run(self, state: ReaderState, context: ReaderContext, config: RunnableConfig | None) -> Change:
        recording = context.meter.recording
        if recording is not None:
            recording.trace = trace_ids(config)
        try:
            change = await self.step(state, observed(context, config))
        except Exception as error:
            if recording is not None:
                recording.stop()
                await recording.settle()
            if isinstance(error, MemAgentError):
                error.run_id = error.run_id or state.get("run_id")
                if error.chunk_index is None and (span := state.get("span")):
                    error.chunk_index = span["index"]
            raise
        if recording is not None:
            await _settle(recording, change)
        return change

    def _report(self, change: Change, state: ReaderState, write: Callable[[Any], None]) -> None:
        if (step := cast("StepRecord | None", change.get("step"))) is not None:
            write(
                {
                    "type": f"memagent.{step['type']}",
                    "run_id": state.get("run_id"),
                    "step": step,
                    "memory": change.get("memory", state.get("memory", "")),
                    "answer": change.get("answer"),
                }
            )


@dataclass(frozen=True)
class _Route(Runnable[ReaderState, str]):
    choose: Route
    name: str | None = None

    async def ainvoke(self, input: ReaderState, config: RunnableConfig | None = None, **kwargs: Any) -> str:  # noqa: A002
        return self.choose(input)

    def invoke(self, input: ReaderState, config: RunnableConfig | None = None, **kwargs: Any) -> str:  # noqa: A002
        return self.choose(input)


def as_runnable(
    step: Step, *, follows_itself: Callable[[ReaderState], bool] | None = None
) -> Runnable[ReaderState, Change]:
    """A graph node that runs `step` with the graph's `ReaderContext`.

    Args:
        step: the step.
        follows_itself: whether the state that it leaves leads to the same node again; as the graph's edges say.
    """
    return _Node(step, follows_itself)


def as_route(choose: Route) -> Runnable[ReaderState, str]:
    """A conditional edge. LangGraph would call a plain function in a thread, at every chunk; `choose` is too quick."""
    return _Route(choose, choose.__name__)
