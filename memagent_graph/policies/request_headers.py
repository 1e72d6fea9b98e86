"""The headers of a server's requests: its key, and those that a user adds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

from memagent_graph.errors import PolicyRequestError
from memagent_graph.policies.server_url import NO_KEY

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def request_headers(authorization: str | None, key: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of every request; the environment can name OpenAI's organisation and project.

    These go only where a key goes: a server that only a log names gets neither.
    """
    headers = {
        "Authorization": authorization or f"Bearer {key or NO_KEY}",
        "Accept": "application/json",
        "Content-Type": "application/json",
        "User-Agent": "memagent-graph",
    }
    if key not in {"", NO_KEY}:
        named = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
        headers |= {name: os.environ[variable] for name, variable in named.items() if os.environ.get(variable)}
    for name, value in own.items():
        _require_header(name, value)
        headers = {known: text for known, text in headers.items() if known.lower() != name.lower()} | {name: value}
    if key in {"", NO_KEY} and "api-key" in map(str.lower, own):  # Azure's; two keys would contradict each other
        headers.pop("Authorization", None)
    return headers


def _require_header(name: str, value: str) -> None:
    if not _HEADER_NAME.fullmatch(name):
        raise PolicyRequestError(f"{name!r} is not the name of a header", hint='Use one such as "X-Session-Id".')
    if not (value.isascii() and value.isprintable()):
        raise PolicyRequestError(
            f"the header {name} has characters that cannot be in a request",
            hint="Does it contain a line break, or a typing error?",
        )


def checked_header(name: str, taken: Mapping[str, str]) -> str:
    """Return a header's name, if it can be one and is not sent already."""
    _require_header(name, "")
    if name.lower() in {each.lower() for each in (*taken, "Content-Length", "Host", "Transfer-Encoding")}:
        raise PolicyRequestError(f"the header {name} has another meaning", hint='Use one such as "X-Session-Id".')
    return name
