"""Sends requests to a server: one pool of connections, time-outs, limits, and retries.

Half of the processor time of a read is spent here, so requests use aiohttp directly. The `openai` client would add
more than a millisecond per chunk (`benchmarks/openai_sender.py`).
"""

from __future__ import annotations

import asyncio
import random
import ssl
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
from memagent_graph.policies.api_variants import extract_server_message, is_final
from memagent_graph.policies.server_url import parse_origin, without_password

T = TypeVar("T")
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS: Final = 5
_MAX_ERROR_BYTES: Final = 65_536
"""Maximum bytes of the body of an error. A longer body is dropped."""
_IDLE_SECONDS: Final = 4.0
"""Seconds that an idle connection stays open. uvicorn, and so vLLM, closes it after 5 s, perhaps while the next request
is being sent."""
_RETRIABLE_STATUSES: Final = frozenset({408, 409, 429})
_SCATTER: Final = 0.1
"""After a pause, requests resume within this fraction of its length."""
_FIRST_PAUSE: Final = 0.5
_MAX_PAUSE: Final = 8.0


class StatusError(Exception):
    """The last reply of the server was an error.

    Args:
        status: the HTTP status, 300 or above.
        content: the reply's body.
        wait: the seconds in `Retry-After`, if there is one.
    """

    def __init__(self, status: int, content: bytes, wait: float | None) -> None:
        super().__init__(status)
        self.status = status
        self.content = content
        self.wait = wait

    @property
    def is_retriable(self) -> bool:
        """Whether the same request can succeed later: 408, 409, 429, or 5xx unless its message says otherwise."""
        return self.status in _RETRIABLE_STATUSES or (self.status >= 500 and not is_final(self.message))

    @property
    def message(self) -> str:
        """The server's message."""
        return extract_server_message(self.content)


class MalformedReplyError(Exception):
    """A reply with a success status that is not what was requested. A retry can help.

    Args:
        reason: the problem.
        content: the part of the body to show.
    """

    def __init__(self, reason: str, content: bytes = b"") -> None:
        super().__init__("the reply is malformed")  # not the arguments, which may contain a key
        self.reason = reason
        self.content = content


class BrokenOffError(MalformedReplyError):
    """A reply in which the server reports that it failed while writing it."""


class OverlongReplyError(MalformedReplyError):
    """A reply that is too long. It is dropped."""


