"""Counts the tokens of a text in pieces, with the same result as for the whole text.

Text is counted up to a cut that changes no token (`pieces.py`), a thousand characters at a time; the text after the
last such cut is kept, and counted again with the text that follows it.
"""

from __future__ import annotations

from memagent_graph.tokenizers import Tokenizer
from memagent_graph.tokenizers.pieces import LARGEST_PIECE_BYTES, safe_cut

_SETTLED_CHARACTERS = 1024
_FIRST_SAMPLE_CHARACTERS = 256
_LARGEST_HELD_CHARACTERS = LARGEST_PIECE_BYTES // 4


class TokenCounter:
    """Counts a document as it is made.

    Attributes:
        characters: how many characters were added.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.characters = 0
        self._tokenizer = tokenizer
        self._settled_tokens = 0
        self._settled_characters = 0
        self._held = ""
        self._next_attempt = _SETTLED_CHARACTERS
        self._tokens_per_character: float | None = None

    def add(self, text: str) -> None:
        """Continue with `text`."""
        self._held += text
        self.characters += len(text)
        if len(self._held) >= self._next_attempt:
            self._settle()
        elif self._tokens_per_character is None and len(self._held) >= _FIRST_SAMPLE_CHARACTERS:
            self._tokens_per_character = self._tokenizer.count(self._held) / len(self._held)

    def total(self, end: str = "") -> int:
        """How many tokens the added text has, with `end` after it."""
        return self._settled_tokens + self._tokenizer.count(self._held + end)

    def estimate(self, more_characters: int = 0) -> float:
        """The estimated number of tokens, without counting, with that many more characters."""
        if self._tokens_per_character is None:
            return self.total() + more_characters / 4
        return self._settled_tokens + (len(self._held) + more_characters) * self._tokens_per_character

    def _settle(self) -> None:
        cut = safe_cut(self._held, len(self._held) // 2)
        if cut is None and len(self._held) < _LARGEST_HELD_CHARACTERS:
            self._next_attempt = 2 * len(self._held)
            return
        if cut is None:
            cut = len(self._held)
        self._settled_tokens += self._tokenizer.count(self._held[:cut])
        self._settled_characters += cut
        self._held = self._held[cut:]
        self._tokens_per_character = self._settled_tokens / self._settled_characters
        self._next_attempt = max(_SETTLED_CHARACTERS, 2 * len(self._held))
