"""How long texts are in prompts, where some of a text may be escaped, and the parts of them that fit."""

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


_ELLIPSIS = " [...] "
_LONGEST_TOKEN = 16
"""Characters; ordinary text has about four to a token, so more than this times the budget never fits."""


def shortened(text: str, tokens: int, tokenizer: Tokenizer) -> str:
    """`text`, or its beginning and its end with "[...]" between, in at most `tokens` tokens."""
    if len(text) <= tokens * _LONGEST_TOKEN and tokenizer.count(text) <= tokens:
        return text
    fitting, beyond = 0, min(len(text), tokens * _LONGEST_TOKEN)
    while fitting + 1 < beyond:
        middle = (fitting + beyond) // 2
        if tokenizer.count(_ends(text, middle)) <= tokens:
            fitting = middle
        else:
            beyond = middle
    return _ends(text, fitting) if fitting else text[:1]


def _ends(text: str, characters: int) -> str:
    """Return the first two thirds of a number of characters from the beginning, the others from the end."""
    tail = characters // 3
    head, rest = (_character_start(text, at) for at in (characters - tail, len(text) - tail))
    return f"{text[:head].rstrip()}{_ELLIPSIS}{text[rest:].lstrip()}".rstrip()


def _character_start(text: str, at: int) -> int:
    return next(place for place in range(at, -1, -1) if is_character_end(text, place))
