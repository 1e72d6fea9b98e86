"""Sentences that are copied from a quote, and what was changed in the copying.

A sentence nearly all of whose words stand in a quote, in the quote's order, is a copy. In a copy every word counts: one
that stands in the place of another, a denial that was put in, a limit that was left out. Sentences in other words are
none of this module's business.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Final

from memagent_graph.reports.opposite_words import LIMITS, NEGATIONS
from memagent_graph.reports.stated_facts import Facts, stem

_FEWEST_WORDS: Final = 5
_SHARE: Final = 0.7
"""The share of a sentence's words, in order, that makes it a copy."""
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
    """A change in a copied sentence: what it has instead of what its quote has; either may be empty."""

    own: str
    quoted: str


def is_contained(stated: Facts, known: Sequence[Facts]) -> bool:
    """Whether a sentence stands in a quote as it is, but for letter case and its last full stop."""
    return next(_places(stated, known), None) is not None


def limits_left_out(stated: Facts, known: Sequence[Facts]) -> str:
    """What a contained sentence was cut out of, if that denies or limits it wherever it stands; "" if nothing does."""
    found = ""
    for quote, start, end in _places(stated, known):
        before = _ENDS.split(quote[:start])[-1]
        after = _ENDS.split(quote[end:])[0]
        words = [*_tokens(before)[-_BEFORE:], *(word for word in _tokens(after)[:_AFTER] if word in _LIMITS_AFTER)]
        limits = [word for word in words if word in LIMITS or word.endswith("n't")]
        if not limits:
            return ""
        found = found or limits[0]
    return found


_ENDS: Final = re.compile(r"[.!?;:](?:\s|$)")
_BEFORE, _AFTER = 6, 3
"""Words of the same sentence before and after a part of it that may deny or limit it."""
_LIMITS_AFTER: Final = frozenset({"unless", "except", "until", "only"})


def _places(stated: Facts, known: Sequence[Facts]) -> Iterator[tuple[str, int, int]]:
    """Where a sentence stands in quotes: the quote in lower case, and first character and end."""
    text = stated.text.casefold().rstrip(". ")
    for quote in (each.text.casefold() for each in known) if text else ():
        start = quote.find(text)
        while start >= 0:
            yield quote, start, start + len(text)
            start = quote.find(text, start + 1)


def copy_changes(stated: Facts, known: Sequence[Facts]) -> tuple[CopyChange, ...]:
    """What was changed in a sentence that is copied from one of its quotes; nothing if it is not a copy."""
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
    # A denial that stands elsewhere in the sentence than in the quote was moved, and neither put in nor left out.
    put_in = Counter(word for _, here, _, _ in edits for word in here if _denies(word))
    left_out = Counter(word for _, _, there, _ in edits for word in there if _denies(word))
    for kind, here, there, place in edits:
        if kind == "replace":
            new = [word for word in here if word not in _FUNCTION_WORDS and not (_denies(word) and left_out[word])]
            old = [word for word in there if word not in _FUNCTION_WORDS]
            stems = {*map(stem, old)}
            if [word for word in new if stem(word) not in stems] and (old or any(map(_denies, new))):
                yield CopyChange(" ".join(here), " ".join(there))
        elif kind == "delete" and any(_denies(word) and not left_out[word] for word in here):
            yield CopyChange(" ".join(here), "")
        elif kind == "insert" and place in inner and any(word in LIMITS and not put_in[word] for word in there):
            yield CopyChange("", " ".join(there))


def _denies(word: str) -> bool:
    return word in NEGATIONS or word.endswith("n't")


@lru_cache(maxsize=4096)
def _tokens(text: str) -> tuple[str, ...]:
    return tuple(match[0].casefold() for match in _TOKEN.finditer(text))
