"""The steps that every strategy is wired from: read a chunk, update the memory, answer.

Each step is a pure-looking coroutine from tracked state to a change of it; all input and output goes through the
`ReaderContext`. `as_runnable` makes a step a graph node that works under both `invoke` and `ainvoke`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.runtime import get_runtime

from memagent_graph.background import run_sync
from memagent_graph.chunking import Chunk, Chunker, Cursor, start_cursor
from memagent_graph.errors import MemAgentError
from memagent_graph.policy import Completion, FinishReason, Messages, TokenUsage, strip_reasoning
from memagent_graph.results import EventKind, StopReason, UpdateRule
from memagent_graph.state import (
    NO_COST,
    ChunkSpan,
    Counters,
    EventRecord,
    ReaderContext,
    ReaderState,
    StepRecord,
    event_record,
    new_run_id,
)

Change: TypeAlias = dict[str, Any]
"""What a step changes in the state."""
Step: TypeAlias = Callable[[ReaderState, ReaderContext], Awaitable[Change]]
Route: TypeAlias = Callable[[ReaderState], str]
"""Names the node that follows."""


async def open_document(state: ReaderState, context: ReaderContext) -> Change:
    """Begin a run: set everything that an earlier run on the same thread may have left behind."""
    return {
        "run_id": state.get("run_id") or new_run_id(),
        "settings": context.settings,
        "cursor": start_cursor(),
        "span": None,
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
    drafts = _Drafts(context, span["index"])
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
    drafts = _Drafts(context, None)
    text = await drafts.answer(messages)
    extracted = context.prompts.extract_answer(text)
    if extracted is None and text:
        drafts.note(EventKind.UNBOXED_ANSWER, "the completion has no \\boxed{...}; it was taken whole")
        extracted = text
    reason = StopReason.ANSWERED if text else StopReason.NO_ANSWER
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


class _Drafts:
    """The completions asked for in one step: what they cost, and which of them counts."""

    def __init__(self, context: ReaderContext, chunk_index: int | None) -> None:
        self._context = context
        self._chunk_index = chunk_index
        self.events: list[EventRecord] = []
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = self.turns = 0
        self.flops = 0.0
        self.finish_reason = ""
        self.model = ""
        self.raw_text = ""

    def note(self, kind: EventKind, detail: str, rule: UpdateRule | None = None) -> None:
        self.events.append(event_record(kind, self._chunk_index, detail, rule))

    async def memory(self, messages: Messages, previous: str) -> str:
        """The new memory, by the rules for what the policy wrote."""
        rules = self._context.rules
        for remaining in range(rules.retries, -1, -1):
            completion = await self._ask(messages, self._context.budget.memory_tokens)
            text = strip_reasoning(completion.text).strip()
            trouble = self._trouble(completion, text)
            if trouble is None:
                return text
            kind, detail = trouble
            rule = rules.rule_for(kind)
            if rule is UpdateRule.RETRY and remaining:
                self.note(kind, detail, rule)
                self.note(EventKind.RESAMPLED, f"{remaining} more tries")
                continue
            if rule is UpdateRule.ACCEPT:
                self.note(kind, detail, rule)
                return self._cut(text)
            self.note(kind, detail, UpdateRule.KEEP_PREVIOUS)
            return previous
        raise AssertionError("the last try always returns")

    async def answer(self, messages: Messages) -> str:
        """The answer completion without its reasoning; empty when the policy keeps writing nothing, or refuses."""
        for remaining in range(self._context.rules.retries, -1, -1):
            completion = await self._ask(messages, self._context.budget.answer_tokens)
            text = strip_reasoning(completion.text).strip()
            if completion.finish_reason is FinishReason.REFUSED:
                self.note(EventKind.REFUSED, "the policy refused to answer")
                return ""
            if completion.finish_reason is FinishReason.LENGTH:
                self.note(EventKind.TRUNCATED, f"the answer was cut at {self._context.budget.answer_tokens} tokens")
            if text:
                return text
            self.note(EventKind.EMPTY, "the policy wrote no answer")
            if remaining:
                self.note(EventKind.RESAMPLED, f"{remaining} more tries")
        return ""

    def add_to(self, total: Counters, seconds: float, document_tokens: int = 0) -> Counters:
        """The running totals with this step's cost added."""
        return Counters(
            prompt_tokens=total["prompt_tokens"] + self.prompt_tokens,
            completion_tokens=total["completion_tokens"] + self.completion_tokens,
            cached_tokens=total["cached_tokens"] + self.cached_tokens,
            turns=total["turns"] + self.turns,
            seconds=total["seconds"] + seconds,
            flops=total["flops"] + self.flops,
            document_tokens=total["document_tokens"] + document_tokens,
        )

    async def _ask(self, messages: Messages, max_tokens: int) -> Completion:
        context = self._context
        sampling = context.sampling.with_max_tokens(max_tokens)
        context.meter.turn.end()
        completion = await context.policy.complete(messages, sampling)
        await context.meter.turn.begin()
        usage = completion.usage or self._count(messages, completion)
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += usage.cached_tokens
        self.turns += 1
        context.meter.tokens += usage.prompt_tokens + usage.completion_tokens
        if context.shape is not None:
            self.flops += context.shape.forward_flops(usage.prompt_tokens, usage.completion_tokens)
        if completion.retries:
            self.note(EventKind.REQUEST_RETRIED, f"the request was sent {completion.retries + 1} times")
        self.finish_reason, self.model, self.raw_text = (
            completion.finish_reason.value,
            completion.model,
            completion.text,
        )
        return completion

    def _count(self, messages: Messages, completion: Completion) -> TokenUsage:
        """Our own count, for servers that report none."""
        count = self._context.tokenizer.count
        return TokenUsage(sum(count(message["content"]) for message in messages), count(completion.text))

    def _trouble(self, completion: Completion, text: str) -> tuple[EventKind, str] | None:
        bound = self._context.budget.memory_tokens
        if completion.finish_reason is FinishReason.REFUSED:
            return EventKind.REFUSED, "the policy refused to update the memory"
        if not text:
            return EventKind.EMPTY, "the policy wrote no memory"
        if completion.finish_reason is FinishReason.LENGTH:
            return EventKind.TRUNCATED, f"the memory was cut off at {bound} tokens"
        written = completion.usage.completion_tokens if completion.usage else None
        if (written is None or written > bound) and (tokens := self._context.tokenizer.count(text)) > bound:
            return EventKind.OVERLONG, f"the memory has {tokens} tokens, {tokens - bound} beyond its budget"
        return None

    def _cut(self, text: str) -> str:
        tokenizer, bound = self._context.tokenizer, self._context.budget.memory_tokens
        ids = tokenizer.encode(text)
        if len(ids) <= bound:
            return text
        lengths = (tokenizer.prefix_chars(text, ids, kept) for kept in range(bound, 0, -1))
        return text[: next((length for length in lengths if length is not None), 0)].rstrip()


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


