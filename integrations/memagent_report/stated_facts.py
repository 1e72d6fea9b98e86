"""Extracts facts that can be compared without a model: numbers, dates, names, and words.

The rules are for English and do not understand meaning. `5.2 million` and `5,200,000` are the same number, and
`3 March 2021` and `2021-03-03` are the same date, but `half of them` is not a number. Units are words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from typing import Final

from memagent_graph.provenance.overlap import select_content_words
from memagent_graph.words import find_character_pairs

_EQUIVALENTS: Final = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff", None),
    }
)
"""Variants of apostrophes, quotation marks and dashes; invisible characters are removed."""


def normalise_typography(text: str) -> str:
    """Normalize a text for comparisons: NFKC, one kind of quotation mark, apostrophe and dash, single spaces.

    Letter case is preserved.
    """
    return " ".join(unicodedata.normalize("NFKC", text.translate(_EQUIVALENTS)).translate(_EQUIVALENTS).split())


@dataclass(frozen=True, slots=True)
class Number:
    """A number, with the magnitude after it: 5200000 for "5.2 million"."""

    value: Decimal
    start: int
    end: int
    joint_value: Decimal | None = None
    """The value if the number shares the magnitude of the next number, as 3 does in "3 to 5 million euros"."""

    @property
    def possible_values(self) -> frozenset[Decimal]:
        """The values that the number may have."""
        return frozenset((self.value, self.value if self.joint_value is None else self.joint_value))

    @property
    def key(self) -> str:
        """The value as text."""
        return format(self.value.normalize(), "f")


@dataclass(frozen=True, slots=True)
class Date:
    """A date; parts that the text does not state are None."""

    year: int | None
    month: int | None
    day: int | None
    start: int
    end: int

    def is_stated_by(self, other: Date) -> bool:
        """Return whether the other date states every part that this one states."""
        pairs = ((self.year, other.year), (self.month, other.month), (self.day, other.day))
        return all(part is None or part == other for part, other in pairs)


@dataclass(frozen=True, slots=True)
class Word:
    """A word in lower case, without a possessive ending."""

    text: str
    start: int
    end: int
    is_name: bool
    """Whether it is written as a proper name: with a capital within a sentence, or in capitals."""
    opens_sentence: bool
    """Whether it has a capital at the beginning of a sentence, so that it may or may not be a name."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one text. All positions are characters of `text`."""

    text: str
    """The normalised text."""
    numbers: tuple[Number, ...]
    dates: tuple[Date, ...]
    words: tuple[Word, ...]
    """All words that are not part of a number or a date, including words with digits, such as Q3."""


@lru_cache(maxsize=4096)
def extract_facts(text: str) -> Facts:
    """Extract the facts of a text of one or more sentences."""
    text = normalise_typography(text)
    spans: list[tuple[int, int]] = []  # of the facts so far; no two facts overlap
    dates = tuple(_find_dates(text, spans))
    digits = [*_find_digits(text, spans)]
    number_words = _join_number_words(text, _find_number_words(text, spans))
    numbers = tuple(_share_magnitudes(text, [*digits, *number_words]))
    return Facts(text, numbers, dates, tuple(_find_words(text, spans)))


# Dates

_MONTHS: Final = {
    name: number
    for number, names in enumerate(
        ("january jan", "february feb", "march mar", "april apr", "may", "june jun", "july jul", "august aug",
         "september sept sep", "october oct", "november nov", "december dec"), 1,
    )
    for name in names.split()
}  # fmt: skip
_MONTH: Final = "(?P<month>" + "|".join(sorted(_MONTHS, key=len, reverse=True)) + r")\b\.?"
_DAY: Final = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR: Final = r"(?P<year>[12]\d{3})"
_DATE_PATTERNS: Final = tuple(
    re.compile(rf"(?<!\w){pattern}(?!\w)", re.IGNORECASE)
    for pattern in (
        rf"{_YEAR}-(?P<month>\d{{2}})-(?P<day>\d{{2}})",
        rf"{_DAY}\s+(?:of\s+)?{_MONTH},?\s+{_YEAR}",
        rf"{_MONTH}\s+{_DAY},?\s+{_YEAR}",
        rf"{_MONTH},?\s+{_YEAR}",
        rf"{_DAY}\s+(?:of\s+)?{_MONTH}",
        rf"{_MONTH}\s+{_DAY}",
    )
)


def _find_dates(text: str, spans: list[tuple[int, int]]) -> Iterator[Date]:
    for pattern in _DATE_PATTERNS:
        for match in pattern.finditer(text):
            parts = match.groupdict()
            month = parts["month"].lower()
            is_verb = parts["month"] == "may" and re.match(r"may|\d+\s+may\.?$", match[0])
            if is_verb or _overlaps(match.span(), spans):
                continue
            month_number = int(month) if month.isdigit() else _MONTHS[month]
            day = int(parts["day"]) if parts.get("day") else None
            if month_number > 12 or (day or 1) > 31 or day == 0:
                continue
            spans.append(match.span())
            yield Date(int(parts["year"]) if parts.get("year") else None, month_number, day, *match.span())


def _overlaps(span: tuple[int, int], spans: list[tuple[int, int]]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in spans)


# Numbers

_MAGNITUDES: Final = {
    "hundred": Decimal(100), "thousand": Decimal(1000), "million": Decimal(10**6), "mn": Decimal(10**6),
    "billion": Decimal(10**9), "bn": Decimal(10**9), "trillion": Decimal(10**12), "dozen": Decimal(12),
}  # fmt: skip
_NUMBER: Final = re.compile(
    r"[^\W\d_]\d+(?:\.\d+)+|"  # a word with digits, such as v2.10, which is no number
    r"(?P<currency>[$€£¥]\s?)?(?<!\w)(?P<sign>(?:(?<=\s)|^)-)?"
    r"(?P<digits>\d{1,3}(?:[,']\d{3})+(?:\.\d+)?|\d{1,3}(?: \d{3})+(?![\w.])|\d+(?:[.:]\d+)?|(?<!\.)\.\d+)"
    r"(?:st|nd|rd|th)?(?!\d)"
    r"(?:\s?(?:%|per\s?cent\b))?"
)
_NEXT_WORD: Final = re.compile(r"[\s-]?(?P<word>[A-Za-z]+)")
_SMALL_NUMBERS: Final = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS: Final = {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip
_ORDINALS: Final = {
    "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10,
}  # fmt: skip
_WORD_VALUES: Final = (
    {word: number for number, word in enumerate(_SMALL_NUMBERS) if word not in {"zero", "one"}} | _TENS | _ORDINALS
)
_NUMBER_WORD: Final = re.compile(
    rf"(?<![\w-])(?:(?P<tens>{'|'.join(_TENS)})[\s-](?P<ones>{'|'.join(_SMALL_NUMBERS[1:10])})|(?P<word>{'|'.join(_WORD_VALUES)})|"
    r"(?P<one>an?|one)(?=\s(?:hundred|thousand|million|billion|trillion|dozen)\b))(?!\w)",
    re.IGNORECASE,
)


def _find_digits(text: str, spans: list[tuple[int, int]]) -> Iterator[Number]:
    for match in _NUMBER.finditer(text):
        if match["digits"] is None or _overlaps(match.span("digits"), spans):
            continue
        digits = re.sub("[,' ]", "", match["digits"]).replace(":", ".")  # a time, such as 14:30, is one number
        value = Decimal(digits) * (-1 if match["sign"] else 1)
        value, end = _multiply(text, value, match.end(), is_money=match["currency"] is not None)
        spans.append((match.start(), end))
        yield Number(value, match.start(), end)


def _find_number_words(text: str, spans: list[tuple[int, int]]) -> Iterator[Number]:
    for match in _NUMBER_WORD.finditer(text):
        if _overlaps(match.span(), spans):
            continue
        if match["one"]:
            number = 1
        elif match["tens"]:
            number = _TENS[match["tens"].lower()] + _SMALL_NUMBERS.index(match["ones"].lower())
        else:
            number = _WORD_VALUES[match["word"].lower()]
        value, end = _multiply(text, Decimal(number), match.end())
        spans.append((match.start(), end))
        yield Number(value, match.start(), end)


def _join_number_words(text: str, numbers: Iterable[Number]) -> list[Number]:
    """Return the numbers with those joined that are one, such as "two hundred" and "fifty"."""
    joined_numbers: list[Number] = []
    for number in numbers:
        last = joined_numbers[-1] if joined_numbers else None
        # The exponents are compared, because numbers may have thousands of digits.
        zeros = int(last.value.normalize().as_tuple().exponent) if last is not None else 0
        connective = r"\s(?:and\s)?" if number.value < 100 else r"\s"
        is_part = zeros >= 2 and number.value.adjusted() < zeros and text[number.end : number.end + 1] != "-"
        if last is not None and is_part and re.fullmatch(connective, text[last.end : number.start]):
            joined_numbers[-1] = replace(last, value=last.value + number.value, end=number.end)
        else:
            joined_numbers.append(number)
    return joined_numbers


def _multiply(text: str, value: Decimal, end: int, *, is_money: bool = False) -> tuple[Decimal, int]:
    """Return the value times the magnitudes that follow it, and the end of the last one; "$5m" is five million."""
    while match := _NEXT_WORD.match(text, end):
        word = "million" if is_money and match["word"] == "m" else match["word"].lower()
        if word not in _MAGNITUDES:
            break
        value, end = value * _MAGNITUDES[word], match.end()
    return value, end


def _share_magnitudes(text: str, numbers: list[Number]) -> Iterator[Number]:
    """Yield the numbers in order; a number before "to" or "and" may share the next number's magnitude."""
    sorted_numbers = sorted(numbers, key=lambda number: number.start)
    for number, next_number in zip(sorted_numbers, [*sorted_numbers[1:], None], strict=False):
        if next_number is None or not _NUMBER_CONNECTIVE.fullmatch(text[number.end : next_number.start]):
            yield number
            continue
        words = (word.lower() for word in re.findall(r"[A-Za-z]+", text[next_number.start : next_number.end]))
        magnitude = next((_MAGNITUDES[word] for word in words if word in _MAGNITUDES), Decimal(1))
        yield replace(number, joint_value=number.value * magnitude)


_NUMBER_CONNECTIVE: Final = re.compile(r"\s?(?:-|to|and|or|,)\s?")


# Words

_WORD: Final = re.compile(r"(?<![^\W_])[^\W\d_][^\W_]*(?:'[^\W\d_]+)?|[^\W\d_]+")
_SENTENCE_START: Final = re.compile(r"(?:^|[.!?:;]['\")\]]*\s|\n)[\s\"'(\[*-]*$")
_MIN_CAPITAL_FRACTION: Final = 0.6


def _find_words(text: str, spans: list[tuple[int, int]]) -> Iterator[Word]:
    letters = [character for character in text if character.isalpha()]
    is_in_capitals = len(letters) > 12 and sum(map(str.isupper, letters)) > _MIN_CAPITAL_FRACTION * len(letters)
    for match in _WORD.finditer(text):
        if _overlaps(match.span(), spans):
            continue
        word = match[0]
        has_capital = word[0].isupper() and len(word) > 1 and not is_in_capitals
        is_acronym = has_capital and any(map(str.isupper, word[1:]))
        begins_sentence = _SENTENCE_START.search(text, max(0, match.start() - 8), match.start()) is not None
        opens_sentence = has_capital and not is_acronym and begins_sentence
        normal_form = re.sub(r"'s?$", "", word.casefold())
        yield Word(
            normal_form, *match.span(), is_name=has_capital and not opens_sentence, opens_sentence=opens_sentence
        )


def stem(word: str) -> str:
    """Remove the most common endings of a word, so that its forms can be compared."""
    for ending, replacement in (("ies", "y"), ("ied", "y"), ("ing", ""), ("ed", ""), ("es", ""), ("s", "")):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word.removesuffix(ending) + replacement
            break
    return word.removesuffix("e")


def list_content_stems(facts: Facts) -> frozenset[str]:
    """Return the stems of all words except function words."""
    return frozenset(map(stem, select_content_words(word.text for word in facts.words)))


def list_search_terms(facts: Facts) -> frozenset[str]:
    """Return the stems of content words; in scripts without spaces, also the pairs of characters."""
    return list_content_stems(facts) | find_character_pairs(facts.text)
