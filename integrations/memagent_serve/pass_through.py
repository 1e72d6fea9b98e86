"""Passes requests on to the policy server: the client's body unchanged, with this server's key; relays the reply."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Final, Protocol, runtime_checkable

import aiohttp
from starlette.responses import Response, StreamingResponse

_RELAYED: Final = frozenset({"content-type", "retry-after", "x-request-id", "openai-processing-ms", "openai-version"})
PATHS: Final = frozenset({"chat/completions", "models"})
"""All paths that are requested from the policy server for clients. No path comes from a request."""


@runtime_checkable
class Relaying(Protocol):
    """A policy on a server that accepts other requests than the reader's."""

    base_url: str

    def relay(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request to the server; see `OpenAICompatiblePolicy`."""
        ...


async def passed_on(
    server: Relaying, method: str, path: str, body: bytes | None = None, *, accept: str | None = None
) -> Response:
    """The server's reply to a client's request, relayed while it arrives.

    Args:
        server: the policy server.
        method: GET or POST.
        path: one of `PATHS`.
        body: the client's, byte by byte.
        accept: the client's Accept header.

    Raises:
        PolicyUnreachableError: the server cannot be reached, or does not answer.
    """
    assert path in PATHS, path  # noqa: S101
    stack = AsyncExitStack()
    try:
        headers = {"Content-Type": "application/json", "Accept": accept or "*/*"}
        reply = await stack.enter_async_context(server.relay(method, path, body, headers))
        relayed = {name: value for name, value in reply.headers.items() if name.lower() in _RELAYED}
        if not is_stream(reply):
            content = await reply.read()
            await stack.aclose()
            return Response(content, reply.status, headers=relayed)
    except BaseException:
        await stack.aclose()
        raise
    return StreamingResponse(_chunks(reply, stack), reply.status, headers=relayed)


def is_stream(reply: aiohttp.ClientResponse) -> bool:
    """Whether a reply is a stream of events."""
    return reply.content_type == "text/event-stream"


async def _chunks(reply: aiohttp.ClientResponse, stack: AsyncExitStack) -> AsyncIterator[bytes]:
    async with stack:
        async for chunk in reply.content.iter_any():
            yield chunk


async def events_of(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each event in a stream of events, including the closing [DONE]."""
    data: list[str] = []
    buffer = b""
    async for chunk in reply.content.iter_any():
        *lines, buffer = (buffer + chunk).split(b"\n")
        for raw in lines:
            line = raw.decode(errors="replace").rstrip("\r")
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data = []
    if data:
        yield "\n".join(data)
