"""Limits request bodies: each in size and time, and large bodies in total and for each key."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import Request
from starlette.types import Message, Receive

from memagent_serve.api_errors import APIError, make_too_busy_error
from memagent_serve.keys import Owner

LARGE_BYTES: Final = 1 << 20
"""Larger bodies are parsed in a thread, one at a time per key."""
_SMALL_BYTES: Final = 1 << 16
"""Bodies up to this size do not count for `BodyQuota`."""
_RETRY_SECONDS: Final = 10


@dataclass(eq=False)
class BodyQuota:
    """Limits the memory or disk space that bodies take together while they arrive."""

    max_bytes: int
    """Bytes for all keys."""
    max_bytes_per_key: int
    """Bytes for one key, unless it has a larger limit of its own."""
    _bytes_by_owner: Counter[str] = field(default_factory=Counter, init=False)

    @property
    def used_bytes(self) -> int:
        """The bytes in use now."""
        return self._bytes_by_owner.total()

    @contextmanager
    def reservation(self, owner: Owner, own_limit: int = 0) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves space for a body of a given size. The space is released at the end.

        `own_limit` is the key's own limit in bytes, which can raise `max_bytes_per_key`.

        The function raises an `APIError`, 429, if the space is used up.
        """
        reserved_bytes, max_bytes_per_key = 0, max(self.max_bytes_per_key, own_limit)

        def reserve(body_bytes: int) -> None:
            nonlocal reserved_bytes
            if body_bytes <= max(reserved_bytes, _SMALL_BYTES):
                return
            new_bytes = body_bytes - reserved_bytes
            if (
                self.used_bytes + new_bytes > self.max_bytes
                or self._bytes_by_owner[owner.name] + new_bytes > max_bytes_per_key
            ):
                raise make_too_busy_error(
                    "other requests use all the space for large ones; send the request again later", _RETRY_SECONDS
                )
            self._bytes_by_owner[owner.name] += new_bytes
            reserved_bytes = body_bytes

        try:
            yield reserve
        finally:
            self._bytes_by_owner[owner.name] -= reserved_bytes
            self._bytes_by_owner += Counter()  # removes zeros


def limit_body(
    receive: Receive,
    max_bytes: int,
    idle_seconds: float,
    total_seconds: float,
    reserve: Callable[[int], None],
) -> Receive:
    """Wrap `receive` so that it refuses bodies that are too large or do not arrive.

    Args:
        receive: the server's function for the parts of a request.
        max_bytes: the maximum size in bytes.
        idle_seconds: how long a client may pause.
        total_seconds: how long the body may take to arrive.
        reserve: called with the size so far; see `BodyQuota`.

    Returns:
        A function that raises an `APIError` 413 or 408, or the error of `reserve`.
    """
    received_bytes = 0
    deadline = asyncio.get_running_loop().time() + total_seconds

    async def receive_part() -> Message:
        nonlocal received_bytes
        timeout = min(idle_seconds, deadline - asyncio.get_running_loop().time())
        try:
            message = await asyncio.wait_for(receive(), timeout)
        except TimeoutError as error:
            raise APIError(408, "the request's body did not arrive in time", code="request_timeout") from error
        received_bytes += len(message.get("body", b""))
        require_size(received_bytes, max_bytes)
        reserve(received_bytes)
        return message

    return receive_part


async def read_body(
    request: Request,
    max_bytes: int,
    idle_seconds: float,
    total_seconds: float,
    *,
    reserve: Callable[[int], None] = lambda size: None,
) -> bytes:
    """Return the body of a JSON request within the limits of `limit_body`.

    A size that the client declares is checked before anything arrives.

    Raises:
        APIError: 415, it is not uncompressed JSON; or an error of `limit_body`.
    """
    # A compressed body may be a decompression bomb.
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise APIError(
            415, "compressed requests are not accepted; send the JSON uncompressed", code="unsupported_encoding"
        )
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise APIError(415, "the body must be JSON: send Content-Type: application/json", code="unsupported_type")
    declared_length = request.headers.get("content-length", "")
    if declared_length.isdecimal():
        require_size(int(declared_length), max_bytes)
        reserve(int(declared_length))
    receive = limit_body(request.receive, max_bytes, idle_seconds, total_seconds, reserve)
    return await Request(request.scope, receive).body()


def require_size(body_bytes: int, max_bytes: int) -> None:
    """Refuse a body that is too large.

    Raises:
        APIError: 413.
    """
    if body_bytes > max_bytes:
        raise APIError(
            413,
            f"the body may have at most {max_bytes:,} bytes: the limit is --max-body, or --storage for an upload, or "
            "max_bytes of the key. POST /v1/files takes a long document, which requests then name by its file_id",
            code="request_too_large",
        )