@dataclass(frozen=True)
class _Node(Runnable[ReaderState, Change]):
    """A step as a graph node: finds its context, reports progress, and says where in the read an error happened."""

    step: Step

    async def ainvoke(self, input: ReaderState, config: RunnableConfig | None = None, **kwargs: Any) -> Change:  # noqa: A002
        runtime = get_runtime(ReaderContext)
        change = await self._run(input, runtime.context)
        self._report(change, input, runtime.stream_writer)
        return change

    def invoke(self, input: ReaderState, config: RunnableConfig | None = None, **kwargs: Any) -> Change:  # noqa: A002
        runtime = get_runtime(ReaderContext)
        change = run_sync(self._run(input, runtime.context))
        self._report(change, input, runtime.stream_writer)
        return change

    async def _run(self, state: ReaderState, context: ReaderContext) -> Change:
        try:
            return await self.step(state, context)
        except MemAgentError as error:
            error.run_id = error.run_id or state.get("run_id")
            if error.chunk_index is None and (span := state.get("span")):
                error.chunk_index = span["index"]
            raise

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


def as_runnable(step: Step) -> Runnable[ReaderState, Change]:
    """A graph node that runs `step` with the graph's `ReaderContext`."""
    return _Node(step)


def as_route(choose: Route) -> Runnable[ReaderState, str]:
    """A conditional edge. LangGraph would call a plain function in a thread, at every chunk; `choose` is too quick."""
    return _Route(choose, choose.__name__)
