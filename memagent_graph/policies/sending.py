"""Sends requests to a server: one pool of connections, time-outs, limits, and retries.

A read spends as much processor time here as in everything else, so requests use aiohttp directly: the `openai` client
adds more than a millisecond to a chunk (`benchmarks/openai_sender.py`).
"""

from __future__ import annotations

import asyncio
import random
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx2

from memagent_graph.errors import PolicyRequestError
from memagent_graph.policies.dialects import is_final, server_message
from memagent_graph.policies.server_url import origin, without_password

T = TypeVar("T")
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS: Final = 5
_MAX_ERROR_BYTES: Final = 65_536
"""In bytes; a longer body of an error is not kept."""
_IDLE_SECONDS: Final = 4.0
"""How long an idle connection is kept: less than the 5 s after which uvicorn, and so vLLM, closes it, perhaps while the
next request is being sent."""
_RETRIABLE_STATUSES: Final = frozenset({408, 409, 429})
_SCATTER: Final = 0.1
"""After a pause, requests resume within this fraction of its length."""
_FIRST_PAUSE: Final = 0.5
_MAX_PAUSE: Final = 8.0


class StatusError(Exception):
    """The server's last reply was an error.

    Args:
        status: the HTTP status, 300 or above.
        content: the reply's body.
        wait: seconds after which the server wants the request again, if it said so.
    """

    def __init__(self, status: int, content: bytes, wait: float | None) -> None:
        super().__init__(status)
        self.status = status
        self.content = content
        self.wait = wait

    @property
    def is_retriable(self) -> bool:
        """Whether the same request can succeed later: 408, 409, 429, and 5xx unless its message says otherwise."""
        return self.status in _RETRIABLE_STATUSES or (self.status >= 500 and not is_final(self.message))

    @property
    def message(self) -> str:
        """The server's message."""
        return server_message(self.content)


class MalformedReplyError(Exception):
    """A reply with a success status that is not what was requested. A retry can help.

    Args:
        reason: what is wrong with it.
        content: the part of its body that is worth showing.
    """

    def __init__(self, reason: str, content: bytes = b"") -> None:
        super().__init__("the reply is malformed")  # without the arguments, which may repeat a key
        self.reason = reason
        self.content = content


class BrokenOffError(MalformedReplyError):
    """A reply in which the server reports that it failed while writing it."""


class OverlongReplyError(MalformedReplyError):
    """A reply that is too long. Nothing of it is kept."""


class RedirectError(Exception):
    """The server redirects to another server, which the user did not name and which must not get the prompt.

    Args:
        target: the address that it redirects to.
    """

    def __init__(self, target: str) -> None:
        super().__init__("redirected to another server")
        self.target = target


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time-outs in seconds for each attempt. Pauses between attempts do not count."""

    connect: float
    read: float


class SharedPause:
    """The pause that a server asked one request for. All requests of a policy keep it: they would be refused, too.

    May be shared by threads and event loops.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end = self._seconds = 0.0

    def extend(self, seconds: float) -> None:
        """Let no request out for so long, from now on."""
        with self._lock:
            end = time.monotonic() + seconds
            if end > self._end:
                self._end, self._seconds = end, seconds

    async def wait(self, *, has_paused: bool = False) -> None:
        """Wait for the end of the pause, and not much longer, so that requests do not return all at once.

        `has_paused` says that the request has waited for its own pause, and need not wait for that again.
        """
        last = self._end if has_paused else 0.0
        while (end := self._end) > last and end > time.monotonic():
            await asyncio.sleep(end - time.monotonic() + random.uniform(0, _SCATTER * self._seconds))
            last = end


