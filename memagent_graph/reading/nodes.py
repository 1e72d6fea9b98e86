"""A strategy's step as a node of the graph: its context, and the accounting around it.

A step is a coroutine from the state to a change of it. Through its `StepContext` it calls the policy and reads the
document; the node around it counts cost and chunks, logs calls, and adds the place to errors. It
works with `invoke` and `ainvoke`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.runtime import Runtime, get_runtime
from langgraph.types import Send

from memagent_graph.concurrency.background import run_sync
from memagent_graph.concurrency.fair_turns import Turn
from memagent_graph.documents.chunking import Chunk, Chunker, Cursor
from memagent_graph.errors import MemAgentError, StrategyError
from memagent_graph.events import EventKind, StopReason
from memagent_graph.reading.ask import Ask, Place, Reply, beginning
from memagent_graph.reading.state import (
    ChunkSpan,
    Counters,
    ReaderContext,
    StepRecord,
    add_cost,
    event_record,
    no_cost,
    span_of,
)
from memagent_graph.reading.state_views import trace_steps
from memagent_graph.reading.structured import ERROR_TOKENS
from memagent_graph.reading.tracing import observed, trace_ids
from memagent_graph.roles import REPAIR, Role
from memagent_graph.trace import TraceStep, Writes

Change: TypeAlias = dict[str, Any]
"""What a step changes in the state."""
State: TypeAlias = Any
"""A strategy's state, a TypedDict, or the values that a branch was sent."""
Step: TypeAlias = Callable[[State, "StepContext"], Awaitable[Change]]
Route: TypeAlias = Callable[[State], "str | Sequence[str | Send]"]
"""Chooses the next node, or the next branches."""


