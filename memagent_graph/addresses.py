"""Opens and checks the address that a server listens on, and checks the host names that clients use."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Final

from memagent_graph.errors import MemAgentError

LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; with port 0, any free port is used.

    Raises:
        MemAgentError: the address cannot be used.
    """
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Connections inherit this option. Without it, the second part of a reply waits up to 40 ms for the client to
        # acknowledge the first. asyncio sets it only for sockets that it created itself.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, UnicodeError) as error:  # UnicodeError: it is not the name of a host
        raise MemAgentError(
            f"cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}",
            hint="Choose another address with --host and --port; port 0 takes any free port.",
        ) from error


def list_host_names(host: str, names: Iterable[str], *, danger: str | None, remedy: str) -> tuple[str, ...]:
    """Return the host names that clients use for an address, unless other machines can reach it, which is dangerous.

    Args:
        host: the address. It is a host name for clients, too, unless it means all addresses (0.0.0.0 or ::).
        names: further host names that clients use.
        danger: why other machines should not reach the server; None if they may.
        remedy: the hint of the error for a dangerous address.

    Raises:
        MemAgentError: the address is dangerous, or there is no host name, or one with a scheme or a port.
    """
    try:
        address = ipaddress.ip_address(host)
        is_local, means_all = address.is_loopback, address.is_unspecified
    except ValueError:  # it is a name
        is_local, means_all = host == "localhost", False
    if danger is not None and not is_local:
        raise MemAgentError(f"other machines can reach {host}, and {danger}", hint=remedy)
    host_names = (*names,) if means_all else (*names, host)
    for name in names:
        if name.count(":") == 1 or _parse_host(format_host(name)) != name.lower():
            hint = "Write --server-name without a scheme and a port, as in reader.example.org; any port is accepted."
            raise MemAgentError(f"{name!r} is not a host name, so no request could have it", hint=hint)
    if not host_names:
        raise MemAgentError(
            f"{host} means all addresses of this machine, and no host name is set for clients",
            hint="Add --server-name with the host's name or address; requests with another one are refused.",
        )
    return host_names


def format_host(host: str) -> str:
    """Return a host as it is written in a URL, with brackets around an IPv6 address."""
    return f"[{host}]" if ":" in host else host


class AllowedNames:
    """The accepted Host and Origin headers: this machine and `names`, with any port.

    They prevent DNS rebinding, where a web page reaches the server through a host name of its own.

    Args:
        names: host names that clients may use, in addition to localhost.
        origins: further origins whose web pages may send requests, such as https://chat.example.org.
    """

    def __init__(self, names: Iterable[str], origins: Iterable[str] = ()) -> None:
        self._hosts = frozenset(name.lower() for name in (*LOCAL_NAMES, *names))
        self.origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        """The further origins as browsers write them."""

    def allows_host(self, header: str) -> bool:
        """Return whether a Host header names this server."""
        return _parse_host(header) in self._hosts

    def allows_origin(self, header: str) -> bool:
        """Return whether a web page of this origin may send requests."""
        scheme, _, host = header.lower().partition("://")
        return header.lower() in self.origins or (scheme in {"http", "https"} and _parse_host(host) in self._hosts)


_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]+)?")


def _parse_host(header: str) -> str | None:
    match = _HOST.fullmatch(header.lower())
    return match and (match[1] or match[2])
