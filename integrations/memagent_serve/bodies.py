"""Request bodies: bounded in size and time, and large ones together in memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from starlette.requests import Request
from starlette.types import Message, Receive

from memagent_serve.api_errors import ApiError, too_busy

LARGE_BYTES: Final = 1 << 20
"""Smaller bodies do not count for `BodyMemory`."""
_WAIT_SECONDS: Final = 10


class BodyMemory:
    """The memory that all large bodies may take together.

    Args:
        most: bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.used = 0
        """Bytes in use now."""

    @contextmanager
    def reservation(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves memory for a body of a size; it is given back at the end.

        The function raises an `ApiError`, 429, if the memory is used up.
        """
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            if size <= max(reserved, LARGE_BYTES):
                return
            if self.used + size - reserved > self._most:
                raise too_busy("other requests use all the memory for large ones; send it again later", _WAIT_SECONDS)
            self.used += size - reserved
            reserved = size

        try:
            yield reserve
        finally:
            self.used -= reserved


def bounded(
    receive: Receive,
    largest: int,
    idle_seconds: float,
    *,
    total_seconds: float = math.inf,
    reserve: Callable[[int], None] = lambda size: None,
) -> Receive:
    """Refuse bodies that are too large or do not arrive.

    Args:
        receive: the server's function for the parts of a request.
        largest: the maximum size in bytes.
        idle_seconds: how long a client may pause.
        total_seconds: how long the whole body may take.
        reserve: called with the size so far; see `BodyMemory`.

    Returns:
        a function that raises an `ApiError`: 413, 408, or that of `reserve`.
    """
    size = 0
    deadline = asyncio.get_running_loop().time() + total_seconds

    async def receive_part() -> Message:
        nonlocal size
        patience = min(idle_seconds, deadline - asyncio.get_running_loop().time())
        try:
            message = await asyncio.wait_for(receive(), patience)
        except TimeoutError as error:
            raise ApiError(408, "the request's body did not arrive in time", code="request_timeout") from error
        size += len(message.get("body", b""))
        require_size(size, largest)
        reserve(size)
        return message

    return receive_part


async def whole_body(request: Request, receive: Receive, largest: int, reserve: Callable[[int], None]) -> bytes:
    """Return the body of a JSON request. A size that the client declares is checked before anything arrives.

    Args:
        request: the request.
        receive: from `bounded`.
        largest: the maximum size in bytes.
        reserve: from `BodyMemory`.

    Raises:
        ApiError: 415, it is not plain JSON; or an error of `bounded`.
    """
    require_plain(request.headers.get("content-type"), request.headers.get("content-encoding"))
    length = request.headers.get("content-length", "")
    if length.isdecimal():
        require_size(int(length), largest)
        reserve(int(length))
    return await Request(request.scope, receive).body()


def require_size(size: int, largest: int) -> None:
    """Refuse a body that is too large.

    Raises:
        ApiError: 413.
    """
    if size > largest:
        raise ApiError(
            413,
            f"the body may have at most {largest:,} bytes; upload a long document with POST /v1/files and refer to it "
            "by its file_id, or start the server with a larger --max-body",
            code="request_too_large",
        )


def require_plain(content_type: str | None, content_encoding: str | None) -> None:
    """Refuse everything but plain JSON; also compressed bodies, which may be bombs.

    Raises:
        ApiError: 415.
    """
    if (content_encoding or "identity").lower() != "identity":
        raise ApiError(
            415, "compressed requests are not accepted; send the JSON uncompressed", code="unsupported_encoding"
        )
    if (content_type or "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON: send Content-Type: application/json", code="unsupported_type")
