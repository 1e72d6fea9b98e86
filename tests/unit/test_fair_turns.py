"""Turns of reads on the event loop: given in order, limited in number and in time."""

from __future__ import annotations

import asyncio

import pytest

from memagent_graph.reading import execution
from memagent_graph.reading.execution import ProcessorTurn


@pytest.fixture(autouse=True)
def one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_slots", execution.PerLoop(lambda: asyncio.Semaphore(1)))


async def test_turns_are_given_in_the_order_of_requests() -> None:
    turn_events: list[str] = []

    async def read(name: str) -> None:
        turn = ProcessorTurn()
        await turn.begin()
        turn_events.append(f"{name} begins")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turn_events.append(f"{name} ends")
        turn.end()

    await asyncio.gather(read("a"), read("b"), read("c"))
    assert turn_events == ["a begins", "a ends", "b begins", "b ends", "c begins", "c ends"]


async def test_a_turn_that_never_ends_does_not_block_the_next() -> None:
    await ProcessorTurn().begin()
    await asyncio.wait_for(ProcessorTurn().begin(), 10 * execution._MAX_TURN_SECONDS + 5)


async def test_ending_a_turn_twice_releases_one_slot() -> None:
    first_turn, second_turn, third_turn = ProcessorTurn(), ProcessorTurn(), ProcessorTurn()
    await first_turn.begin()
    first_turn.end()
    first_turn.end()
    await second_turn.begin()
    third_task = asyncio.ensure_future(third_turn.begin())
    await asyncio.sleep(0)
    assert not third_task.done()
    second_turn.end()
    await third_task


async def test_a_read_cancelled_while_waiting_passes_the_turn_on() -> None:
    first_turn, second_turn, third_turn = ProcessorTurn(), ProcessorTurn(), ProcessorTurn()
    await first_turn.begin()
    second_task = asyncio.ensure_future(second_turn.begin())
    await asyncio.sleep(0)
    second_task.cancel()
    first_turn.end()
    await asyncio.wait_for(third_turn.begin(), 5)


async def test_concurrent_steps_that_share_a_turn_release_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = asyncio.Semaphore(2)
    monkeypatch.setattr(execution, "_slots", execution.PerLoop(lambda: slots))
    shared_turn, other_turns = ProcessorTurn(), [ProcessorTurn(), ProcessorTurn()]
    for turn in other_turns:
        await turn.begin()
    concurrent_steps = asyncio.gather(shared_turn.begin(), shared_turn.begin())
    await asyncio.sleep(0)
    for turn in other_turns:
        turn.end()
    await concurrent_steps
    shared_turn.end()
    await asyncio.wait_for(slots.acquire(), 5)
    await asyncio.wait_for(slots.acquire(), 5)
