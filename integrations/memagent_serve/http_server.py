"""Runs the application until the process is stopped."""

from __future__ import annotations

import socket
from typing import Any, Final

import uvicorn

from memagent_serve.app import Serving, make_app
from memagent_serve.live import LivePage
from memagent_serve.page_sessions import PageSessions

_SECONDS_TO_STOP: Final = 5
_IDLE_SECONDS: Final = 75
"""How long a connection without a request stays open: longer than clients and proxies keep theirs, so that they close
it first. Otherwise a request could be sent into a connection that this server is closing."""
PROTOCOL: Final[dict[str, Any]] = {"http": "h11", "ws": "none"}
"""h11 bounds the headers of a request, to 64 KiB. httptools, which uvicorn uses if it is installed, does not: a
client without a key could fill the memory. There are no WebSockets here."""


async def run_server(serving: Serving, listener: socket.socket, sessions: PageSessions) -> None:
    """Answer clients.

    Args:
        serving: the resources of the server.
        listener: from `addresses.listen`.
        sessions: the browsers that may use the live page.
    """
    config = uvicorn.Config(
        make_app(serving, LivePage(serving, sessions).routes(), sessions),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=serving.settings.max_connections,
        timeout_keep_alive=_IDLE_SECONDS,
        # Without this, a stream that never ends would keep the server from stopping.
        timeout_graceful_shutdown=_SECONDS_TO_STOP,
        **PROTOCOL,
    )
    await uvicorn.Server(config).serve(sockets=[listener])
