"""Finds changes in sentences that are copied from a quote.

A sentence is a copy if most of its words are in one quote, in the same order. In a copy every change counts: a
replaced word, an added negation, an omitted qualifier such as "unless". Paraphrases are not checked here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Final

from memagent_report.opposite_words import NEGATIONS, QUALIFIERS
from memagent_report.stated_facts import Facts, stem

_FEWEST_WORDS: Final = 5
_SHARE: Final = 0.7
"""A sentence is a copy if a quote has this share of its words in the same order."""
_TOKEN: Final = re.compile(r"[^\W_]+(?:[.,:'][^\W_]+)*|%|[$€£]")
_FUNCTION_WORDS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        a an the of in on at to for from by with as and or that which who whom whose what this these those it its their
        his her he she they there is are was were be been being has have had do does did so then
        """,
    )
)


@dataclass(frozen=True, slots=True)
class CopyChange:
    """A change in a copied sentence: its own words, and the quote's words that they replace. Either may be empty."""

    own: str
    quoted: str


def is_verbatim(stated: Facts, known: Sequence[Facts]) -> bool:
    """Whether a quote contains a sentence word for word, except for letter case and the final full stop."""
    return next(_places(stated, known), None) is not None


def omitted_qualifier(stated: Facts, known: Sequence[Facts]) -> str:
    """Return a negation or qualifier that was cut off from a verbatim sentence; "" if there is none.

    There is none if the sentence occurs in the quotes at least once without one.
    """
    found = ""
    for quote, start, end in _places(stated, known):
        before = _ENDS.split(quote[:start])[-1]
        after = _ENDS.split(quote[end:])[0]
        words = [*_tokens(before)[-_BEFORE:], *(word for word in _tokens(after)[:_AFTER] if word in _QUALIFIERS_AFTER)]
        limits = [word for word in words if word in QUALIFIERS or word.endswith("n't")]
        if not limits:
            return ""
        found = found or limits[0]
    return found


_ENDS: Final = re.compile(r"[.!?;:](?:\s|$)")
_BEFORE, _AFTER = 6, 3
"""How many words before and after a part of a sentence may negate or qualify it."""
_QUALIFIERS_AFTER: Final = frozenset({"unless", "except", "until", "only"})


def _places(stated: Facts, known: Sequence[Facts]) -> Iterator[tuple[str, int, int]]:
    """Yield each occurrence of a sentence in the quotes: the quote in lower case, the first character and the end."""
    text = stated.text.casefold().rstrip(". ")
    for quote in (each.text.casefold() for each in known) if text else ():
        start = quote.find(text)
        while start >= 0:
            yield quote, start, start + len(text)
            start = quote.find(text, start + 1)


def copy_changes(stated: Facts, known: Sequence[Facts]) -> tuple[CopyChange, ...]:
    """Return the changes in a sentence that is copied from one of its quotes; empty if it is not a copy."""
    own = _tokens(stated.text)
    if len(own) < _FEWEST_WORDS:
        return ()
    best: tuple[SequenceMatcher[str], list[str]] | None = None
    most = _SHARE * len(own)
    for quote in known:
        quoted = [*_tokens(quote.text)]
        matcher = SequenceMatcher(None, [*own], quoted, autojunk=False)
        shared = sum(block.size for block in matcher.get_matching_blocks())
        if shared >= most:
            best, most = (matcher, quoted), shared + 1
    return () if best is None else tuple(_changes(best[0], own, best[1]))


def _changes(matcher: SequenceMatcher[str], own: Sequence[str], quoted: Sequence[str]) -> Iterator[CopyChange]:
    blocks = [block for block in matcher.get_matching_blocks() if block.size]
    inner = range(blocks[0].b, blocks[-1].b + blocks[-1].size)
    edits = [(kind, [*own[a:b]], [*quoted[c:d]], c) for kind, a, b, c, d in matcher.get_opcodes() if kind != "equal"]
    # A negation that is at another place than in the quote was moved. It was neither added nor omitted.
    added = Counter(word for _, here, _, _ in edits for word in here if _is_negation(word))
    omitted = Counter(word for _, _, there, _ in edits for word in there if _is_negation(word))
    for kind, here, there, place in edits:
        if kind == "replace":
            new = [word for word in here if word not in _FUNCTION_WORDS and not (_is_negation(word) and omitted[word])]
            old = [word for word in there if word not in _FUNCTION_WORDS]
            stems = {*map(stem, old)}
            if [word for word in new if stem(word) not in stems] and (old or any(map(_is_negation, new))):
                yield CopyChange(" ".join(here), " ".join(there))
        elif kind == "delete" and any(_is_negation(word) and not omitted[word] for word in here):
            yield CopyChange(" ".join(here), "")
        elif kind == "insert" and place in inner and any(word in QUALIFIERS and not added[word] for word in there):
            yield CopyChange("", " ".join(there))


def _is_negation(word: str) -> bool:
    return word in NEGATIONS or word.endswith("n't")


@lru_cache(maxsize=4096)
def _tokens(text: str) -> tuple[str, ...]:
    return tuple(match[0].casefold() for match in _TOKEN.finditer(text))
