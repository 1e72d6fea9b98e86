"""What can be wrong with a sentence of a report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class ProblemKind(StrEnum):
    """Why a sentence is not quoted."""

    NO_QUOTE = "no_quote"
    """It has no quotes."""
    QUOTE_NOT_IN_SOURCE = "quote_not_in_source"
    """A quote is not in its document."""
    QUOTE_CUT = "quote_cut"
    """A quote begins or ends within a sentence, so that what limits it may be missing."""
    QUOTATION = "quotation"
    """Words between its quotation marks are in none of its quotes."""
    NUMBER = "number"
    UNIT = "unit"
    """A number is in the quotes, with another unit."""
    DATE = "date"
    NAME = "name"
    CODE = "code"
    """A version, a time, or a word of letters and digits."""
    NEGATION = "negation"
    """It denies what the quotes do not deny, or the reverse."""
    OPPOSITE = "opposite"
    """It has a word whose opposite is in the quotes: may and must, rise and fall."""
    ORDER = "order"
    """Two names or numbers have changed places."""
    APART = "apart"
    """A number is in the quotes, but only together with other names."""
    CHANGED = "changed"
    """It is copied from a quote, with a word changed, a denial put in, or a limit left out."""
    WORDS = "words"
    """Fewer than half of its words are in its quotes."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a sentence that its quotes do not have."""

    kind: ProblemKind
    detail: str


def shown(problems: Iterable[Problem]) -> str:
    """Problems in one line."""
    return "; ".join(each.detail for each in problems)
