"""Cuts long texts into pieces that together have the tokens of the whole text, and shortens texts.

Tokenizers split text into words and encode every word alone, so a cut between two words does not change the tokens. All
pre-tokenizers in use have such a boundary between a letter and a space before a letter, and between a newline and a
letter (`tests/unit/test_chunking.py` checks it). Pieces also keep regular expressions within their limits: 1 MB of
spaces makes tiktoken panic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from memagent_graph.words import find_last_character_end

PIECE_BYTES = 16_384
"""The usual maximum size of a piece, in UTF-8 bytes (in characters for a text in memory)."""

MAX_PIECE_BYTES = 262_144
"""The size at which a text without a safe cut is cut anyway."""


def find_safe_cut(window: str, lowest: int) -> int | None:
    """Return the last safe cut of `window` at or after the character `lowest`, or None.

    A cut at `i` separates `window[:i]` from `window[i:]`. Boundaries of words are preferred to boundaries of lines.
    """
    at = window.rfind(" ", lowest, len(window) - 1)
    while at > 0:
        if window[at - 1].isalpha() and window[at + 1].isalpha():
            return at
        at = window.rfind(" ", lowest, at)
    at = window.rfind("\n", max(lowest - 1, 0), len(window) - 1)
    while at >= 0:
        if window[at + 1].isalpha():
            return at + 1
        at = window.rfind("\n", max(lowest - 1, 0), at)
    return None


def cut_pieces(text: str) -> Iterator[str]:
    """Cut a text in memory into pieces, in the same way as a stored document."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        cut = None
        for size in (PIECE_BYTES, MAX_PIECE_BYTES // 4):
            cut = find_safe_cut(text[start : start + size], size // 2)
            if cut is not None:
                break
        end = start + (cut if cut is not None else MAX_PIECE_BYTES // 4)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


_ELLIPSIS = " [...] "
_MAX_TOKEN_CHARACTERS = 16
"""Maximum characters per token to try. Ordinary text has about 4."""


def shorten_text(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """Return `text`, or its beginning and end with "[...]" between, in at most `tokens` tokens by `count`."""
    if len(text) <= tokens * _MAX_TOKEN_CHARACTERS and count(text) <= tokens:
        return text
    lengths = range(min(len(text), tokens * _MAX_TOKEN_CHARACTERS))
    fits = bisect_right(lengths, tokens, 1, key=lambda length: count(_ends(text, length))) - 1
    return _ends(text, fits) if fits > 0 else text[:1]


def _ends(text: str, characters: int) -> str:
    """Return two thirds of the characters from the beginning of a text, and one third from its end."""
    tail = characters // 3
    head, rest = (find_last_character_end(text, at) for at in (characters - tail, len(text) - tail))
    return f"{text[:head].rstrip()}{_ELLIPSIS}{text[rest:].lstrip()}".rstrip()
