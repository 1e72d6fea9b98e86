"""Options of uvicorn under which nobody without a key can fill the memory, or take connections and send nothing."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 30.0
"""How long a client may take to send a request's headers."""
_IDLE_SECONDS: Final = 75
"""How long a connection stays open after a request: longer than clients and proxies keep theirs, so that they close it
first. Otherwise a request could be sent into a connection that this server is closing."""


class BoundedProtocol(H11Protocol):
    """HTTP that closes connections on which no request begins. uvicorn does so only where nothing at all arrives after
    an earlier request.
    """

    _alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._expect_request(HEADER_SECONDS)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._expect_request(_IDLE_SECONDS + HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        if self._alarm is not None:
            self._alarm.cancel()

    def _expect_request(self, seconds: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self.loop.call_later(seconds, self._close_without_request, self.cycle)

    def _close_without_request(self, newest: Any) -> None:
        if self.cycle is newest and (newest is None or newest.response_complete):
            self.transport.close()


BOUNDED_HTTP: Final[dict[str, Any]] = {"http": BoundedProtocol, "ws": "none", "timeout_keep_alive": _IDLE_SECONDS}
"""h11 bounds the headers of a request, to 64 KiB. httptools, which uvicorn uses if it is installed, does not. There are
no WebSockets here."""
