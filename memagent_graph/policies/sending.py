"""Completion requests on their way: one pool of connections, time-outs, and repetition where it can help.

A read spends as much processor time here as in all the rest, so requests go through aiohttp itself; the layers of the
`openai` client above it cost about four times as much per request as aiohttp does (`benchmarks/throughput.py`).
"""

from __future__ import annotations

import asyncio
import random
import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx2

_WORTH_REPEATING: Final = frozenset({408, 409, 429})
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 8.0


class StatusError(Exception):
    """The server's last answer was no success.

    Args:
        status: the HTTP status, 300 or above.
        content: the reply's body.
        wait: seconds after which the server wants to be asked again, where it said so.
    """

    def __init__(self, status: int, content: bytes, wait: float | None) -> None:
        super().__init__(status)
        self.status = status
        self.content = content
        self.wait = wait

    @property
    def worth_repeating(self) -> bool:
        """Whether the same request may fare better later: 408, 409, 429 and 5xx."""
        return self.status in _WORTH_REPEATING or self.status >= 500


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds. Pauses between two attempts do not count; each attempt has the whole time."""

    connect: float
    read: float


class Sender:
    """POSTs bodies of JSON, on the event loop in which it was made.

    Args:
        base_url: where the requests will go; it decides on TLS and on the environment's proxy.
        headers: sent with every request.
        connections: how many may be open at once.
        timeouts: for the connection, and for one attempt as a whole.
        max_retries: how often a failed request is sent again.
    """

    def __init__(
        self, base_url: str, headers: Mapping[str, str], *, connections: int, timeouts: Timeouts, max_retries: int
    ) -> None:
        self._timeouts = timeouts
        self._max_retries = max_retries
        secure = urlsplit(base_url).scheme == "https"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, ssl=httpx2.create_ssl_context() if secure else True),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeouts.read, sock_connect=timeouts.connect),
            cookie_jar=aiohttp.DummyCookieJar(),
            proxy=_proxy_for(base_url),
        )
        self._unclosed = weakref.finalize(self, _abandon, self._session, asyncio.get_running_loop())

    async def post(self, url: str, body: bytes) -> tuple[bytes, int]:
        """The reply's body, and how many times the request was sent again before it came.

        Raises:
            StatusError: the server refused, finally.
            aiohttp.ClientError: no connection, or it broke.
            TimeoutError: no connection, or no whole reply, in time.
        """
        retries = 0
        while True:
            wait = None
            try:
                async with self._session.post(url, data=body) as reply:
                    content = await reply.read()
                    if reply.status < 300:
                        return content, retries
                    error = StatusError(reply.status, content, _wait_asked_for(reply.headers))
                wait = error.wait
                # A server that wants to be left alone for longer than a completion may take is not waited for.
                if retries == self._max_retries or not error.worth_repeating or (wait or 0) > self._timeouts.read:
                    raise error
            except (aiohttp.InvalidURL, aiohttp.ClientSSLError):
                raise
            except (aiohttp.ClientError, TimeoutError):
                if retries == self._max_retries:
                    raise
            await asyncio.sleep(_pause(retries) if wait is None else wait)
            retries += 1

    def relay(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request once, and give its reply while it comes. The time-out is for the next byte, not for all."""
        patience = aiohttp.ClientTimeout(sock_connect=self._timeouts.connect, sock_read=self._timeouts.read)
        # What comes back is passed on as it is, so it must not come compressed.
        own = {**headers, "Accept-Encoding": "identity"}
        return self._session.request(method, url, data=body, headers=own, timeout=patience, allow_redirects=False)

    async def close(self) -> None:
        """Close the connections."""
        self._unclosed.detach()
        await self._session.close()


def _abandon(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    """Close a session that nobody closed, as at the end of a script; aiohttp would complain of it at length."""
    closing = session.close()
    if loop.is_running():
        future = asyncio.run_coroutine_threadsafe(closing, loop)
        if asyncio._get_running_loop() is not loop:
            with suppress(Exception):
                future.result(_LONGEST_PAUSE)
    elif loop.is_closed():
        # The connections went with their loop, so there is nothing to wait for.
        with suppress(StopIteration):
            closing.send(None)
    else:
        closing.close()


def _pause(retries: int) -> float:
    """Seconds before the next attempt: doubling, and scattered, so that many requests do not return at once."""
    return min(_FIRST_PAUSE * 2.0**retries, _LONGEST_PAUSE) * random.uniform(0.75, 1.0)


def _wait_asked_for(headers: Mapping[str, str]) -> float | None:
    """What `Retry-After` says, in seconds or as a date."""
    value = headers.get("Retry-After", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None


def _proxy_for(base_url: str) -> str | None:
    """The proxy that the environment names for this server, if any."""
    parts = urlsplit(base_url)
    if proxy_bypass(parts.hostname or ""):
        return None
    proxies = getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")
