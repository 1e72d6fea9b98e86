"""Shortens texts to a number of tokens: their beginnings and their ends are kept."""

from __future__ import annotations

from memagent_graph.tokenizers.loading import Tokenizer
from memagent_graph.words import is_character_end

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
