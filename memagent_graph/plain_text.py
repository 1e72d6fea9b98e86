"""Formats texts for people: counts, similar names, and texts without control characters or this machine's folders."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

# Control characters except tab and newline, those that turn the direction of a text, and no characters at all.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_JOINERS = "\u200c\u200d\u200e\u200f"
"""They shape letters, as in Persian and Hindi, join emoji, and join punctuation to words of Hebrew and Arabic."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_QUOTED_PATH = re.compile(
    r"(?<!\w)(['\"])(?:[A-Za-z]:\\|~?/|\\\\)(?![\s/])(?:(?!\1| /)[^\n])*[/\\]((?:(?!\1)[^\n/\\])+[/\\]*)\1"
)
"""An absolute path in quotation marks. Its names may have any characters, such as spaces."""
_PATH = re.compile(
    r"(?<![\w:/.])(?:~?/(?:[^\s'\"/\\]+[/\\])+"
    r"|(?:[A-Za-z]:\\|\\\\)(?:[^\s'\"/\\]+/|(?:[^\s'\"/\\.,:;]+ ){0,3}[^\s'\"/\\]+\\)+)([^\s'\"/\\]+)"
)
"""An absolute path. A space ends it, as in "POST /v1/models HTTP/1.1", except before a backslash."""


def replace_lone_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, each by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text)
    return text


def make_printable(text: str) -> str:
    """Return a text with U+FFFD in place of control characters. Line ends stay."""
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def make_one_line(text: str, max_characters: int | None = None) -> str:
    """Return a text in one line, cut to `max_characters`. Unprintable characters become spaces."""
    line = "".join(character if character.isprintable() or character in _JOINERS else " " for character in text)
    return line if max_characters is None or len(line) <= max_characters else line[: max_characters - 1] + "…"


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, as in "1 run" or "1,200 runs". The plural has an "s" if none is given."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def list_names(names: Sequence[object], max_names: int) -> str:
    """Return names as a phrase, with at most the first `max_names` of them."""
    text = ", ".join(map(str, names[:max_names]))
    return text if len(names) <= max_names else f"{text} and {len(names) - max_names:,} more"


def remove_folders(message: str, roots: Iterable[str] = ()) -> str:
    """Return a message that does not reveal folders of this machine.

    Args:
        message: the message, for example an error about a file.
        roots: folders or URLs. Paths below them become relative; other paths are replaced by their last part.
    """
    variants = [variant for root in roots if root for variant in (root, os.path.abspath(root))]  # noqa: PTH100
    folders = {variant.rstrip("/\\") for variant in variants}
    for folder in sorted(filter(None, folders), key=len, reverse=True):
        message = re.sub(rf"(?<![\w/.-]){re.escape(folder)}[/\\]", "", message)
    home = str(Path.home())
    message = re.sub(rf"{re.escape(home)}(?![\w-]|\.\w)", "~", message) if len(home) > 1 else message
    return _PATH.sub(r"\1", _QUOTED_PATH.sub(r"\1\2\1", message))


_MIN_SIMILARITY = 0.5
"""The cutoff for `difflib.get_close_matches`. Below it, most suggestions are wrong."""


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "", *, prefix: str = "") -> str:
    """Return a hint such as "Did you mean gated?".

    Args:
        name: the unknown name.
        names: the names that exist.
        otherwise: the hint if no name is similar, such as a list of the names.
        prefix: shown before each name, as in "my_tasks.py:".
    """
    suggestions = difflib.get_close_matches(name, names, cutoff=_MIN_SIMILARITY)
    names_with_prefix = " or ".join(f"{prefix}{suggestion}" for suggestion in suggestions)
    return f"Did you mean {names_with_prefix}?" if suggestions else otherwise
