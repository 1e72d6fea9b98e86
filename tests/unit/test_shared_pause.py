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

    def __init__(self) -> None:
        self.now = 1000.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    clock = FakeClock()
    monkeypatch.setattr(sending, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    monkeypatch.setattr(sending.asyncio, "sleep", clock.sleep)
    yield clock


async def test_a_retry_after_date_is_waited_for_unless_it_is_too_far_off(clock: FakeClock) -> None:
    def respond(body: dict, number: int) -> web.Response:
        retry_after = format_datetime(datetime.now(UTC) + timedelta(seconds=600 if number == 0 else 3600), usegmt=True)
        return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": retry_after})

    server = FakeServer(respond)
    with server, pytest.raises(PolicyOverloadedError, match=r"asks to wait for 3\d\d\d s: full"):
        await server.ask(read_timeout=700)
    assert len(server.requests) == 2
    assert 1300 < clock.now <= 1660


async def test_a_retry_after_of_one_request_pauses_all_others() -> None:
    request_numbers: list[int] = []
    has_refused = asyncio.Event()
    loop = asyncio.get_running_loop()

    def respond(body: dict, number: int) -> web.Response | str:
        request_numbers.append(number)
        if number == 0:
            loop.call_soon_threadsafe(has_refused.set)
            return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "0.6"})
        return "ok"

    with FakeServer(respond) as server:
        policy = OpenAICompatiblePolicy("fake", base_url=server.base_url)
        refused_request = asyncio.create_task(policy.complete(HELLO, SamplingParams()))
        await has_refused.wait()
        while not policy._connections.get()._pause[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        other_requests = [asyncio.create_task(policy.complete(HELLO, SamplingParams())) for _ in range(20)]
        completions = await asyncio.gather(refused_request, *other_requests)
        await policy.aclose()
    assert [completion.retries for completion in completions] == [1, *[0] * 20], "the others were not refused"
    assert len(request_numbers) == 22