class Sender:
    """Sends requests and decodes replies, on the event loop in which it was created.

    Args:
        base_url: where requests are sent; it determines TLS.
        headers: sent with every request.
        max_concurrency: the maximum number of completions in flight; the caller holds one of `slots` for each.
        timeouts: for the connection, and for one attempt as a whole.
        max_retries: how often a failed request is sent again.
        pause: the pause that a reply with `Retry-After` asks for.
        trust: the certificates that a server's must be signed by; those that come with the HTTP client if None.
        proxy: through which requests go; None for no proxy.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        max_concurrency: int,
        timeouts: Timeouts,
        max_retries: int,
        pause: SharedPause,
        trust: ssl.SSLContext | None,
        proxy: str | None,
    ) -> None:
        self.slots = asyncio.Semaphore(max_concurrency)
        self._timeouts = timeouts
        self._shared_pause = pause
        self._max_retries = max_retries
        secure = urlsplit(base_url).scheme == "https"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # callers bound their own requests
                keepalive_timeout=_IDLE_SECONDS,
                ssl=(trust or httpx2.create_ssl_context()) if secure else True,
            ),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeouts.read, sock_connect=timeouts.connect),
            cookie_jar=aiohttp.DummyCookieJar(),
            proxy=proxy,
        )
        self._finalizer = weakref.finalize(self, _abandon, self._session, asyncio.get_running_loop())

    async def send(
        self,
        url: str,
        body: bytes | None,
        decode: Callable[[bytes], T],
        *,
        max_bytes: int,
        seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[T, int]:
        """Return the decoded reply, and the number of retries.

        Redirects within the same server are followed with the same request.

        Args:
            url: the address.
            body: JSON, which is sent by POST; None for a GET.
            decode: decodes the reply's body, or raises `MalformedReplyError`.
            max_bytes: the maximum size of a reply; more is never in memory.
            seconds: the time-out for one reply once there is a connection, if it differs from the usual one.
            headers: further headers of this request.

        Raises:
            StatusError: the server refused, finally.
            MalformedReplyError: the reply could not be decoded, or was too long, finally.
            RedirectError: the server named another one. aiohttp.ClientError: no connection, or it broke.
            TimeoutError: no connection, or no whole reply, in time.
        """
        retries = redirects = 0
        wait: float | None = None
        target = url
        timeout = self._session.timeout
        if seconds is not None:
            timeout = aiohttp.ClientTimeout(self._timeouts.connect + seconds, sock_connect=self._timeouts.connect)
        while True:
            await self._shared_pause.wait(has_paused=wait is not None)
            wait = None
            try:
                async with self._session.request(
                    "GET" if body is None else "POST",
                    target,
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    timeout=timeout,
                ) as reply:
                    if reply.status < 300:
                        return decode(await read_body(reply, max_bytes)), retries
                    if reply.status in _REDIRECTS and "Location" in reply.headers and redirects < _MAX_REDIRECTS:
                        target, redirects = _redirect_target(target, reply.headers["Location"]), redirects + 1
                        continue
                    error = StatusError(reply.status, await read_error_body(reply), _retry_after(reply.headers))
                wait = error.wait
                # If a server asks to wait for longer than a completion may take, the request fails.
                if retries == self._max_retries or not error.is_retriable or (wait or 0) > self._timeouts.read:
                    raise error
                if wait is not None:
                    self._shared_pause.extend(wait)
            except (aiohttp.InvalidURL, aiohttp.ClientSSLError):
                raise
            except (aiohttp.ClientError, TimeoutError, MalformedReplyError):
                if retries == self._max_retries:
                    raise
            await asyncio.sleep(_pause(retries) if wait is None else wait)
            retries += 1

    def relay(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request once, and return the reply as a stream of bytes that is not decompressed.

        The time-out is for the next byte, not for the whole reply.
        """
        timeout = aiohttp.ClientTimeout(sock_connect=self._timeouts.connect, sock_read=self._timeouts.read)
        # The reply is passed on unchanged, so it must not be compressed.
        request_headers = {**headers, "Accept-Encoding": "identity"}
        return self._session.request(
            method,
            url,
            data=body,
            headers=request_headers,
            timeout=timeout,
            allow_redirects=False,
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        self._finalizer.detach()
        await self._session.close()


async def read_body(reply: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return a reply's body. Raises OverlongReplyError, without reading on, if it has more than `max_bytes`."""
    content = bytearray()
    async for part in reply.content.iter_any():
        content += part
        if len(content) > max_bytes:
            raise OverlongReplyError(f"it has more than {max_bytes:,} bytes")
    return bytes(content)


async def read_error_body(reply: aiohttp.ClientResponse) -> bytes:
    """Return the body of an error; empty if it is too long for one."""
    try:
        return await read_body(reply, _MAX_ERROR_BYTES)
    except OverlongReplyError:
        return b""  # an excerpt could end inside a key, which would then not be redacted


def _redirect_target(url: str, location: str) -> str:
    """Return the target of a redirect. Raises RedirectError if that is another server."""
    target = location
    with suppress(PolicyRequestError, ValueError):  # it is not an address
        target = urljoin(url, location)
        if origin(target) == origin(url):
            return without_password(target)
    raise RedirectError(target)


def _abandon(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    """Close a session that was not closed, as at the end of a script; aiohttp would print a long warning."""
    closing = session.close()
    if loop.is_running():
        future = asyncio.run_coroutine_threadsafe(closing, loop)
        if asyncio._get_running_loop() is not loop:
            with suppress(Exception):
                future.result(_MAX_PAUSE)
    elif loop.is_closed():
        # The connections ended with their loop, so there is nothing to wait for.
        with suppress(StopIteration):
            closing.send(None)
    else:
        closing.close()


def _pause(retries: int) -> float:
    """Return the seconds before the next attempt: doubled each time, with jitter to spread requests out."""
    return min(_FIRST_PAUSE * 2.0**retries, _MAX_PAUSE) * random.uniform(0.75, 1.0)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in `Retry-After`, which may also be a date; None without one."""
    value = headers.get("Retry-After", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None


def certificates(ca_file: Path | str | ssl.SSLContext) -> ssl.SSLContext:
    """Return a context that trusts the certificates in a file; a context as it is.

    Raises:
        PolicyRequestError: the file cannot be read.
    """
    if isinstance(ca_file, ssl.SSLContext):
        return ca_file
    try:
        return ssl.create_default_context(cafile=str(Path(ca_file).expanduser()))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise PolicyRequestError(
            f"the certificates in {ca_file} cannot be used: {error}", hint="Use a file in PEM format."
        ) from error


def proxy_for(base_url: str) -> str | None:
    """Return the environment's proxy for this server, if any."""
    parts = urlsplit(base_url)
    if proxy_bypass(parts.hostname or ""):
        return None
    proxies = getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")
