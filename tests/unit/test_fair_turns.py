"""Turns on the event loop: in order, bounded, and never held for long."""

from __future__ import annotations

import asyncio

import pytest

from memagent_graph.reading import execution as turns
from memagent_graph.reading.execution import Turn


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_slots", turns.PerLoop(lambda: asyncio.Semaphore(1)))


async def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    log: list[str] = []

    async def read(name: str) -> None:
        turn = Turn()
        await turn.begin()
        log.append(f"{name} begins")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        log.append(f"{name} ends")
        turn.end()

    await asyncio.gather(read("a"), read("b"), read("c"))
    assert log == ["a begins", "a ends", "b begins", "b ends", "c begins", "c ends"]


async def test_a_read_that_never_ends_its_turn_does_not_stop_the_others() -> None:
    await Turn().begin()
    await asyncio.wait_for(Turn().begin(), 10 * turns._MAX_TURN_SECONDS + 5)


async def test_a_turn_ends_once_however_often_it_is_told() -> None:
    first, second, third = Turn(), Turn(), Turn()
    await first.begin()
    first.end()
    first.end()
    await second.begin()
    waiting = asyncio.ensure_future(third.begin())
    await asyncio.sleep(0)
    assert not waiting.done()
    second.end()
    await waiting


async def test_a_read_that_is_cancelled_while_it_waits_leaves_the_turn_to_the_next() -> None:
    first, second, third = Turn(), Turn(), Turn()
    await first.begin()
    waiting = asyncio.ensure_future(second.begin())
    await asyncio.sleep(0)
    waiting.cancel()
    first.end()
    await asyncio.wait_for(third.begin(), 5)


async def test_steps_side_by_side_that_share_a_turn_leave_no_slot_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = asyncio.Semaphore(2)
    monkeypatch.setattr(turns, "_slots", turns.PerLoop(lambda: slots))
    shared, others = Turn(), [Turn(), Turn()]
    for other in others:
        await other.begin()
    side_by_side = asyncio.gather(shared.begin(), shared.begin())
    await asyncio.sleep(0)
    for other in others:
        other.end()
    await side_by_side
    shared.end()
    await asyncio.wait_for(slots.acquire(), 5)
    await asyncio.wait_for(slots.acquire(), 5)
