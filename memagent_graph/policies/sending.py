"""Sends requests to a server: one pool of connections, time-outs, limits, and retries.

A read spends half of its processor time here, so requests use aiohttp directly. The `openai` client would add more than
a millisecond per chunk (`benchmarks/openai_sender.py`).
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx2

from memagent_graph.errors import PolicyRequestError
from memagent_graph.policies.api_variants import extract_server_message, is_retriable
from memagent_graph.policies.server_errors import MalformedReplyError, OverlongReplyError, Server
from memagent_graph.policies.server_url import remove_password

T = TypeVar("T")
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS: Final = 5
_MAX_ERROR_BYTES: Final = 65_536
"""Maximum bytes of an error's body. A longer body is dropped."""
_IDLE_SECONDS: Final = 4.0
"""Seconds that an idle connection stays open: less than in uvicorn (and vLLM), which closes it after 5 s, perhaps while
the next request is being sent."""
_JITTER: Final = 0.1
"""After a pause, requests resume at random times within this fraction of its length."""
_FIRST_PAUSE_SECONDS: Final = 0.5
_MAX_PAUSE_SECONDS: Final = 8.0


class Sender:
    """Sends requests and decodes replies, on the event loop in which it was created.

    The caller holds one of `slots` for a completion.
    """

    def __init__(self, server: Server) -> None:
        self.slots = asyncio.Semaphore(server.max_concurrency)
        self._pause = (0.0, 0.0)
        """The end and the length of the pause that the server requested with `Retry-After`."""
        self._server = server
        is_https = urlsplit(server.base_url).scheme == "https"
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # callers limit their requests themselves
                keepalive_timeout=_IDLE_SECONDS,
                ssl=(server.ssl_context or httpx2.create_ssl_context()) if is_https else True,
            ),
            headers=server.headers,
            timeout=aiohttp.ClientTimeout(total=server.read_timeout, sock_connect=server.connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            proxy=server.proxy,
        )
        self._finalizer = weakref.finalize(self, _close_session, self.session, asyncio.get_running_loop(), os.getpid())

    async def send(
        self,
        url: str,
        body: bytes | None,
        decode: Callable[[bytes], T],
        *,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[T, int]:
        """Return the decoded reply and the number of retries.

        Redirects within the same server are followed with the same request.

        Args:
            url: the address.
            body: JSON for a POST; None for a GET, which has the time-out of a connection for its reply.
            decode: decodes the body of the reply, or raises `MalformedReplyError`.
            max_bytes: the maximum size of a reply. A longer one is not read to its end.
            headers: further headers of this request.

        Raises:
            PolicyError: no usable reply after all retries, or a redirect to another server.
        """
        retries = redirects = 0
        target, server = url, self._server
        timeout = self.session.timeout
        if body is None:
            timeout = aiohttp.ClientTimeout(2 * server.connect_timeout, sock_connect=server.connect_timeout)
        while True:
            await self._wait_for_pause()
            # The first pauses double, with jitter.
            pause_seconds = min(_FIRST_PAUSE_SECONDS * 2 ** min(retries, 9), _MAX_PAUSE_SECONDS)
            pause_seconds *= random.uniform(0.75, 1.0)
            try:
                async with self.session.request(
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
                        target = server.resolve_redirect(url, target, reply.headers["Location"])
                        redirects += 1
                        continue
                    message = extract_server_message(await read_error_body(reply))
                    retry_after = _parse_retry_after(reply.headers)
                # Fail if the server asks for a longer pause than the time-out of a completion.
                is_last = retries >= server.max_retries or (retry_after or 0) > server.read_timeout
                if is_last or not is_retriable(reply.status, message):
                    raise server.make_refusal(reply.status, message, retry_after)
                if retry_after:  # 0, as from a date that has passed, names no pause
                    self._pause = max(self._pause, (time.monotonic() + retry_after, retry_after))
                    pause_seconds = 0
            except (aiohttp.ClientError, TimeoutError, MalformedReplyError) as error:
                if retries >= server.max_retries or isinstance(error, aiohttp.InvalidURL | aiohttp.ClientSSLError):
                    timeout_text = "" if body is None else f" ({server.read_timeout:g} s for a completion)"
                    raise server.make_error(error, timeout_text) from None
            await asyncio.sleep(pause_seconds)
            retries += 1

    async def _wait_for_pause(self) -> None:
        """Wait until the pause ends and for a random time after it, so that requests do not resume all at once."""
        awaited_end = 0.0
        while self._pause[0] > max(awaited_end, time.monotonic()):
            awaited_end, seconds = self._pause
            await asyncio.sleep(awaited_end - time.monotonic() + random.uniform(0, _JITTER * seconds))

    async def close(self) -> None:
        """Close the connections."""
        self._finalizer.detach()
        await self.session.close()


async def read_body(reply: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of a reply. Raises OverlongReplyError as soon as it has more than `max_bytes`."""
    content = bytearray()
    async for data in reply.content.iter_any():
        content += data
        if len(content) > max_bytes:
            raise OverlongReplyError(f"it has more than {max_bytes:,} bytes")
    return bytes(content)


async def read_error_body(reply: aiohttp.ClientResponse) -> bytes:
    """Return the body of an error; empty if it is too long."""
    try:
        return await read_body(reply, _MAX_ERROR_BYTES)
    except OverlongReplyError:
        return b""  # redaction would miss a key that was cut off


def _close_session(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop, process_id: int) -> None:
    """Close a session that the user did not close. Otherwise aiohttp would print a long warning."""
    close_coroutine = session.close()
    if loop.is_running():
        future = asyncio.run_coroutine_threadsafe(close_coroutine, loop)
        if asyncio._get_running_loop() is not loop and process_id == os.getpid():  # a forked process has no such thread
            with suppress(Exception):
                future.result(_MAX_PAUSE_SECONDS)
    else:
        # The connections ended with their event loop.
        with suppress(StopIteration):
            close_coroutine.send(None)


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in `Retry-After` (a number or a date); None without the header."""
    value = headers.get("Retry-After", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, OverflowError, OSError):  # a date may be outside the range of the system's clock
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
    """Return the URL of the proxy for a server from the environment, or None.

    Raises:
        PolicyRequestError: it is not an HTTP proxy.
    """
    parts = urlsplit(base_url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy is None or proxy_bypass(parts.hostname or "") or proxy_bypass(parts.netloc):  # NO_PROXY may have ports
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    try:
        remove_password(proxy)
    except PolicyRequestError as error:
        raise PolicyRequestError(
            f"the environment's proxy cannot be used: {error.message}",
            hint=f"Set {parts.scheme.upper()}_PROXY or --proxy to http://HOST:PORT, or NO_PROXY to the server's host.",
        ) from error
    return proxy
