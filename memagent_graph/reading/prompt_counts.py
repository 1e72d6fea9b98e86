"""Finds out that a server cut a prompt, by its count of the prompt's tokens.

Ollama, for example, cuts a prompt to its window and answers with the status of a success. Tokenizers differ, so a low
count alone shows nothing: a part of the prompt is then sent by itself, which tells how the server counts such text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from memagent_graph.calls import Span
from memagent_graph.policy import Messages
from memagent_graph.tokenizers import Tokenizer

_MIN_TOKENS: Final = 200
"""Prompts of fewer tokens are not cut by any server that could be used."""
_MIN_SHARE: Final = 0.9
"""A server that counts less than this share of what it should count cut the prompt."""
_CHARS_PER_TOKEN: Final = 6
"""More than any tokenizer reaches in prose, for a lower bound without counting."""
_SAMPLES: Final = ((0.1, 200), (0.5, 1500))
"""Two parts of a prompt, as a share and in characters at most; the difference of their counts has no chat template."""


class PromptCounts:
    """A server's way of counting tokens, learned from its replies.

    Args:
        tokenizer: counts on our side.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ratio = 1.0
        self._window = 0

    async def missing_tokens(
        self, messages: Messages, reads: Iterable[Span], server_count: int, ask: Callable[[str], Awaitable[int]]
    ) -> int:
        """Return how many tokens of a prompt did not reach the model; 0 if it was whole, as far as counts show.

        Args:
            messages: the prompt.
            reads: the chunks in it, whose tokens are known.
            server_count: the server's count of its tokens.
            ask: sends a text by itself, and returns the server's count; 0 if it gives none.
        """
        chars = sum(len(message["content"]) for message in messages)
        chunks = [(span.tokens, span.end_char - span.start_char) for span in reads]
        tokens, covered = sum(tokens for tokens, _ in chunks), min(chars, sum(length for _, length in chunks))
        if tokens + (chars - covered) / _CHARS_PER_TOKEN < _MIN_TOKENS or server_count == 0:
            return 0
        if server_count >= _MIN_SHARE * self._ratio * (tokens + (chars - covered) / _CHARS_PER_TOKEN):
            return 0
        count = sum(self._tokenizer.count(message["content"]) for message in messages)
        if server_count >= _MIN_SHARE * self._ratio * count:
            return 0
        if server_count > self._window:
            longest = max((message["content"] for message in messages), key=len)
            ratio = await self._measured_ratio(longest, ask)
            if server_count >= _MIN_SHARE * ratio * count:
                self._ratio = min(self._ratio, ratio)
                return 0
            self._window = server_count
        return round(self._ratio * count) - server_count

    async def _measured_ratio(self, text: str, ask: Callable[[str], Awaitable[int]]) -> float:
        """Return the server's count of the middle of a text over our own; 0 if it does not count what it is sent."""
        counts = []
        for share, max_chars in _SAMPLES:
            length = min(max_chars, int(share * len(text)))
            start = (len(text) - length) // 2
            sample = text[start : start + length]
            counts.append((await ask(sample), self._tokenizer.count(sample)))
        (theirs, ours), (theirs_of_more, ours_of_more) = counts
        return (theirs_of_more - theirs) / max(1, ours_of_more - ours)
