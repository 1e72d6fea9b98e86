"""The pause that all requests share, on a fake clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import pytest
from aiohttp import web
from support.fake_server import HELLO, FakeServer

from memagent_graph import OpenAICompatiblePolicy, SamplingParams
from memagent_graph.errors import PolicyOverloadedError
from memagent_graph.policies import sending


class FakeClock:
    """A clock that advances only during a sleep."""

    now = 1000.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    clock = FakeClock()
    monkeypatch.setattr(sending, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    monkeypatch.setattr(sending.asyncio, "sleep", clock.sleep)
    yield clock


async def test_a_retry_after_date_is_waited_for_unless_too_far_off_and_shortens_no_pause(clock: FakeClock) -> None:
    times = []

    def respond(body: dict, number: int) -> web.Response:
        times.append(clock.now)
        if number == 3:
            sender._pause = (clock.now + 650, 650.0)  # because of another request
        date = format_datetime(datetime.now(UTC) + timedelta(seconds=(0, -60, 600, 60, 3600)[number]), usegmt=True)
        retry_after = date if number else "Thu, 01 Jan 99999999999 00:00:00 GMT"
        return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": retry_after})

    with FakeServer(respond) as server:
        policy = OpenAICompatiblePolicy("fake", base_url=server.base_url, read_timeout=700, max_retries=5)
        sender = policy._connections.get()
        with pytest.raises(PolicyOverloadedError, match=r"asks to wait for 3\d\d\d s: full"):
            await policy.complete(HELLO, SamplingParams())
        await policy.aclose()
    assert len(times) == 5 and 2200 < clock.now <= 2377
    assert 1.1 < times[2] - times[0] < 1.6, "the usual pauses, if the date is invalid or has passed"


async def test_a_retry_after_of_one_request_pauses_all_others() -> None:
    def respond(body: dict, number: int) -> web.Response | str:
        if number == 0:
            return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "0.6"})
        return "ok"

    with FakeServer(respond) as server:
        policy = OpenAICompatiblePolicy("fake", base_url=server.base_url)
        refused_request = asyncio.create_task(policy.complete(HELLO, SamplingParams()))
        while not policy._connections.get()._pause[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        other_requests = [asyncio.create_task(policy.complete(HELLO, SamplingParams())) for _ in range(20)]
        completions = await asyncio.gather(refused_request, *other_requests)
        await policy.aclose()
    assert [completion.retries for completion in completions] == [1, *[0] * 20], "the others were not refused"
    assert len(server.requests) == 22
