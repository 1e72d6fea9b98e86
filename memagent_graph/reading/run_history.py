"""The history of a run: its result from the last state, its checkpoints, edits of its memories.

Time travel follows the parents of checkpoints. After an edit a thread has two branches, and only the branch of the
newest checkpoint counts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from inspect import isawaitable
from typing import Any, TypeVar

import msgspec
from langchain_core.runnables import RunnableConfig
from langgraph.types import StateSnapshot

from memagent_graph.errors import CheckpointError, MemAgentError, RunError, RunMismatchError, RunNotFoundError
from memagent_graph.events import EventKind, ReadEvent, StopReason
from memagent_graph.reading.graph import ReaderGraph
from memagent_graph.reading.state import ReaderContext, ReaderState
from memagent_graph.results import ReadResult, Usage
from memagent_graph.run_log.records import describe_edit
from memagent_graph.trace import Call, Trace, Writes, pack_call, unpack_calls

T = TypeVar("T")


def make_result_from_state(graph: ReaderGraph, state: Mapping[str, Any], trace: Trace) -> ReadResult:
    """Return a run's result from its last state. After an early stop, its memory combines those of all branches."""
    context, stop_reason = graph.reader_context, StopReason(state["stop_reason"])
    response_format = context.response_format
    return ReadResult(
        run_id=state["run_id"],
        question=state["question"],
        document=state["document"],
        model=(trace.calls[-1].completion.model if trace.calls else "") or context.policy.name,
        answer=state.get("answer"),
        raw_answer=state.get("raw_answer"),
        memory=graph.strategy.compute_current_memory(state, context)
        if stop_reason.resumable
        else state.get("memory") or "",
        stop_reason=stop_reason,
        usage=_make_usage(state, trace, context),
        chunks_read=state.get("chunks_read", 0),
        updates=tuple(trace.updates),
        strategy=context.strategy,
        strategy_fingerprint=context.strategy_fingerprint,
        trace=trace,
        store_root=context.store.root,
        value=response_format.parse_value(state.get("answer")) if response_format else None,
        response_format=response_format.schema if response_format else None,
    )


def _make_usage(state: Mapping[str, Any], trace: Trace, context: ReaderContext) -> Usage:
    totals: Any = state.get("usage") or {}
    if context.shape is None:
        return Usage(**{**totals, "flops": None})
    budget = context.budget
    tokens = _estimate_document_tokens(state, trace, totals.get("document_tokens", 0)) + budget.question_tokens
    full_context_flops = context.shape.forward_flops(tokens, budget.answer_tokens)
    return Usage(**{"flops": 0.0, **totals, "full_context_flops": full_context_flops})


def _estimate_document_tokens(state: Mapping[str, Any], trace: Trace, counted_tokens: int) -> int:
    """Return the number of the document's tokens, estimated from its bytes if it was not read to the end."""
    chunks = {call.chunk_index: call.reads[0] for call in trace.calls if call.chunk_index is not None}
    if state.get("chunks_read", 0) in {0, len(chunks)} and state["stop_reason"] != StopReason.ENOUGH:
        return counted_tokens
    tokens = sum(span.tokens for span in chunks.values())
    byte_count = sum(span.end_byte - span.start_byte for span in chunks.values())
    return round(tokens * max(1.0, (state["document"]["size"] or 0) / max(1, byte_count)))


async def await_result(
    stream: AsyncGenerator[T | ReadResult, None], report: Callable[[T], Awaitable[None] | None] | None = None
) -> ReadResult:
    """Return the result at the end of a read's stream. Updates are reported as they arrive."""
    async with aclosing(stream):
        async for item in stream:
            if isinstance(item, ReadResult):
                return item
            if report is not None and isawaitable(delivery := report(item)):
                await delivery
    raise AssertionError("a stream ends with its result")


def require_results(outcomes: list[ReadResult | Exception]) -> list[ReadResult]:
    """Return the results if no read failed.

    Raises:
        Exception: the first failure.
    """
    if failures := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
        if len(failures) > 1:
            failures[0].add_note(f"{len(failures)} of {len(outcomes)} reads failed; this is the first.")
        raise failures[0]
    return [outcome for outcome in outcomes if isinstance(outcome, ReadResult)]


def make_thread_config(run_id: str) -> RunnableConfig:
    """Return the config of a run's checkpoints."""
    return {"configurable": {"thread_id": run_id}}


