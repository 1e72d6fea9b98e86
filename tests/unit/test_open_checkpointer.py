"""Checkpoint files: which states they keep, and the end of their threads if they are not closed."""

from __future__ import annotations

import asyncio
import gc
import operator
import sqlite3
import threading
import time
from contextlib import closing
from itertools import chain
from typing import Annotated, TypedDict

import pytest
from langgraph.channels import DeltaChannel
from langgraph.graph import END, StateGraph

from memagent_graph.storage.checkpoints import open_checkpointer


class _PlainState(TypedDict):
    numbers: Annotated[list[int], operator.add]


class _DeltaState(TypedDict):
    numbers: Annotated[list[int], DeltaChannel(lambda old, updates: [*old, *chain(*updates)], snapshot_frequency=3)]


async def _count_with_a_failure(path, schema: type, config) -> list[list[int]]:
    """Count to eight in a graph that fails once at five and is resumed; return the values in its history."""
    saver = await open_checkpointer(path)
    failures: list[int] = []

    async def append_number(state) -> dict[str, list[int]]:
        next_number = len(state["numbers"])
        if next_number == 5 and not failures:
            failures.append(next_number)
            raise ConnectionError
        return {"numbers": [next_number]}

    graph = StateGraph(schema)
    graph.add_node("count", append_number)
    graph.set_entry_point("count")
    graph.add_conditional_edges("count", lambda state: END if len(state["numbers"]) >= 8 else "count")
    compiled = graph.compile(checkpointer=saver)
    with pytest.raises(ConnectionError):
        await compiled.ainvoke({"numbers": []}, config, durability="sync")
    await compiled.ainvoke(None, config, durability="sync")
    configs = {len(entry.values["numbers"]): entry.config async for entry in compiled.aget_state_history(config)}
    fork = await compiled.aupdate_state(configs[4], {"numbers": [40]})
    assert (await compiled.aget_state(fork)).values["numbers"] == [0, 1, 2, 3, 40]
    history = [entry.values["numbers"] async for entry in compiled.aget_state_history(config)]
    await saver.aclose()
    return history


@pytest.mark.parametrize("schema", [_PlainState, _DeltaState])
async def test_every_state_can_be_loaded_after_writes_of_plain_channels_are_deleted(tmp_path, schema) -> None:
    path, config = tmp_path / "checkpoints.sqlite", {"configurable": {"thread_id": "t"}}
    history = await _count_with_a_failure(path, schema, config)
    assert history == [[0, 1, 2, 3, 40], *[list(range(length)) for length in range(8, -1, -1)], []]
    with closing(sqlite3.connect(path)) as connection:
        write_count = connection.execute("SELECT count(*) FROM writes WHERE idx >= 0").fetchone()[0]
    assert write_count > 0 if schema is _DeltaState else write_count == 0


def test_the_thread_of_an_unclosed_file_ends_after_the_loop_is_closed(tmp_path, monkeypatch) -> None:
    thread_errors: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", thread_errors.append)
    other_threads = set(threading.enumerate())

    async def leave_open() -> None:
        for number in range(20):
            saver = await open_checkpointer(tmp_path / f"{number}.sqlite")
            await saver.adelete_thread("r")
            del saver
        gc.collect()

    asyncio.run(leave_open())
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - other_threads and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that is being started cannot be joined yet
    assert set(threading.enumerate()) <= other_threads
    assert thread_errors == []