class RedirectError(Exception):
    """A redirect to another server, which must not get the prompt because the user did not name it.

    Args:
        target: the address of the other server.
    """

    def __init__(self, target: str) -> None:
        super().__init__("redirected to another server")
        self.target = target


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time-outs of an attempt, in seconds. Pauses between attempts do not count."""

    connect: float
    read: float


class SharedPause:
    """The pause that a server asked for in a reply. It applies to all requests on an event loop."""

    def __init__(self) -> None:
        self._end = self._seconds = 0.0

    def extend(self, seconds: float) -> None:
        """Hold all requests for this time from now on."""
        end = time.monotonic() + seconds
        if end > self._end:
            self._end, self._seconds = end, seconds

    async def wait(self) -> None:
        """Wait for the end of the pause and a random time after it, so that requests do not resume all at once."""
        last = 0.0
        while self._end > max(last, time.monotonic()):
            last = self._end
            await asyncio.sleep(last - time.monotonic() + random.uniform(0, _SCATTER * self._seconds))


class Sender:
    """Sends requests and decodes replies, on the event loop in which it was created.

    Args:
        base_url: the server's URL, which determines TLS.
        headers: headers of every request.
        max_concurrency: the maximum number of completions in flight. The caller holds one of `slots` for a completion.
        timeouts: time-outs of the connection and of an attempt.
        max_retries: the maximum number of retries of a request.
        trust: an SSL context with the trusted certificates; None for the default of the HTTP client.
        proxy: the URL of the proxy; None for no proxy.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        max_concurrency: int,
        timeouts: Timeouts,
        max_retries: int,
        trust: ssl.SSLContext | None,
        proxy: str | None,
    ) -> None:
        self.slots = asyncio.Semaphore(max_concurrency)
        self._timeouts = timeouts
        self.pause = SharedPause()
        self._max_retries = max_retries
        secure = urlsplit(base_url).scheme == "https"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # callers limit their requests themselves
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
        """Return the decoded reply and the number of retries.

        Redirects within the same server are followed with the same request.

        Args:
            url: the address.
            body: JSON for a POST; None for a GET.
            decode: decodes the body of the reply, or raises `MalformedReplyError`.
            max_bytes: the maximum size of a reply. No more is read into memory.
            seconds: the time-out for the reply after the connection, if it is not the usual one.
            headers: further headers of this request.

        Raises:
            StatusError: the server refused, after all retries.
            MalformedReplyError: the reply could not be decoded or was too long, after all retries.
            RedirectError: a redirect to another server. aiohttp.ClientError: no connection, or it broke.
            TimeoutError: no connection or no complete reply in time.
        """
        retries = redirects = 0
        target = url
        timeout = self._session.timeout
        if seconds is not None:
            timeout = aiohttp.ClientTimeout(self._timeouts.connect + seconds, sock_connect=self._timeouts.connect)
        while True:
            await self.pause.wait()
            # The pauses double, with jitter.
            pause = min(_FIRST_PAUSE * 2.0**retries, _MAX_PAUSE) * random.uniform(0.75, 1.0)
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
                # Fail if the server asks for a longer pause than the time-out of a completion.
                if retries == self._max_retries or not error.is_retriable or (error.wait or 0) > self._timeouts.read:
                    raise error
                if error.wait is not None:
                    self.pause.extend(error.wait)
                    pause = 0
            except (aiohttp.InvalidURL, aiohttp.ClientSSLError):
                raise
            except (aiohttp.ClientError, TimeoutError, MalformedReplyError):
                if retries == self._max_retries:
                    raise
            await asyncio.sleep(pause)
            retries += 1

    def relay(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request once and return the reply as a stream of bytes, without decompression.

        The time-out applies to the next byte, not to the whole reply.
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
    """Return the body of a reply. Raises OverlongReplyError as soon as it has more than `max_bytes`."""
    content = bytearray()
    async for part in reply.content.iter_any():
        content += part
        if len(content) > max_bytes:
            raise OverlongReplyError(f"it has more than {max_bytes:,} bytes")
    return bytes(content)


async def read_error_body(reply: aiohttp.ClientResponse) -> bytes:
    """Return the body of an error, or an empty one if it is too long."""
    try:
        return await read_body(reply, _MAX_ERROR_BYTES)
    except OverlongReplyError:
        return b""  # redaction would miss a key that is cut off


def _redirect_target(url: str, location: str) -> str:
    """Return the target of a redirect. Raises RedirectError if it is another server."""
    target = location
    with suppress(PolicyRequestError, ValueError):  # it is not an address
        target = urljoin(url, location)
        if parse_origin(target) == parse_origin(url):
            return without_password(target)
    raise RedirectError(target)


def _abandon(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    """Close a session that the user did not close. Otherwise aiohttp would print a long warning."""
    closing = session.close()
    if loop.is_running():
        future = asyncio.run_coroutine_threadsafe(closing, loop)
        if asyncio._get_running_loop() is not loop:
            with suppress(Exception):
                future.result(_MAX_PAUSE)
    elif loop.is_closed():
        # The connections ended with their event loop.
        with suppress(StopIteration):
            closing.send(None)
    else:
        closing.close()


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in `Retry-After` (a number or a date); None without the header."""
    value = headers.get("Retry-After", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None


def load_certificates(ca_file: Path | str | ssl.SSLContext) -> ssl.SSLContext:
    """Return an SSL context that trusts the certificates in a file. A context is returned unchanged.

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


def find_proxy(base_url: str) -> str | None:
    """Return the proxy for this server from the environment, or None."""
    parts = urlsplit(base_url)
    if proxy_bypass(parts.hostname or ""):
        return None
    proxies = getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")
