"""The problems that a sentence of a report can have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class ProblemKind(StrEnum):
    """Why a sentence is not quoted."""

    NO_QUOTE = "no_quote"
    """It cites no quotes."""
    QUOTE_NOT_IN_SOURCE = "quote_not_in_source"
    """A quote is not in its document."""
    QUOTE_CUT = "quote_cut"
    """A quote begins or ends within a sentence, so a negation or qualifier may be missing."""
    QUOTATION = "quotation"
    """Words between its quotation marks are in none of its quotes."""
    NUMBER = "number"
    """A number is in none of its quotes."""
    UNIT = "unit"
    """A number is in its quotes with another unit."""
    DATE = "date"
    """A date is in none of its quotes."""
    NAME = "name"
    """A name is in none of its quotes."""
    CODE = "code"
    """A version, a time, or a word of letters and digits is in none of its quotes."""
    NEGATION = "negation"
    """It negates what the quotes affirm, or affirms what they negate."""
    OPPOSITE = "opposite"
    """It has the opposite of a word in the quotes, such as may for must, or rise for fall."""
    ORDER = "order"
    """Two names or numbers have changed places."""
    APART = "apart"
    """A number or date is in the quotes, but only with other names."""
    CHANGED = "changed"
    """It is copied from a quote, but a word is replaced, a negation added, or a qualifier omitted."""
    WORDS = "words"
    """Fewer than half of its words and values are in its quotes."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a sentence that its quotes do not support."""

    kind: ProblemKind
    detail: str


def shown(problems: Iterable[Problem]) -> str:
    """Return the problems as one line of text."""
    return "; ".join(each.detail for each in problems)