@dataclass
class StepContext:
    """The context of a step. There is one for each execution."""

    state: State
    context: ReaderContext
    """Policy, tokenizer, store, prompts and budgets."""
    node: str
    turn: Turn = field(repr=False)
    trace: Mapping[str, str] = field(default_factory=dict)
    """The ids of the trace around it, for the log."""
    records: list[StepRecord] = field(default_factory=list)
    cost: Counters = field(default_factory=no_cost)
    chunks: int = 0
    tips: dict[str, str] = field(default_factory=dict)
    reading: int | None = None
    """The number of the chunk that was shown to the policy last, for errors."""

    @property
    def branch(self) -> str:
        """The branch that the step belongs to; "" is the trunk."""
        name: str = self.state.get("branch") or ""
        return name

    async def ask(
        self,
        role: Role,
        *,
        previous: str = "",
        reads: Sequence[ChunkSpan] = (),
        parents: Iterable[str] | None = None,
        slot: int | None = None,
        question: str | None = None,
        note: tuple[EventKind, str] | None = None,
        **fields: str,
    ) -> Reply:
        """Call the policy in a role; the reader's rules decide on its reply, and it is logged.

        A structured answer that does not have its form is repaired; see `memagent_graph.reading.structured`.

        Args:
            role: one of the strategy's.
            previous: the memory that is kept if no reply is accepted.
            reads: the chunks whose text is in the fields.
            parents: the ids of the steps whose output is in the fields; if left out, the branch's newest, except for
                decisions that read nothing.
            slot: its place among the branch's steps of that role; by default the number of the first chunk it reads,
                or 0. It must be unique among them.
            question: the text of {prompt}; the run's question if left out.
            note: an event that belongs to it, with its detail.
            fields: the other fields of the role's template.

        Raises:
            PolicyError: the policy could not be called.
            StrategyError: the strategy does not list the role.
        """
        prompts = self.context.prompts
        if not prompts.has(role.name):
            raise StrategyError(
                f"the role {role.name!r} has no template here", hint="List it in the strategy's `roles`."
            )
        continues = parents is None
        if parents is None:
            tips = {**self.state.get("tips", {}), **self.tips}
            tip = tips.get(self.branch) or tips.get("")
            parents = (tip,) if tip else ()
        if slot is None:
            slot = reads[0]["index"] if reads else 0
        place = Place(self.node, self.branch, slot, tuple(parents), continues, tuple(reads))
        reply = await self._asked(role, fields, place, previous=previous, question=question, note=note)
        return await self._in_form(reply, role, fields, slot, question) if reply.invalid else reply

    async def _asked(
        self,
        role: Role,
        fields: Mapping[str, str],
        place: Place,
        *,
        previous: str = "",
        question: str | None = None,
        note: tuple[EventKind, str] | None = None,
    ) -> Reply:
        """Call the policy in a role, once by the rules; the reply is recorded."""
        context = self.context
        asked = question or self.state["question"]
        if context.structure is not None:
            fields = {"schema": context.schema, **fields}
            if question is None and role.writes is not Writes.ANSWER:
                asked = context.question_shown(asked)
        self.reading = place.chunk_index
        messages = context.prompts.messages(role.name, asked, **fields)
        ask = Ask(self.state, context, role, messages, place, previous=previous, turn=self.turn, trace=self.trace)
        if note is not None:
            ask.note(*note)
        reply = await ask.reply()
        self.cost = add_cost(self.cost, ask.cost) if self.records else ask.cost
        self.records.append(ask.record(reply.text))
        if place.reads or role.writes is not Writes.DECISION:
            self.tips[self.branch] = ask.id
        return reply

    async def _in_form(
        self, reply: Reply, role: Role, fields: Mapping[str, str], slot: int, question: str | None
    ) -> Reply:
        """The reply after repairs: the first that has the form of a structured answer, or else the last one."""
        context, tries = self.context, self.context.rules.retries
        for number in range(tries if context.prompts.has(REPAIR.name) else 0):
            repair = {
                "memory": fields.get("memory", ""),
                "reply": beginning(context, reply.value or "", context.budget.answer_tokens),
                "error": beginning(context, reply.invalid or "", ERROR_TOKENS),
            }
            place = Place(self.node, self.branch, slot * tries + number, (reply.step,), continues=True)
            repaired = await self._asked(REPAIR, repair, place, question=question)
            reply = repaired if repaired.text else replace(reply, step=repaired.step)
            if not reply.invalid:
                break
        return reply

    def has_read(self, span: ChunkSpan) -> None:
        """Count a chunk as read, for limits, totals and progress. Call it once per chunk, after all calls for it.

        Then the next chunk can be chosen: the state's `span`, if there is one, becomes None.
        """
        self.chunks += 1
        self.count_document(span["tokens"])

    def count_document(self, tokens: int) -> None:
        """Count tokens of the document that the step processed, whether or not the policy was shown them."""
        self.cost = {**self.cost, "document_tokens": self.cost["document_tokens"] + tokens}

    def require_progress(self, pending: ChunkSpan) -> None:
        """Refuse to choose a chunk twice in one call, because that would never end.

        Raises:
            StrategyError: the step that reads chunks does not call `has_read`.
        """
        if self.context.meter.chosen_again == pending["index"]:
            raise StrategyError(
                f"chunk {pending['index']} was chosen twice but not read",
                hint="Call step.has_read(span) in the step that reads it.",
            )
        self.context.meter.chosen_again = pending["index"]

    def limit(self) -> StopReason | None:
        """The limit that stops the read here, if there is one; pass it to `stopped`."""
        return self.context.meter.exceeded(self.context.limits)

    def chunks_left(self, most: int) -> int:
        """How many chunks may be read before the limit, at most `most`."""
        limits, meter = self.context.limits, self.context.meter
        return most if limits.max_chunks is None else max(0, min(most, limits.max_chunks - meter.chunks))

    def stopped(self, reason: StopReason, chunk_index: int) -> Change:
        """The change that stops the run; it can be resumed."""
        if recording := self.context.meter.recording:
            recording.end(self.state.get("run_id", ""), reason.value, None)
        self.records.append(
            StepRecord(
                type="stopped",
                id="",
                node=self.node,
                branch=self.branch,
                role="",
                slot=chunk_index,
                parents=[],
                reads=[],
                text=None,
                changed=False,
                prompt_tokens=0,
                completion_tokens=0,
                seconds=0.0,
                finish_reason=reason.value,
                model="",
                events=[],
            )
        )
        return {"stop_reason": reason.value}

    def finished(self, reason: StopReason, answer: str | None) -> None:
        """Log how the run ended."""
        if recording := self.context.meter.recording:
            recording.end(self.state.get("run_id", ""), reason.value, answer)

    async def next_chunk(self, cursor: Cursor, *, to_read: bool = True) -> tuple[ChunkSpan, Cursor] | None:
        """The chunk at `cursor`, and where the next one begins; None at the document's end.

        If escaping makes a chunk longer than its budget, it is shortened.

        Args:
            cursor: where it begins.
            to_read: whether its text is needed soon, or only its place.

        Raises:
            DocumentError: the text is no longer in the store.
        """
        chunk = await self._chunker(self.context.budget.chunk_tokens).next_chunk(cursor)
        if chunk is None:
            return None
        fitting = await self._fitting(chunk, cursor)
        span = span_of(fitting, shortened=fitting is not chunk)
        if to_read and self.context.pace is not None:
            self.turn.end()
            await self.context.pace(self.state.get("chunks_read") or 0)
            await self.turn.begin()
        if to_read:
            self.context.meter.texts[span["index"]] = span, fitting.text
        return span, fitting.next

    async def past(self) -> list[TraceStep]:
        """The run's steps so far, in order; for strategies that set `looks_back`.

        Inside another graph, the steps before a resume come from the run's log; without a log they are missing.

        Raises:
            RunLogError: the log cannot be read.
        """
        context, here = self.context, self.context.meter.past
        before = context.done
        if before is None and context.run_log is not None and (recording := context.meter.recording):
            await recording.settle()
            if recording.failure is None:
                before = await asyncio.to_thread(context.run_log.trace, self.state["run_id"])
        known = {each.id for each in here}
        return [*(each for each in (before.steps if before else ()) if each.id not in known), *here]

    def text(self, span: ChunkSpan) -> str:
        """A chunk's text: as it was cut, or from the store after a resume.

        Raises:
            DocumentError: the text is no longer in the store.
        """
        chosen = self.context.meter.texts.pop(span["index"], None)
        if chosen is not None and chosen[0] == span:
            return chosen[1]
        return self.context.store.read(self.state["document"], span["start_byte"], span["end_byte"])

    def _chunker(self, chunk_tokens: int) -> Chunker:
        context, document = self.context, self.state["document"]
        key = document["key"], chunk_tokens
        if key not in context.meter.chunkers:
            chunker = Chunker(context.store, document, context.tokenizer, chunk_tokens, context.boundary)
            context.meter.chunkers[key] = chunker
        return context.meter.chunkers[key]

    async def _fitting(self, chunk: Chunk, cursor: Cursor) -> Chunk:
        """The chunk, or a shorter one if escaping made it longer than its budget."""
        context = self.context
        while (guarded := context.prompts.neutralise(chunk.text)) != chunk.text:
            if context.tokenizer.count(guarded) <= context.budget.chunk_tokens or chunk.tokens <= 1:
                break
            shorter = await self._chunker(max(1, chunk.tokens // 2)).next_chunk(cursor)
            if shorter is None:
                break
            chunk = shorter
        return chunk


def branch(node: str, state: Any, name: str, **values: Any) -> Send:
    """A branch for a route to send: `node` runs on these values, in parallel with the other branches.

    Args:
        node: the node's name.
        state: the state that the branch leaves from.
        name: its name; a name that was used before continues that branch.
        values: other values in its step's state, such as a chunk's span and the branch's memory so far.
    """
    tips = state.get("tips", {})
    shared = {key: state[key] for key in ("run_id", "question", "document", "chunks_read") if key in state}
    own = {each: tips[each] for each in ("", name) if each in tips}
    return Send(node, {**shared, "tips": own, "branch": name, **values})


@dataclass(frozen=True)
class StepNode(Runnable[Any, Change]):
    """A step as a graph node: it finds its context, counts its cost, and says in errors where they happened."""

    node: str
    step: Step
    channels: Mapping[str, Any] = field(repr=False, default_factory=dict)
    """The strategy's state keys; a change of another key is refused. Filled while the graph is wired."""

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Change:  # noqa: A002, D102
        return await self.run(input, get_runtime(ReaderContext), config)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Change:  # noqa: A002, D102
        runtime = get_runtime(ReaderContext)
        change = run_sync(self._changed(input, runtime.context, config), runtime.context.meter.cancellation)
        report(change, input, runtime.stream_writer)
        return change

    async def run(self, state: Any, runtime: Runtime[ReaderContext], config: RunnableConfig | None) -> Change:
        """Run the step and report its calls."""
        change = await self._changed(state, runtime.context, config)
        report(change, state, runtime.stream_writer)
        return change

    async def _changed(self, state: Any, context: ReaderContext, config: RunnableConfig | None) -> Change:
        if not state.get("branch"):
            return await self._executed(state, context, config, context.meter.turn)
        async with context.meter.branches.one(context.concurrency):
            turn = Turn()
            try:
                return await self._executed(state, context, config, turn)
            finally:
                turn.end()

    async def _executed(self, state: Any, context: ReaderContext, config: RunnableConfig | None, turn: Turn) -> Change:
        recording = context.meter.recording
        trace = {} if recording is None else trace_ids(config)
        step = StepContext(state, observed(context, config), self.node, turn, trace)
        begin = asyncio.get_running_loop().time()
        try:
            change = await self.step(state, step)
            self._require_channels(change)
        except Exception as error:
            if recording is not None:
                recording.stop()
                await recording.settle()
            if isinstance(error, MemAgentError):
                _place(error, state, step.reading)
            raise
        if step.chunks and "span" in self.channels:
            change = {"span": None, **change}
        if context.looks_back:
            context.meter.past += trace_steps(step.records, change)
        change = _with_accounts(change, step, asyncio.get_running_loop().time() - begin)
        context.meter.chunks += step.chunks
        if recording is not None:
            await recording.settle()
            if recording.failure is not None and step.records and not recording.reported:
                recording.reported = True
                newest = step.records[-1]
                chunk = newest["reads"][0]["index"] if newest["reads"] else None
                newest["events"].append(event_record(EventKind.LOGGING_STOPPED, chunk, recording.failure))
        return change

    def _require_channels(self, change: Mapping[str, Any]) -> None:
        if unknown := [key for key in change if key not in self.channels]:
            raise StrategyError(
                f"the step {self.node!r} changes {unknown[0]!r}, which the strategy's state class does not have",
                hint="Add it to the state class, with a reducer if several branches write it.",
            )


def _with_accounts(change: Change, step: StepContext, seconds: float) -> Change:
    """The change, with the step's calls and their cost."""
    if step.cost["turns"] or step.cost["document_tokens"]:
        change = {**change, "usage": {**step.cost, "seconds": seconds}}
    if not step.records and not step.chunks:
        return change
    for record in step.records:
        if record["text"] is not None and record["text"] == change.get("memory"):
            record["text"] = None
    return {
        **change,
        "steps": step.records,
        **({"tips": step.tips} if step.tips else {}),
        **({"chunks_read": step.chunks} if step.chunks else {}),
    }


def _place(error: MemAgentError, state: Mapping[str, Any], reading: int | None) -> None:
    """Add to an error where in the read it happened."""
    error.run_id = error.run_id or state.get("run_id")
    if error.chunk_index is None:
        error.chunk_index = span["index"] if (span := state.get("span")) else reading
    if name := state.get("branch"):
        error.branch = error.branch or name


def report(change: Change, state: Any, write: Callable[[Any], None]) -> None:
    """Send a step's records to callers that stream the graph's reports."""
    for record in change.get("steps", ()):
        text = record["text"] if record["text"] is not None else change.get("memory", state.get("memory", ""))
        answers = record["type"] == "answer"
        write(
            {
                "type": f"memagent.{record['type']}",
                "run_id": state.get("run_id"),
                "step": flat(record, state["document"]["size"]),
                "memory": state.get("memory", "") if answers or record["type"] == "stopped" else text,
                "answer": change.get("answer") if answers else None,
            }
        )


def flat(record: StepRecord, document_bytes: int | None) -> dict[str, Any]:
    """A record with the place of what it read, for streams."""
    reads = record["reads"]
    last = max(reads, key=lambda span: span["end_byte"], default=None)
    end_byte = last["end_byte"] if last else 0
    answers = record["type"] == "answer"
    stopped_at = record["slot"] if record["type"] == "stopped" else None
    return {
        **record,
        "chunk_index": reads[0]["index"] if reads and record["slot"] >= 0 else stopped_at,
        "start_char": reads[0]["start_char"] if reads else 0,
        "end_char": last["end_char"] if last else 0,
        "start_byte": reads[0]["start_byte"] if reads else 0,
        "end_byte": end_byte,
        "chunk_tokens": sum(span["tokens"] for span in reads),
        "progress": 1.0 if answers else min(1.0, end_byte / document_bytes) if document_bytes and reads else None,
    }


@dataclass(frozen=True)
class RouteNode(Runnable[Any, Any]):
    """A conditional edge. LangGraph would call a plain function in a thread; `choose` is too fast for that."""

    choose: Route
    name: str | None = None

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002, D102
        return self.choose(input)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002, D102
        return self.choose(input)
