"""A run's past, read from its checkpoints: the memory after every chunk, and how to change it.

Time travel follows the checkpoints' parents: after an edit a thread holds two branches, and only the one that leads to
the newest checkpoint still counts.
"""

from __future__ import annotations

from langchain_core.runnables import RunnableConfig
from langgraph.types import StateSnapshot

from memagent_graph.errors import RunError, RunNotFoundError
from memagent_graph.reading.graph import ReaderGraph
from memagent_graph.reading.state import event_record
from memagent_graph.reading.state_views import update_from_step
from memagent_graph.results import EventKind, MemoryUpdate


def thread(run_id: str) -> RunnableConfig:
    """The config under which a run's checkpoints are kept."""
    return {"configurable": {"thread_id": run_id}}


async def newest_snapshot(graph: ReaderGraph, run_id: str) -> StateSnapshot:
    """The run's newest state.

    Raises:
        RunNotFoundError: there is none.
        RunError: the graph has no checkpointer.
    """
    if not graph.checkpointer:
        raise RunError(
            "this reader saves no checkpoints, so runs cannot be found again",
            hint='Make it with checkpoints, as in MemAgent(..., checkpoints="runs.sqlite").',
        )
    snapshot = await graph.aget_state(thread(run_id))
    if not snapshot.values.get("document"):
        raise RunNotFoundError(
            f"the checkpoints hold no run {run_id!r}", hint="Check the id, and the file that --checkpoints names."
        )
    return snapshot


async def memory_updates(graph: ReaderGraph, run_id: str) -> list[MemoryUpdate]:
    """The memory after every chunk that leads to the newest state, in order."""
    snapshots = reversed(await _lineage(graph, run_id))
    return [update_from_step(snapshot.values["step"], snapshot.values["memory"]) for snapshot in snapshots]


async def edit_memory(graph: ReaderGraph, run_id: str, chunk: int, text: str) -> None:
    """Branch off behind `chunk` with `text` as the memory; the branch becomes the run's newest state.

    Raises:
        RunError: the run has not read that chunk, or the text is longer than the memory budget.
    """
    context = graph.reader_context
    if (tokens := context.tokenizer.count(text)) > context.budget.memory_tokens:
        raise RunError(
            f"the text has {tokens} tokens and a memory at most {context.budget.memory_tokens}",
            hint="Shorten it.",
            run_id=run_id,
        )
    lineage = await _lineage(graph, run_id)
    for snapshot in lineage:
        step = snapshot.values["step"]
        if step["chunk_index"] == chunk:
            edited = event_record(EventKind.MEMORY_EDITED, chunk, "a person replaced the memory")
            change = {
                "memory": text,
                "step": {**step, "changed": True, "events": [*step["events"], edited]},
                "stop_reason": None,
            }
            await graph.aupdate_state(snapshot.config, change, as_node="update_memory")
            return
    raise RunError(
        f"the run has not read chunk {chunk}; it has read {len(lineage)}",
        hint="Chunks are counted from 0.",
        run_id=run_id,
    )


async def _lineage(graph: ReaderGraph, run_id: str) -> list[StateSnapshot]:
    """The checkpoints behind a memory update that lead to the newest one, newest first.

    An edited chunk has two such checkpoints in line, and the newer one counts. An earlier run under the same id is
    another one: the line ends where this one began.
    """
    found: dict[int, StateSnapshot] = {}
    wanted: str | None = None
    async for snapshot in graph.aget_state_history(thread(run_id)):
        if wanted is not None and snapshot.config["configurable"]["checkpoint_id"] != wanted:
            continue
        parent = snapshot.parent_config
        wanted = parent["configurable"]["checkpoint_id"] if parent else ""
        if (snapshot.metadata or {}).get("source") == "input":
            break
        step = snapshot.values.get("step")
        if step is not None and step["type"] == "memory_update":
            found.setdefault(step["chunk_index"], snapshot)
    return list(found.values())
