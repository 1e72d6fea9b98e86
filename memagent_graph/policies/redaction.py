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
_CREDENTIAL_NAME: Final = re.compile(
    r"auth(?!or(?!i))|cookie|credential|passw|pwd|secret|signature|(?:key|token|sig|jwt)(?![a-z])", re.IGNORECASE
)
"""Found in the name of a header or query parameter with a credential. Others may have ordinary words."""


def find_credentials(headers: Mapping[str, str]) -> Iterator[str]:
    """Yield the credentials in headers, such as KEY in "Bearer KEY" and 'Token token="KEY"'.

    Words of 8 or more characters count, after the first word, in headers whose names suggest a credential or whose
    values begin with "Bearer". A shorter word counts only as the last word of an authorization header.
    """
    for name, value in headers.items():
        words = value.split()
        if words and (_CREDENTIAL_NAME.search(name) or words[0].lower() == "bearer"):
            yield from words[-1:] if name.lower().endswith("authorization") else ()
            parts = [word.partition("=")[2].strip('",;') for word in words]
            yield from (part for part in (*words[1:], *parts) if len(part) >= _MIN_SUBSTRING_CHARACTERS)


def find_query_credentials(parameters: Mapping[str, object]) -> Iterator[str]:
    """Yield the long values of query parameters with names of credentials, or `code` (the key of Azure Functions)."""
    for name, value in parameters.items():
        text = str(value)
        if len(text) >= _MIN_SUBSTRING_CHARACTERS and (_CREDENTIAL_NAME.search(name) or name.lower().endswith("code")):
            yield text


def make_redactor(secrets: Iterable[str]) -> Callable[[str], str]:
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
