"""Where a server listens, and by which names clients may call it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from memagent_graph.errors import MemAgentError

LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any that is free.

    Raises:
        MemAgentError: the address cannot be had.
    """
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Its connections have it, too. Without it the second part of a reply waits for a client that confirms the first
        # late, 40 ms; asyncio sets it by itself only for sockets that it made.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
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


def as_name(host: str) -> list[str]:
    """The address as clients may call it: none for 0.0.0.0 and ::, which stand for all addresses."""
    try:
        return [] if ipaddress.ip_address(host).is_unspecified else [host]
    except ValueError:
        return [host]


def in_url(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


class AllowedNames:
    """The Host and Origin headers that are answered: those of this machine and of `names`, at any port.

    So no page that a browser shows can reach the server by a name of its own (DNS rebinding).

    Args:
        names: what clients may call this host, besides localhost.
        origins: web pages of other hosts that may ask, as in https://chat.example.org.
    """

    def __init__(self, names: Iterable[str], origins: Iterable[str] = ()) -> None:
        self._hosts = frozenset(name.lower() for name in (*LOCAL_NAMES, *names))
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def has_host(self, header: str) -> bool:
        """Whether a Host header names this server."""
        return _host_of(f"//{header}") in self._hosts

    def has_origin(self, header: str) -> bool:
        """Whether a page of this origin may ask."""
        origin = header.lower()
        return origin in self._origins or (
            origin.startswith(("http://", "https://")) and _host_of(origin) in self._hosts
        )


def _host_of(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
            return None
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname
