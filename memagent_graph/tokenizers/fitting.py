"""How long texts are in prompts, where some of a text may be escaped, and their beginnings that fit."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from memagent_graph.prompts import Prompts
    from memagent_graph.tokenizers import Tokenizer

_WORD: Final = re.compile(r"\d+|[^\W\d_]+")
"""A number, or letters in a row: `4711kg` contains both alone, too."""


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
    """Return a text's first tokens, up to 3 fewer if the last one would end inside a character."""
    tokenizer = wording.tokenizer
    ids = tokenizer.encode(text)
    if len(ids) <= tokens:
        return text
    lengths = (tokenizer.prefix_chars(text, ids, count) for count in range(tokens, 0, -1))
    return text[: next((length for length in lengths if length is not None), 0)].rstrip()


def shown_tokens(wording: Wording, text: str) -> int:
    """Return how many tokens a text has in a prompt."""
    return wording.tokenizer.count(wording.prompts.neutralise(text))


def beginning(wording: Wording, text: str, tokens: int) -> str:
    """Return the beginning of a text that has at most that many tokens in a prompt."""
    cut = first_tokens(wording, text, tokens)
    while cut and (excess := shown_tokens(wording, cut) - tokens) > 0:
        cut = first_tokens(wording, cut, max(0, wording.tokenizer.count(cut) - excess))
    return cut


def invented_word(text: str, sources: Iterable[str]) -> str | None:
    """Return the first word or number of a text that is in none of its sources; None if there is none.

    Letter case and Unicode variants of the same characters (NFKC) make no difference.
    """
    known = {word for source in sources for word in _words(source)}
    return next((word for word in _words(text) if word not in known), None)


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
