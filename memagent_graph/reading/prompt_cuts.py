"""Detects that a server cut a prompt, from its count of the prompt's tokens.

Ollama, for example, cuts a prompt to its window and still reports success. A low count alone proves nothing, because
tokenizers differ. So two samples of the prompt are sent alone, to learn how the server counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from memagent_graph.policy import Messages
from memagent_graph.tokenizers import Tokenizer
from memagent_graph.trace import Span

_MIN_TOKENS: Final = 200
"""Shorter prompts are not checked, because no usable server cuts them."""
_MIN_FRACTION: Final = 0.9
"""A prompt was cut if the server counts less than this fraction of the expected tokens."""
_CHARS_PER_TOKEN: Final = 6
"""Prose has fewer characters per token, so characters divided by this are a lower bound of the tokens."""
_SAMPLES: Final = ((0.1, 200), (0.5, 1500))
"""Two samples of a prompt (fraction, maximum characters). The chat template cancels out in their difference."""


@dataclass
class PromptCutDetector:
    """Compares a server's counts of prompt tokens with those of the reader's tokenizer."""

    tokenizer: Tokenizer
    _server_ratio: float = 1.0
    """The server's count of a text divided by the tokenizer's, as far as it is known."""
    _known_window: int = 0
    """The largest count at which a cut was proved."""

    async def count_missing_tokens(
        self,
        messages: Messages,
        reads: Sequence[Span],
        server_count: int,
        count_at_server: Callable[[str], Awaitable[int]],
    ) -> int:
        """Return the number of prompt tokens that did not reach the model; 0 if the counts show no loss.

        Args:
            messages: the prompt.
            reads: the chunks in the prompt, with known token counts.
            server_count: the server's count of the prompt's tokens.
            count_at_server: sends a text alone and returns the server's token count; 0 if there is none.
        """
        characters = sum(len(message["content"]) for message in messages)
        other_characters = max(0, characters - sum(span.end_char - span.start_char for span in reads))
        min_tokens = sum(span.tokens for span in reads) + other_characters / _CHARS_PER_TOKEN
        if (
            min_tokens < _MIN_TOKENS
            or server_count == 0
            or server_count >= _MIN_FRACTION * self._server_ratio * min_tokens
        ):
            return 0
        tokens = sum(self.tokenizer.count(message["content"]) for message in messages)
        if server_count >= _MIN_FRACTION * self._server_ratio * tokens:
            return 0
        if server_count > self._known_window:
            longest = max((message["content"] for message in messages), key=len)
            ratio = await self._measure_ratio(longest, count_at_server)
            if ratio is None:
                return 0
            if server_count >= _MIN_FRACTION * ratio * tokens:
                self._server_ratio = min(self._server_ratio, ratio)
                return 0
            self._known_window = server_count
        return round(self._server_ratio * tokens) - server_count

    async def _measure_ratio(self, text: str, count_at_server: Callable[[str], Awaitable[int]]) -> float | None:
        """Return the server's count of the middle of a text, divided by the tokenizer's.

        None if the server reports no count for a sample; the next prompt with a low count is then measured.
        """
        counts_of_samples = []
        for fraction, max_chars in _SAMPLES:
            sample_chars = min(max_chars, int(fraction * len(text)))
            start = (len(text) - sample_chars) // 2
            sample = text[start : start + sample_chars]
            counts_of_samples.append((await count_at_server(sample), self.tokenizer.count(sample)))
        (server_short, own_short), (server_long, own_long) = counts_of_samples
        if not (server_short and server_long):
            return None
        return (server_long - server_short) / max(1, own_long - own_short)
