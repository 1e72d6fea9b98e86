"""Cuts long texts into pieces that together have the tokens of the whole, and shortens texts to a number of tokens.

Tokenizers first split text into words and then encode each word by itself, so a cut that falls between two words
changes nothing. Between a letter and a space followed by a letter, and between a newline and a letter, every
pre-tokenizer in use has such a boundary (`tests/unit/test_chunking.py` checks it). Giving a tokenizer pieces instead
of megabytes also keeps its regular expressions below their limits: 1 MB of spaces makes tiktoken panic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memagent_graph.words import is_character_end

PIECE_BYTES = 16_384
"""A piece's usual largest size, in UTF-8 bytes (or in characters, where a text is cut in memory)."""

MAX_PIECE_BYTES = 262_144
"""The size at which a text without a safe cut is cut anyway."""


def safe_cut(window: str, lowest: int) -> int | None:
    """Find the last safe cut of `window` at or after the character `lowest`, or None.

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


def pieces(text: str) -> Iterator[str]:
    """Cut a text in memory into pieces, in the same way as a stored document."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        cut = None
        for size in (PIECE_BYTES, MAX_PIECE_BYTES // 4):
            cut = safe_cut(text[start : start + size], size // 2)
            if cut is not None:
                break
        end = start + (cut if cut is not None else MAX_PIECE_BYTES // 4)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


_ELLIPSIS = " [...] "
_MAX_TOKEN_CHARACTERS = 16
"""The most characters in a token that is worth trying; ordinary text has about four."""


def shortened(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """Return `text`, or its beginning and end with "[...]" between, in at most `tokens` tokens by `count`."""
    if len(text) <= tokens * _MAX_TOKEN_CHARACTERS and count(text) <= tokens:
        return text
    fits, exceeds = 0, min(len(text), tokens * _MAX_TOKEN_CHARACTERS)
    while fits + 1 < exceeds:
        middle = (fits + exceeds) // 2
        if count(_ends(text, middle)) <= tokens:
            fits = middle
        else:
            exceeds = middle
    return _ends(text, fits) if fits else text[:1]


def _ends(text: str, characters: int) -> str:
    """Return the first two thirds of a number of characters from the beginning, the others from the end."""
    tail = characters // 3
    head, rest = (_character_start(text, at) for at in (characters - tail, len(text) - tail))
    return f"{text[:head].rstrip()}{_ELLIPSIS}{text[rest:].lstrip()}".rstrip()


def _character_start(text: str, at: int) -> int:
    return next(place for place in range(at, -1, -1) if is_character_end(text, place))
