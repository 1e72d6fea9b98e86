"""Graph nodes that run a strategy's steps, with their context and the accounting around them.

The node counts cost and chunks, logs the end of a run, reports calls to streams, and adds run and chunk to errors. It
works with `invoke` and `ainvoke`.

A superstep of LangGraph needs nearly as much processor time as the rest of the work for a chunk. Supersteps make the
state between two steps available to checkpoints, callbacks and streams. If a read has none of them, a `LoopNode` runs a
loop of two steps within one superstep. With 128 concurrent reads, this reads a tenth more chunks per second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.channels import BinaryOperatorAggregate
from langgraph.runtime import Runtime, get_runtime

from memagent_graph.concurrency.background import run_sync
from memagent_graph.errors import MemAgentError, StrategyError
from memagent_graph.events import EventKind, ReadEvent
from memagent_graph.reading.execution import Execution, ProcessorTurn
from memagent_graph.reading.steps import Change, Route, Step, StepContext
from memagent_graph.reading.tracing import get_trace_ids, observe_policy
from memagent_graph.trace import Call, Writes, pack_call, unpack_calls


@dataclass(frozen=True)
class StepNode(Runnable[Any, Change]):
    """A step as a graph node."""

    node: str
    step: Step
    channels: Mapping[str, Any] = field(repr=False)
    """The channels of the strategy's state. A change of another key is refused. Filled while the graph is wired."""

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Change:  # noqa: A002, D102
        return await self.run(input, get_runtime(Execution), config)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Change:  # noqa: A002, D102
        runtime = get_runtime(Execution)
        return run_sync(self.run(input, runtime, config), runtime.context.cancellation)

    async def run(self, state: Any, runtime: Runtime[Execution], config: RunnableConfig | None) -> Change:
        """Run the step and report its calls."""
        execution = runtime.context
        trunk, branches = nullcontext(execution.processor_turn), execution.branches
        async with branches.run_branch(execution.reader_context.concurrency) if state.get("branch") else trunk as turn:
            return await self._run_step(state, runtime, config, turn)

    async def _run_step(
        self, state: Any, runtime: Runtime[Execution], config: RunnableConfig | None, turn: ProcessorTurn
    ) -> Change:
        execution, recording, context = runtime.context, runtime.context.recording, runtime.context.reader_context
        trace = {} if recording is None else get_trace_ids(config)
        step = StepContext(state, observe_policy(context, config), execution, self.node, turn, trace)
        start_time = asyncio.get_running_loop().time()
        try:
            change = await self.step(state, step)
            if unknown := [key for key in change if key not in self.channels]:
                raise StrategyError(
                    f"the step {self.node!r} changes {unknown[0]!r}, which the strategy's state class does not have",
                    hint="Add it to the state class, with a reducer if several branches write it.",
                )
        except Exception as error:
            if recording is not None:
                await recording.settle(failed=True)
            if isinstance(error, MemAgentError):
                _locate_error(error, state, step.chunk_index)
            raise
        end_time = asyncio.get_running_loop().time()
        seconds = end_time - max(start_time, execution.counted_until)  # branches run at the same time
        execution.counted_until = end_time
        if recording is not None:
            if reason := change.get("stop_reason"):
                recording.end(state.get("run_id", ""), reason, change.get("answer"))
            await recording.settle()
            if recording.failure is not None and step.calls and not recording.is_reported:
                recording.is_reported = True
                event = ReadEvent(EventKind.LOGGING_STOPPED, step.chunk_index, recording.failure)
                step.calls[-1] = replace(step.calls[-1], events=(*step.calls[-1].events, event))
        if step.chunk_count and "span" in self.channels:
            change = {"span": None, **change}
        change = {
            **change,
            **({"usage": {**step.cost, "seconds": seconds}} if step.cost else {}),
            **({"steps": [pack_call(call, change.get("memory")) for call in step.calls]} if step.calls else {}),
            **({"tips": step.tips} if step.tips else {}),
            **({"chunks_read": step.chunk_count} if step.chunk_count else {}),
        }
        if context.uses_previous_calls:
            execution.calls += unpack_calls(change.get("steps", ()), change)
        execution.chunk_count += step.chunk_count
        _stream_calls(change, step.calls, state, runtime.stream_writer)
        return change


