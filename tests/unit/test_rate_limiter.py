"""Requests and tokens a minute, and pauses that all requests share, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from aiohttp import web
from support.fake_server import FakeServer

from memagent_graph import OpenAICompatiblePolicy, SamplingParams
from memagent_graph.policies import rate_limiter
from memagent_graph.policies.rate_limiter import RateLimiter
from memagent_graph.policy import Message


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(rate_limiter.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(rate_limiter.asyncio, "sleep", clock.sleep)
    yield clock


async def test_requests_are_spaced_evenly(clock: Clock) -> None:
    limiter = RateLimiter(requests_per_minute=120)
    moments = []
    for _ in range(5):
        await limiter.admit()
        moments.append(clock.now - 1000)
    assert moments == pytest.approx([0, 0.5, 1, 1.5, 2])


async def test_tokens_are_spaced_by_what_is_expected_and_corrected_by_what_was_used(clock: Clock) -> None:
    limiter = RateLimiter(tokens_per_minute=6000)
    expected = limiter.expected_tokens(request_bytes=400, max_tokens=100)
    assert expected == 200
    await limiter.admit(expected)
    await limiter.admit(expected)
    assert clock.now - 1000 == pytest.approx(2)
    limiter.settle(expected, 150, completion=50)
    limiter.settle(expected, 150, completion=50)
    await limiter.admit(expected)
    assert clock.now - 1000 == pytest.approx(3), "both took 50 tokens less than was expected"


async def test_without_bounds_nobody_waits(clock: Clock) -> None:
    limiter = RateLimiter()
    for _ in range(100):
        await limiter.admit(10**6)
    assert clock.now == 1000


async def test_a_pause_holds_all_but_the_one_that_has_waited_for_it(clock: Clock) -> None:
    limiter = RateLimiter()
    limiter.hold_off(10)
    await limiter.admit(has_paused=True)
    assert clock.now == 1000
    await limiter.admit()
    assert 1010 <= clock.now <= 1011


async def test_a_shorter_pause_does_not_end_a_longer_one(clock: Clock) -> None:
    limiter = RateLimiter()
    limiter.hold_off(10)
    limiter.hold_off(1)
    await limiter.admit()
    assert clock.now >= 1010


@pytest.mark.parametrize("bound", [0, -1, float("nan")])
def test_a_bound_that_is_not_above_zero_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        RateLimiter(tokens_per_minute=bound)


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
        hello = [Message(role="user", content="hello")]
        first = asyncio.create_task(policy.complete(hello, SamplingParams()))
        await refused.wait()
        while not policy._limiter._paused_until:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(policy.complete(hello, SamplingParams())) for _ in range(20)]
        completions = await asyncio.gather(first, *others)
        await policy.aclose()
    assert [each.retries for each in completions] == [1, *[0] * 20], "the others were not refused"
    assert len(arrived) == 22