async def load_newest_snapshot(graph: ReaderGraph, run_id: str) -> StateSnapshot:
    """Return the newest checkpoint of a run.

    Raises:
        RunNotFoundError: the run has no state.
        RunMismatchError: an earlier version of this package wrote the state.
        CheckpointError: another program wrote it.
        RunError: the graph has no checkpointer.
    """
    if not graph.checkpointer:
        raise RunError(
            "this reader does not save checkpoints, so runs cannot be resumed",
            hint='Make it with checkpoints, as in MemAgent(..., checkpoints="checkpoints.sqlite").',
        )
    try:
        snapshot = await graph.aget_state(make_thread_config(run_id))
        if snapshot.values.get("document"):
            schema = graph.builder.state_schema
            is_own_schema = schema.__module__.partition(".")[0] == __name__.partition(".")[0]
            values = {name: value for name, value in snapshot.values.items() if value is not None}
            msgspec.convert(values, schema if is_own_schema else ReaderState)  # others may use any type
            if values.get("run_id") != run_id:
                raise ValueError("they belong to another run")
            if values.get("stop_reason"):
                StopReason(values["stop_reason"])
    except MemAgentError:
        raise
    except Exception as error:  # LangGraph can raise anything for the state of another program
        raise CheckpointError(
            f"the checkpoints hold no state that this reader can continue: {error}",
            hint="They are damaged, or another program wrote them. Read the document again.",
            run_id=run_id,
        ) from error
    if not snapshot.values.get("document"):
        raise RunNotFoundError(
            f"the checkpoints hold no run {run_id!r}",
            hint="Check the id, and that the checkpoints are the same (--checkpoints).",
        )
    settings = snapshot.values.get("settings")  # missing if the run was killed before its first step
    if settings and settings.count(":") < graph.reader_context.settings.count(":"):
        raise RunMismatchError(
            "an earlier version of this package began the run, and this one cannot continue its checkpoints",
            hint="Read the document again; `memagent show` has the memories so far.",
            run_id=run_id,
        )
    return snapshot


async def load_trace_so_far(graph: ReaderGraph, run_id: str) -> Trace:
    """Return the calls that lead to the newest state, in order."""
    calls: list[Call] = []
    document_bytes: int | None = None
    for snapshot in reversed(await _find_lineage(graph, run_id)):
        calls += unpack_calls(snapshot.values["steps"], snapshot.values)
        document_bytes = snapshot.values["document"]["size"]
    return Trace({call.id: call for call in calls}.values(), document_bytes)


async def edit_memory(
    graph: ReaderGraph, run_id: str, chunk_index: int, text: str, branch: str | None = None, author: str | None = None
) -> Call:
    """Replace the memory after `chunk_index` by `text`, as a new branch of checkpoints: the run's newest state.

    Returns:
        The call whose memory was replaced.

    Raises:
        RunError: the run has not read that chunk, or the text is longer than the memory budget.
    """
    context = graph.reader_context
    if (tokens := context.count_shown_tokens(text)) > context.budget.memory_tokens:
        raise RunError(
            f"the text has {tokens} tokens; the memory budget is {context.budget.memory_tokens}",
            hint="Shorten it.",
            run_id=run_id,
        )
    lineage = await _find_lineage(graph, run_id)
    for snapshot in lineage:
        state = snapshot.values
        for index, call in reversed(list(enumerate(unpack_calls(state["steps"], state)))):
            if call.chunk_index != chunk_index or branch not in {None, call.branch}:
                continue
            events = (*call.events, ReadEvent(EventKind.MEMORY_EDITED, chunk_index, describe_edit(author)))
            edited_call = replace(call, writes=Writes.MEMORY, text=text, events=events)
            steps = [*state["steps"][:index], pack_call(edited_call), *state["steps"][index + 1 :]]
            change = {**graph.strategy.apply_edit(state, call, text), "steps": steps, "stop_reason": None}
            await graph.aupdate_state(snapshot.config, change, as_node=call.node)
            return call
    chunks_read = lineage[0].values.get("chunks_read", 0) if lineage else 0
    raise RunError(
        f"the run has not read chunk {chunk_index}; it has read {chunks_read}",
        hint="Chunks are counted from 0.",
        run_id=run_id,
    )


async def _find_lineage(graph: ReaderGraph, run_id: str) -> list[StateSnapshot]:
    """Return the checkpoints after a step that lead to the newest one, newest first.

    The checkpoints of an earlier run with the same id are not part of it.
    """
    snapshots: list[StateSnapshot] = []
    parent_id: str | None = None
    async for snapshot in graph.aget_state_history(make_thread_config(run_id)):
        if parent_id is not None and snapshot.config["configurable"]["checkpoint_id"] != parent_id:
            continue  # it belongs to a branch that an edit abandoned
        parent = snapshot.parent_config
        parent_id = parent["configurable"]["checkpoint_id"] if parent else ""
        if (snapshot.metadata or {}).get("source") == "input":
            break
        if snapshot.values.get("steps"):
            snapshots.append(snapshot)
    return snapshots
