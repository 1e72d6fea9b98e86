"""The pause that all requests share, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import pytest
from aiohttp import web
from support.fake_server import FakeServer

from memagent_graph import OpenAICompatiblePolicy, SamplingParams
from memagent_graph.errors import PolicyOverloadedError
from memagent_graph.policies import sending
from memagent_graph.policies.sending import SharedPause
from memagent_graph.policy import Message

HELLO = [Message(role="user", content="hello")]


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(sending, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    monkeypatch.setattr(sending.asyncio, "sleep", clock.sleep)
    yield clock


async def test_a_pause_holds_requests_to_its_end_and_a_little_longer_though_a_shorter_one_follows(clock: Clock) -> None:
    pause = SharedPause()
    pause.extend(10)
    pause.extend(1)
    await pause.wait()
    assert 1010 <= clock.now <= 1011


async def test_retry_after_may_be_a_date_and_one_that_is_too_far_off_is_not_waited_for(clock: Clock) -> None:
    def respond(body: dict, number: int) -> web.Response:
        when = format_datetime(datetime.now(UTC) + timedelta(seconds=600 if number == 0 else 3600), usegmt=True)
        return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": when})

    with FakeServer(respond) as server:
        policy = OpenAICompatiblePolicy("fake", base_url=server.base_url, read_timeout=700)
        with pytest.raises(PolicyOverloadedError, match=r"asks to wait for 3\d\d\d s: full"):
            await policy.complete(HELLO, SamplingParams())
        await policy.aclose()
    assert len(server.requests) == 2
    assert 1300 < clock.now <= 1660


async def test_a_retry_after_of_one_request_holds_the_others() -> None:
    """One of twenty is told to wait; until it may return, no other request is sent."""
    arrived: list[int] = []
    refused = asyncio.Event()
    loop = asyncio.get_running_loop()

    def respond(body: dict, number: int) -> web.Response | str:
        arrived.append(number)
        if number == 0:
            loop.call_soon_threadsafe(refused.set)
            return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "0.6"})
        return "ok"

    with FakeServer(respond) as server:
        policy = OpenAICompatiblePolicy("fake", base_url=server.base_url)
        first = asyncio.create_task(policy.complete(HELLO, SamplingParams()))
        await refused.wait()
        while not policy._connections.get().pause._end:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(policy.complete(HELLO, SamplingParams())) for _ in range(20)]
        completions = await asyncio.gather(first, *others)
        await policy.aclose()
    assert [completion.retries for completion in completions] == [1, *[0] * 20], "the others were not refused"
    assert len(arrived) == 22
