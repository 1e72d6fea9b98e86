"""Running the server: over standard input and output, or over HTTP. There is no authentication."""

from __future__ import annotations

import ipaddress
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

from memagent_graph.errors import MemAgentError

_SECONDS_TO_STOP: Final = 3
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")


def reserve_standard_output() -> TextIOWrapper:
    """Take standard output for the protocol; whatever else writes there, native code included, goes to standard error.

    To be called before anything is loaded that may print.
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
    # The SDK reads standard input in a thread that nothing interrupts; without its own handler Ctrl-C ends the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    lowlevel = server._mcp_server  # `run_stdio_async` takes no other output than sys.stdout
    async with stdio_server(stdout=anyio.wrap_file(output)) as (incoming, outgoing):
        await lowlevel.run(incoming, outgoing, lowlevel.create_initialization_options())


async def serve_http(server: FastMCP[Any], listener: socket.socket, names: Iterable[str]) -> None:
    """Serve clients at /mcp (streamable HTTP), until the process is told to stop.

    Args:
        server: from `make_server`.
        listener: from `listen`.
        names: what clients may call this host, besides localhost. Requests that name another, or come from a web page
            of another, are refused, so that no page a browser shows can reach the server by a name of its own.
    """
    server.settings.transport_security = allowed_names(names)
    config = uvicorn.Config(
        server.streamable_http_app(),
        log_level="warning",
        access_log=False,
        # A request that never comes to its end would keep the server from stopping.
        timeout_graceful_shutdown=_SECONDS_TO_STOP,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any that is free.

    Raises:
        MemAgentError: the address cannot be had.
    """
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # UnicodeError: it is not the name of a host
        raise MemAgentError(
            f"cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}",
            hint="Name another with --host and --port; port 0 takes any that is free.",
        ) from error


def is_local(host: str) -> bool:
    """Whether only this machine can connect to such an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(listener: socket.socket) -> str:
    """Where clients find the server."""
    host, port = listener.getsockname()[:2]
    return f"http://{_in_url(host)}:{port}/mcp"


def allowed_names(names: Iterable[str]) -> TransportSecuritySettings:
    """The Host and Origin headers that are answered: those of this machine and of `names`, at any port."""
    hosts = [_in_url(name) for name in (*_LOCAL_NAMES, *names)]
    forms = [form for host in dict.fromkeys(hosts) for form in (host, f"{host}:*")]
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=forms,
        allowed_origins=[f"{scheme}://{form}" for scheme in ("http", "https") for form in forms],
    )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
