"""A server's address: checked, split into its parts, and shown without its password."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from memagent_graph.errors import PolicyRequestError

NO_KEY: Final = "none"
"""The key for a server that only a log names: nobody's."""
_PORTS = {"http": 80, "https": 443}
_USER = re.compile(r"(?:(?<=://)|^(?!\w+://)).*@", re.DOTALL)
"""User name and password, even in an address that is otherwise wrong."""


def checked_url(url: str) -> str:
    """Return the address, unchanged.

    Raises:
        PolicyRequestError: it is not one.
    """
    _parts(url)
    return url


def without_password(url: str) -> str:
    """Return the address without user name and password.

    Raises:
        PolicyRequestError: it is not one.
    """
    parts = _parts(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def without_query(url: str) -> tuple[str, dict[str, str]]:
    """Return the address without what follows a question mark, and that as names and values."""
    parts = _parts(url)
    return urlunsplit(parts._replace(query="", fragment="")), dict(parse_qsl(parts.query))


def password(url: str) -> str:
    """Return the password in the address, decoded; empty if there is none."""
    return unquote(_parts(url).password or "")


def basic_authorization(url: str) -> str | None:
    """Return the Authorization header for user name and password in the address; None if there are none."""
    parts = _parts(url)
    if parts.username is None:
        return None
    return f"Basic {b64encode(f'{unquote(parts.username)}:{password(url)}'.encode()).decode()}"


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: equal for two addresses of the same server.

    Raises:
        PolicyRequestError: it is not an address.
    """
    parts = _parts(url)
    return parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme]


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise PolicyRequestError(
            f"{_USER.sub('', url)} is not the address of a server",
            hint="Write it as http://HOST:PORT/v1; put an IPv6 address in brackets, as in http://[::1]:8000/v1. In "
            "a user name or password, write %2F for /, %40 for @, %3A for : and %23 for #.",
        )
    return parts
