"""Checkpoint files: what they keep, and those that nobody closes."""

from __future__ import annotations

import asyncio
import gc
import operator
import sqlite3
import threading
from contextlib import closing
from itertools import chain
from typing import Annotated, TypedDict

import pytest
from langgraph.channels import DeltaChannel
from langgraph.graph import END, StateGraph

from memagent_graph.storage.checkpoints import open_checkpointer


class _Plain(TypedDict):
    numbers: Annotated[list[int], operator.add]


class _Delta(TypedDict):
    numbers: Annotated[list[int], DeltaChannel(lambda before, new: [*before, *chain(*new)], snapshot_frequency=3)]


async def _steps_after_a_failure(path, state: type, config) -> list[list[int]]:
    """Count to eight in a graph that fails once at five, continue it, and give the values of its history."""
    saver = await open_checkpointer(path)
    failures: list[int] = []

    async def count(now) -> dict[str, list[int]]:
        number = len(now["numbers"])
        if number == 5 and not failures:
            failures.append(number)
            raise ConnectionError
        return {"numbers": [number]}

    graph = StateGraph(state)
    graph.add_node("count", count)
    graph.set_entry_point("count")
    graph.add_conditional_edges("count", lambda now: END if len(now["numbers"]) >= 8 else "count")
    compiled = graph.compile(checkpointer=saver)
    with pytest.raises(ConnectionError):
        await compiled.ainvoke({"numbers": []}, config, durability="sync")
    await compiled.ainvoke(None, config, durability="sync")
    at_four = {len(entry.values["numbers"]): entry.config async for entry in compiled.aget_state_history(config)}[4]
    fork = await compiled.aupdate_state(at_four, {"numbers": [40]})
    assert (await compiled.aget_state(fork)).values["numbers"] == [0, 1, 2, 3, 40]
    history = [entry.values["numbers"] async for entry in compiled.aget_state_history(config)]
    await saver.aclose()
    return history


@pytest.mark.parametrize("state", [_Plain, _Delta])
async def test_every_state_can_be_had_though_writes_of_plain_channels_are_deleted(tmp_path, state) -> None:
    path, config = tmp_path / "checkpoints.sqlite", {"configurable": {"thread_id": "t"}}
    history = await _steps_after_a_failure(path, state, config)
    assert history == [[0, 1, 2, 3, 40], *[list(range(number)) for number in range(8, -1, -1)], []]
    with closing(sqlite3.connect(path)) as file:
        count = file.execute("SELECT count(*) FROM writes WHERE idx >= 0").fetchone()[0]
    assert count > 0 if state is _Delta else count == 0


def test_a_file_that_was_not_closed_ends_its_thread_though_the_loop_is_closed(tmp_path, monkeypatch) -> None:
    failures: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    others = set(threading.enumerate())

    async def leave_open() -> None:
        for number in range(20):
            saver = await open_checkpointer(tmp_path / f"{number}.sqlite")
            await saver.adelete_thread("r")
            del saver
        gc.collect()

    asyncio.run(leave_open())
    for thread in set(threading.enumerate()) - others:
        thread.join(5)
        assert not thread.is_alive()
    assert failures == []