@dataclass(frozen=True)
class LoopNode(StepNode):
    """The second node of a loop. If nothing observes the read, it runs both steps in turn until the loop ends.

    The result is the same as with supersteps.
    """

    first_node: StepNode
    routes: Mapping[str, Route] = field(repr=False)
    """The conditional edges, by their start node. Filled while the graph is wired."""

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Change:  # noqa: A002, D102
        runtime = get_runtime(Execution)
        execution, context = runtime.context, runtime.context.reader_context
        change = await self.run(input, runtime, config)
        is_observed = execution.has_checkpoints or observe_policy(context, config) is not context
        if context.on_hidden_update is None or is_observed:  # checkpoints or callbacks need the supersteps
            return change
        state, total_change = dict(input), dict[str, Any]()
        first_route, own_route = self.routes[self.first_node.node], self.routes.get(self.node)
        while True:
            self._merge(change, state, total_change)
            if execution.find_reached_limit() or (own_route and own_route(state) != self.first_node.node):
                return total_change
            try:
                first_change = await self.first_node.run(state, runtime, config)
            except MemAgentError:
                return total_change  # the graph runs this step again, and fails with it
            self._merge(first_change, state)
            if first_route(state) != self.node:
                return total_change  # the graph runs this step again, and follows its route
            context.on_hidden_update(change)
            # Let other tasks run, as between supersteps, even if the policy never waits.
            await asyncio.sleep(0)
            self._merge(first_change, total_change)
            change = await self.run(state, runtime, config)

    def _merge(self, change: Change, *states: dict[str, Any]) -> None:
        """Apply a change to a state, or to earlier changes, with the reducers of the channels, as the graph does."""
        for key, value in change.items():
            channel = self.channels[key]
            reducer = channel.operator if type(channel) is BinaryOperatorAggregate else None
            for state in states:
                old_value = state.get(key) if reducer else None
                state[key] = value if old_value is None or reducer is None else reducer(old_value, value)


def _locate_error(error: MemAgentError, state: Mapping[str, Any], chunk_index: int | None) -> None:
    """Add run, chunk and branch to an error."""
    error.run_id = error.run_id or state.get("run_id")
    if error.chunk_index is None:
        error.chunk_index = span["index"] if (span := state.get("span")) else chunk_index
    if name := state.get("branch"):
        error.branch = error.branch or name


def _stream_calls(change: Change, calls: Sequence[Call], state: Any, write: Callable[[Any], None]) -> None:
    """Send the calls of a step to custom streams."""
    for call in calls:
        is_answer = call.writes is Writes.ANSWER
        progress = 1.0 if is_answer or state.get("earlier_chunks") else None
        if progress is None and (size := state["document"]["size"]) and call.reads:
            progress = min(1.0, call.extent_values["end_byte"] / size)
        write(
            {
                "type": "memagent.memory_update" if call.writes is Writes.MEMORY else f"memagent.{call.writes.value}",
                "run_id": state.get("run_id"),
                "question": state["question"],
                "chunk_index": call.chunk_index,
                "progress": progress,
                "memory": state.get("memory", "") if is_answer else call.text,
                "answer": change.get("answer") if is_answer else None,
            }
        )


@dataclass(frozen=True)
class RouteNode(Runnable[Any, Any]):
    """A conditional edge. LangGraph would call a plain function in a thread; `choose` is too fast for that."""

    choose: Route
    name: str | None = None

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002, D102
        return self.choose(input)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002, D102
        return self.choose(input)
