"""Escapes the text of documents and policies for each format of a report.

Documents are not trusted. Their text may contain a spreadsheet formula, a link, or a remote image; a report
shows all of it as plain text.
"""

from __future__ import annotations

import re
from typing import Final

_UNWRITABLE: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_FORMULA: Final = re.compile(r"^\s*[=+\-@\uff1d\uff0b\uff0d\uff20\u2212|%]|^[\t\r\n]")
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]|<>~$&#]|!(?=\[))|(^[+\-=:!])|(?<=^)(\d+)([.)])")
_ACTIVE: Final = re.compile(r"(?i)\b(https?|ftp|file|mailto|javascript|data)(:)|(?<![\w.])(www)(\.)|(@)")
_BREAK: Final = "\u2060"
"""The word joiner: it is invisible, and programs do not turn an address that contains it into a link."""


def writable(text: str) -> str:
    """Replace control characters, marks of text direction, and half surrogate pairs by U+FFFD."""
    return _UNWRITABLE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def put_in_one_line(text: str) -> str:
    """Return a text in one line, cleaned by `writable`."""
    return " ".join(writable(text).split())


def escape_for_spreadsheet(text: str) -> str:
    """Return a text that a spreadsheet shows as text: an apostrophe is put in front of what would be a formula."""
    text = writable(text)
    return f"'{text}" if _FORMULA.match(text) else text


def escape_markdown(text: str) -> str:
    """Escape a text, in one line, so that Markdown makes no link, image, HTML, TeX, list or table cell of it."""
    text = _ACTIVE.sub(lambda match: "".join(part for part in match.groups() if part) + _BREAK, put_in_one_line(text))
    return _MARKDOWN.sub(_escape_in_markdown, text)


def _escape_in_markdown(match: re.Match[str]) -> str:
    return f"{match[3]}\\{match[4]}" if match[3] else f"\\{match[0]}"
