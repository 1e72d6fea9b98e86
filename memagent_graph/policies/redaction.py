"""Removes secrets from the messages of servers before they appear in errors, logs or files."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final
from urllib.parse import quote

HIDDEN: Final = "[hidden]"
_MIN_SUBSTRING_CHARACTERS: Final = 8


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
