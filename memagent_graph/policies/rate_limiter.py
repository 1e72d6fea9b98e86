"""One bound on the rate of requests for all who share a policy: requests and tokens a minute, and pauses asked for.

Requests are spaced evenly, so that no server sees a minute's worth at once. When a server asks one request to wait
(`Retry-After`), all of them wait: the others would only be refused, too. Times are those of a clock that never jumps.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Final

_BYTES_PER_TOKEN: Final = 4
"""Of a request, about; what it really took is settled when the server has counted."""
_FIRST_COMPLETION: Final = 256
"""Tokens expected of a completion before there was one."""
_WEIGHT: Final = 0.05
"""Of the newest completion in the running mean of their lengths."""
_SCATTER: Final = 0.1
"""After a pause, requests return within this share of it, not all at the same moment."""


class RateLimiter:
    """Spaces requests. May be shared by threads, event loops and policies.

    Args:
        requests_per_minute: the most requests sent in a minute, retries included; None for no bound.
        tokens_per_minute: the most prompt and completion tokens in a minute; None for no bound.

    Raises:
        ValueError: a bound that is not above 0.
    """

    def __init__(self, requests_per_minute: float | None = None, tokens_per_minute: float | None = None) -> None:
        for bound in (requests_per_minute, tokens_per_minute):
            if bound is not None and not bound > 0:
                raise ValueError(f"a bound for each minute must be above 0, not {bound}")
        self._per_request = 60 / requests_per_minute if requests_per_minute else 0.0
        self._per_token = 60 / tokens_per_minute if tokens_per_minute else 0.0
        self._lock = threading.Lock()
        self._next_request = self._next_token = self._paused_until = 0.0
        self._pause = 0.0
        self._completion = float(_FIRST_COMPLETION)

    def expected_tokens(self, request_bytes: int, max_tokens: int) -> int:
        """Return what a request will probably take, from its size and the mean length of completions so far."""
        if not self._per_token:
            return 0
        return request_bytes // _BYTES_PER_TOKEN + min(max_tokens, round(self._completion))

    async def admit(self, tokens: int = 0, *, has_paused: bool = False) -> None:
        """Wait until a request that is expected to take so many tokens may be sent.

        `has_paused` says that it has waited for the pause that it was asked for, and need not wait for that again.
        """
        if self._per_request or self._per_token:
            await _until(self._reserve(tokens))
        waited_for = self._paused_until if has_paused else 0.0
        while (pause := self._paused_until) > waited_for and pause > time.monotonic():
            await _until(pause + random.uniform(0, _SCATTER * self._pause))
            waited_for = pause

    def settle(self, expected: int, used: int, completion: int) -> None:
        """Correct what was reserved by what the server counted.

        Args:
            expected: what `expected_tokens` said.
            used: prompt and completion tokens.
            completion: the completion's alone.
        """
        if self._per_token:
            with self._lock:
                self._next_token += (used - expected) * self._per_token
                self._completion += _WEIGHT * (completion - self._completion)

    def hold_off(self, seconds: float) -> None:
        """Let no request out for so long: the server asked for it."""
        with self._lock:
            until = time.monotonic() + seconds
            if until > self._paused_until:
                self._paused_until, self._pause = until, seconds

    def _reserve(self, tokens: int) -> float:
        """Return the moment at which the next request may be sent; it is taken."""
        with self._lock:
            now = time.monotonic()
            at = max(now, self._next_request, self._next_token)
            self._next_request = at + self._per_request
            self._next_token = max(now, self._next_token) + tokens * self._per_token
            return at


async def _until(moment: float) -> None:
    if (seconds := moment - time.monotonic()) > 0:
        await asyncio.sleep(seconds)
