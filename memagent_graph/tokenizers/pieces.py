"""Cuts long texts into pieces that together have the tokens of the whole text, and shortens texts.

Tokenizers split text into words and encode every word separately, so a cut between two words does not change the
tokens. All pre-tokenizers in use split between a letter and a space before a letter, and between a newline and a letter
(`tests/unit/test_chunking.py` checks this). Pieces also keep regular expressions within their limits: 1 MB of spaces
makes tiktoken panic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from memagent_graph.words import find_last_character_end

PIECE_BYTES = 16_384
"""The usual maximum size of a piece, in UTF-8 bytes (in characters for a text in memory)."""

MAX_PIECE_BYTES = 262_144
"""The size at which a text without a safe cut is cut anyway."""
_MAX_PIECE_CHARACTERS = MAX_PIECE_BYTES // 4


def find_safe_cut(window: str, lowest: int) -> int | None:
    """Return the last safe cut of `window` at or after the character `lowest`, or None.

    A cut at `i` separates `window[:i]` from `window[i:]`. Boundaries of words are preferred to boundaries of lines.
    """
    space = window.rfind(" ", lowest, len(window) - 1)
    while space > 0:
        if window[space - 1].isalpha() and window[space + 1].isalpha():
            return space
        space = window.rfind(" ", lowest, space)
    newline = window.rfind("\n", max(lowest - 1, 0), len(window) - 1)
    while newline >= 0:
        if window[newline + 1].isalpha():
            return newline + 1
        newline = window.rfind("\n", max(lowest - 1, 0), newline)
    return None


def cut_pieces(text: str) -> Iterator[str]:
    """Cut a text in memory into pieces, in the same way as a stored document."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        cuts = (find_safe_cut(text[start : start + size], size // 2) for size in (PIECE_BYTES, _MAX_PIECE_CHARACTERS))
        end = start + next(filter(None, cuts), _MAX_PIECE_CHARACTERS)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


_ELLIPSIS = " [...] "
_MAX_TOKEN_CHARACTERS = 16
"""An upper bound for the characters per token of the result. Ordinary text has about 4."""


def shorten_text(text: str, max_tokens: int, count: Callable[[str], int]) -> str:
    """Return `text`, or its beginning and end with "[...]" between, in at most `max_tokens` tokens by `count`."""
    if len(text) <= max_tokens * _MAX_TOKEN_CHARACTERS and count(text) <= max_tokens:
        return text
    lengths = range(min(len(text), max_tokens * _MAX_TOKEN_CHARACTERS))
    length = bisect_right(lengths, max_tokens, 1, key=lambda length: count(_remove_middle(text, length))) - 1
    return _remove_middle(text, length) if length > 0 else text[:1]


def _remove_middle(text: str, characters: int) -> str:
    """Return `characters` characters of a text: two thirds from its beginning, and one third from its end."""
    tail_length = characters // 3
    cuts = (characters - tail_length, len(text) - tail_length)
    head_end, tail_start = (find_last_character_end(text, cut) for cut in cuts)
    return f"{text[:head_end].rstrip()}{_ELLIPSIS}{text[tail_start:].lstrip()}".rstrip()
