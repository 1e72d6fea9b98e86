"""Checks the URL of a server, hides its password, and builds the headers of requests."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from memagent_graph.errors import PolicyRequestError
from memagent_graph.policies.redaction import find_query_credentials

NO_KEY: Final = "none"
"""The placeholder key for a server that is named only in a log, so that it gets no real key."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_CREDENTIALS = re.compile(r"(?:(?<=://)|^(?!\w+://)).*@", re.DOTALL)
"""User name and password in an address, even an invalid one."""


def remove_password(url: str) -> str:
    """Return the address without user name and password.

    Raises:
        PolicyRequestError: the text is not the address of a server.
    """
    parts = _split_url(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def remove_credentials(url: str) -> str:
    """Return the address without user name, password, and query parameters that are credentials.

    Raises:
        PolicyRequestError: the text is not the address of a server.
    """
    parts = urlsplit(remove_password(url))
    parameters = parse_qsl(parts.query, keep_blank_values=True)
    others = [(name, value) for name, value in parameters if not any(find_query_credentials({name: value}))]
    return urlunsplit(parts if others == parameters else parts._replace(query=urlencode(others)))


def split_query(url: str) -> tuple[str, dict[str, str]]:
    """Return the address without its query and fragment, and the query parameters."""
    parts = _split_url(url)
    return urlunsplit(parts._replace(query="", fragment="")), dict(parse_qsl(parts.query))


def extract_password(url: str) -> str:
    """Return the decoded password in the address, or an empty text without one.

    Raises:
        PolicyRequestError: the text is not the address of a server.
    """
    return unquote(_split_url(url).password or "")


def parse_origin(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port. Addresses of the same server have the same origin.

    Raises:
        PolicyRequestError: the text is not the address of a server.
    """
    parts = _split_url(url)
    return parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme]


def _split_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise PolicyRequestError(
            f"{_CREDENTIALS.sub('', url)} is not the address of a server",
            hint="Write it as http://HOST:PORT/v1; put an IPv6 address in brackets, as in http://[::1]:8000/v1. In "
            "a user name or password, write %2F for /, %40 for @, %3A for : and %23 for #.",
        )
    return parts


_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def find_environment_key(header_names: Iterable[str]) -> str:
    """Return OPENAI_API_KEY, or an empty text for a server whose key is in a header, which needs no other key."""
    has_own_key = not {"api-key", "authorization"}.isdisjoint(map(str.lower, header_names))
    return "" if has_own_key else os.environ.get("OPENAI_API_KEY", "")


def make_request_headers(url: str, key: str, custom_headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of every request.

    User name and password in the address take the key's place. OpenAI's organisation and project come from the
    environment, and are sent only together with a key.

    Raises:
        PolicyRequestError: the key or a custom header cannot be sent.
    """
    _require_printable("the API key", key)
    user = _split_url(url).username
    credentials = f"{unquote(user or '')}:{extract_password(url)}".encode()
    headers = {
        "Authorization": f"Bearer {key or NO_KEY}" if user is None else f"Basic {b64encode(credentials).decode()}",
        "Accept": "application/json",
        "Content-Type": "application/json",
        "User-Agent": "memagent-graph",
    }
    if user is None and key not in {"", NO_KEY}:
        variables = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
        headers |= {name: os.environ[variable] for name, variable in variables.items() if os.environ.get(variable)}
    for name, value in custom_headers.items():
        _require_valid_header(name, value)
        headers = {header: headers[header] for header in headers if header.lower() != name.lower()} | {name: value}
    # Azure accepts only one kind of key.
    names = set(map(str.lower, custom_headers))
    if key in {"", NO_KEY} and "api-key" in names and "authorization" not in names:
        headers.pop("Authorization", None)
    return headers


def _require_valid_header(name: str, value: str) -> None:
    if not _HEADER_NAME.fullmatch(name):
        raise PolicyRequestError(f"{name!r} is not the name of a header", hint='Use one such as "X-Session-Id".')
    _require_printable(f"the header {name}", value)


def _require_printable(subject: str, value: str) -> None:
    if not (value.isascii() and value.isprintable()):
        raise PolicyRequestError(
            f"{subject} has characters that cannot be in a request",
            hint="Does it contain a line break, or a typing error?",
        )


def require_unused_header(name: str, headers: Mapping[str, str]) -> str:
    """Return the name of a header unchanged.

    Raises:
        PolicyRequestError: the name is invalid, or requests have this header already.
    """
    _require_valid_header(name, "")
    if name.lower() in {header.lower() for header in (*headers, "Content-Length", "Host", "Transfer-Encoding")}:
        raise PolicyRequestError(f"the header {name} has another meaning", hint='Use one such as "X-Session-Id".')
    return name
