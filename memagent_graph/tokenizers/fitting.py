"""How long texts are in prompts, where some of a text may be escaped, and their beginnings that fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memagent_graph.words import is_character_end

if TYPE_CHECKING:
    from memagent_graph.prompts import Prompts
    from memagent_graph.tokenizers import Tokenizer


class Wording(Protocol):
    """What prompts are made with, such as a `ReaderContext`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Counts tokens."""
        ...

    @property
    def prompts(self) -> Prompts:
        """Escape texts."""
        ...


def first_tokens(wording: Wording, text: str, tokens: int) -> str:
    """Return a text's first tokens, a few fewer if the last one would end inside a character."""
    tokenizer = wording.tokenizer
    ids = tokenizer.encode(text)
    if len(ids) <= tokens:
        return text
    lengths = (tokenizer.prefix_chars(text, ids, count) for count in range(tokens, 0, -1))
    ends = (length for length in lengths if length is not None and is_character_end(text, length))
    return text[: next(ends, 0)].rstrip()


def shown_tokens(wording: Wording, text: str) -> int:
    """Return how many tokens a text has in a prompt."""
    return wording.tokenizer.count(wording.prompts.neutralise(text))


def beginning(wording: Wording, text: str, tokens: int) -> str:
    """Return the beginning of a text that has at most that many tokens in a prompt."""
    cut = first_tokens(wording, text, tokens)
    while cut and (excess := shown_tokens(wording, cut) - tokens) > 0:
        cut = first_tokens(wording, cut, max(0, wording.tokenizer.count(cut) - excess))
    return cut
