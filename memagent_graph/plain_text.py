"""Text for people: counts in words, and text of documents, policies and servers without control sequences."""

from __future__ import annotations

import re

# Control characters except tab and newline, and those that change the direction of writing.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """Return a text with any number of lines; control characters become U+FFFD."""
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def in_one_line(text: str, longest: int | None = None) -> str:
    """Return a text in one line with a maximum number of characters; what is not printable becomes a space."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if longest is None or len(shown) <= longest else shown[: longest - 1] + "…"


def counted(count: int, what: str) -> str:
    """As in "1 run", "1,200 runs"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
