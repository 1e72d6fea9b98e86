"""Options for uvicorn that limit the memory and connections that clients without a key can use."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 30.0
"""Maximum time for a client to send the headers of a request."""
_IDLE_SECONDS: Final = 75
"""Seconds that a connection stays open after a request. Clients and proxies should close it first, because a request
that arrives while the server closes the connection is lost. So this is longer than their time-outs."""
SEND_SECONDS = 300.0
"""Maximum time for a client to take `_SENT_BYTES` of a response that is waiting for it. The kernel takes more of it
only after a megabyte or two went out, for which a slow client needs minutes."""
_SENT_BYTES: Final = 16_384


class BoundedProtocol(H11Protocol):
    """Closes a connection if no request begins in time, or if the client does not take the responses.

    uvicorn does so only if no byte arrives after a request.
    """

    _timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._expect_request(HEADER_SECONDS)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._expect_request(_IDLE_SECONDS + HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for the client."""
        super().connection_lost(exc)
        for timer in filter(None, (self._timer, self._send_timer)):
            timer.cancel()

    def pause_writing(self) -> None:
        """Wait for the client to take a part of the response."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Stop waiting for the client to take a part of the response."""
        super().resume_writing()
        if self._send_timer is not None and not self.transport.is_closing():
            self._send_timer.cancel()

    def _expect_reading(self, last_size: int | None = None) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
        size = self.transport.get_write_buffer_size()
        if last_size is not None and size > last_size - _SENT_BYTES:
            self.transport.abort()
        else:
            self._send_timer = self.loop.call_later(SEND_SECONDS, self._expect_reading, size)

    def _expect_request(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._close_without_request, self.cycle)

    def _close_without_request(self, last_cycle: Any) -> None:
        if self.cycle is last_cycle and (last_cycle is None or last_cycle.response_complete):
            self.transport.close()  # waits until the client has taken the rest of the last response
            self._expect_reading()


BOUNDED_HTTP: Final[dict[str, Any]] = {"http": BoundedProtocol, "ws": "none", "timeout_keep_alive": _IDLE_SECONDS}
"""Arguments for `uvicorn.Config`. h11 bounds the headers of a request to 64 KiB; httptools, which uvicorn would prefer,
does not. WebSockets are off."""
