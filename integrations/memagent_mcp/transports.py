"""Runs the server over standard input and output, or over HTTP. There is no authentication."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable
from io import TextIOWrapper
from typing import Any, Final

import anyio
import uvicorn
from mcp.server.fastmcp import FastMCP
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings

from memagent_graph.addresses import LOCAL_NAMES, in_url
from memagent_graph.bounded_http import BOUNDED_HTTP
from memagent_graph.plain_text import in_one_line

_SECONDS_TO_STOP: Final = 3
_MAX_SESSIONS: Final = 1000
"""Each takes about 50 KB. The SDK ends one after half an hour without a request or stream."""


def reserve_standard_output() -> TextIOWrapper:
    """Reserve standard output for the protocol; all other output, also of native code, goes to standard error.

    Call this before anything that may print is imported.
    """
    sys.stdout.flush()
    protocol = TextIOWrapper(os.fdopen(os.dup(1), "wb"), encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    return protocol


async def serve_stdio(server: FastMCP[Any], output: TextIOWrapper) -> None:
    """Serve the client that started this process, until it closes standard input.

    Args:
        server: from `make_server`.
        output: from `reserve_standard_output`.
    """
    # The SDK reads standard input in a thread that cannot be interrupted. With the default handler, Ctrl-C ends the
    # process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_shorten)
    lowlevel = server._mcp_server  # `run_stdio_async` only writes to sys.stdout
    async with stdio_server(stdout=anyio.wrap_file(output)) as (incoming, outgoing):
        await lowlevel.run(incoming, outgoing, lowlevel.create_initialization_options())


async def serve_http(server: FastMCP[Any], listener: socket.socket, names: Iterable[str]) -> None:
    """Serve clients at /mcp (streamable HTTP) until the process receives a signal to stop.

    Args:
        server: from `make_server`.
        listener: from `listen`.
        names: host names that clients may use, besides localhost. Requests with another host name, or from a web page
            of another host, are refused. This prevents DNS rebinding: a web page cannot reach the server through a host
            name of its own.
    """
    for handler in logging.getLogger().handlers:
        handler.addFilter(_shorten)
    server.settings.transport_security = allow_names(names)
    server.settings.max_sessions = _MAX_SESSIONS
    config = uvicorn.Config(
        server.streamable_http_app(),
        log_level="warning",
        access_log=False,
        # Without this, a request that never ends would keep the server from stopping.
        timeout_graceful_shutdown=_SECONDS_TO_STOP,
        **BOUNDED_HTTP,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def _shorten(record: logging.LogRecord) -> bool:
    """Keep one printable line: the SDK logs hundreds for a request of a newer protocol, and names that clients send."""
    record.msg, record.args = in_one_line(record.getMessage().partition("\n")[0]), ()
    return True


def url_of(listener: socket.socket) -> str:
    """Return the URL of the server."""
    host, port = listener.getsockname()[:2]
    return f"http://{in_url(host)}:{port}/mcp"


def allow_names(names: Iterable[str]) -> TransportSecuritySettings:
    """Return the accepted Host and Origin headers: this machine and `names`, with any port."""
    hosts = [in_url(name) for name in (*LOCAL_NAMES, *names)]
    forms = [form for host in dict.fromkeys(hosts) for form in (host, f"{host}:*")]
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=forms,
        allowed_origins=[f"{scheme}://{form}" for scheme in ("http", "https") for form in forms],
    )
