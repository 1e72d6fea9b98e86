"""A server's address: checked where it is named, and told without a password in it."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit, urlunsplit

from memagent_graph.errors import PolicyRequestError


def checked_url(url: str) -> str:
    """The address as it is.

    Raises:
        PolicyRequestError: it is not one.
    """
    _parts(url)
    return url


def without_password(url: str) -> str:
    """The address without user name and password.

    Raises:
        PolicyRequestError: it is not one.
    """
    parts = _parts(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise PolicyRequestError(
            f"{url} is no server's address",
            hint="Write it as http://HOST:PORT/v1; an IPv6 address stands in brackets, as in http://[::1]:8000/v1.",
        )
    return parts
