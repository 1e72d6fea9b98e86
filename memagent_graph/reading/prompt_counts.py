"""Detects that a server cut a prompt, from its count of the prompt's tokens.

Ollama, for example, cuts a prompt to its window and still reports success. A low count alone proves nothing, because
tokenizers differ. So a part of the prompt is sent alone to learn how the server counts its text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from memagent_graph.calls import Span
from memagent_graph.policy import Messages
from memagent_graph.tokenizers import Tokenizer

_MIN_TOKENS: Final = 200
"""No usable server cuts prompts with fewer tokens."""
_MIN_SHARE: Final = 0.9
"""A prompt was cut if the server counts less than this fraction of the expected tokens."""
_CHARS_PER_TOKEN: Final = 6
"""More characters than a token has in prose. It gives a lower bound for tokens without counting."""
_SAMPLES: Final = ((0.1, 200), (0.5, 1500))
"""Two parts of a prompt (fraction, maximum characters). Their difference excludes the chat template."""


class PromptCounts:
    """Compares the token counts of a server with our own.

    Args:
        tokenizer: our own tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ratio = 1.0
        self._window = 0

    async def missing_tokens(
        self, messages: Messages, reads: Sequence[Span], server_count: int, ask: Callable[[str], Awaitable[int]]
    ) -> int:
        """Return the number of prompt tokens that did not reach the model; 0 if the counts show no loss.

        Args:
            messages: the prompt.
            reads: the chunks in the prompt, with known token counts.
            server_count: the server's count of the prompt's tokens.
            ask: sends a text alone and returns the server's count; 0 if there is none.
        """
        chars = sum(len(message["content"]) for message in messages)
        other_chars = max(0, chars - sum(span.end_char - span.start_char for span in reads))
        min_count = sum(span.tokens for span in reads) + other_chars / _CHARS_PER_TOKEN
        if min_count < _MIN_TOKENS or server_count == 0 or server_count >= _MIN_SHARE * self._ratio * min_count:
            return 0
        count = sum(self._tokenizer.count(message["content"]) for message in messages)
        if server_count >= _MIN_SHARE * self._ratio * count:
            return 0
        if server_count > self._window:
            longest = max((message["content"] for message in messages), key=len)
            ratio = await self._measure_ratio(longest, ask)
            if server_count >= _MIN_SHARE * ratio * count:
                self._ratio = min(self._ratio, ratio)
                return 0
            self._window = server_count
        return round(self._ratio * count) - server_count

    async def _measure_ratio(self, text: str, ask: Callable[[str], Awaitable[int]]) -> float:
        """Return the server's count of the middle of a text, divided by the tokenizer's; 0 if it is not usable."""
        counts = []
        for share, max_chars in _SAMPLES:
            length = min(max_chars, int(share * len(text)))
            start = (len(text) - length) // 2
            sample = text[start : start + length]
            counts.append((await ask(sample), self._tokenizer.count(sample)))
        (short_by_server, short), (long_by_server, long) = counts
        return (long_by_server - short_by_server) / max(1, long - short)
