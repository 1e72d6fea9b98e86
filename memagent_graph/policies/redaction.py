"""Removes secrets from the messages of servers before they appear in errors, logs or files."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final
from urllib.parse import quote

HIDDEN: Final = "[hidden]"
_MIN_SUBSTRING_CHARACTERS: Final = 8
_CREDENTIAL_HEADER: Final = re.compile(r"auth(?!or\b)|basic|bearer|cookie|key\b|secret|token\b", re.IGNORECASE)
"""Found in the name or the first word of a header with credentials. Other headers may have ordinary words."""


def find_credentials(headers: Mapping[str, str]) -> Iterator[str]:
    """Yield the credentials in headers, such as KEY in "Bearer KEY" and 'Token token="KEY"'.

    A short word counts only as the last one for authorization. Elsewhere it may be an ordinary word.
    """
    for name, value in headers.items():
        words = value.split()
        if words and _CREDENTIAL_HEADER.search(f"{name} {words[0]}"):
            yield from words[-1:] if name.lower().endswith("authorization") else ()
            parts = [word.partition("=")[2].strip('",;') for word in words]
            yield from (part for part in (*words[1:], *parts) if len(part) >= _MIN_SUBSTRING_CHARACTERS)


def find_query_credentials(parameters: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of query parameters that may be credentials: all long ones except for Azure's "api-version"."""
    for name, value in parameters.items():
        if len(value) >= _MIN_SUBSTRING_CHARACTERS and name.lower() != "api-version":
            yield value


def make_redaction(secrets: Iterable[str]) -> Callable[[str], str]:
    """Return a function that replaces secrets in a text with "[hidden]", in every spelling that a server may use.

    A secret of fewer than 8 characters is replaced only as a whole word, so that a password such as "pw" does not make
    messages unreadable.

    Args:
        secrets: keys and passwords. Empty texts are ignored.
    """
    spellings = {
        spelling
        for secret in secrets
        if secret
        for spelling in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, ""), html.escape(secret))
    }
    # Longest first, because one spelling may be the beginning of another.
    patterns = [
        re.escape(spelling) if len(spelling) >= _MIN_SUBSTRING_CHARACTERS else rf"(?<!\w){re.escape(spelling)}(?!\w)"
        for spelling in sorted(spellings, key=len, reverse=True)
    ]
    return partial(re.compile("|".join(patterns) or r"(?!)").sub, HIDDEN)
