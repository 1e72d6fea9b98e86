"""Checks a sentence against its quotes, without a model: quotations, numbers, dates, names, and its other words.

A sentence that passes is "quoted": its values and names are in its quotes, and so are at least half of its words. If it
repeats a quote, all of its words are the quote's. It may still be false, or not follow from the quotes: if it uses
other words than the quotes, a negation or an opposite is not detected, and neither is an omission. The rules for
numbers, dates and names are for English. `python -m benchmarks.report_mutations` measures what is detected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Final

from memagent_graph.provenance.overlap import select_content_words
from memagent_report.stated_facts import Date, Facts, Word, extract_facts, list_content_stems, stem

_MIN_OVERLAP: Final = 0.5
"""Minimum fraction of a sentence's words and values that must be in its quotes."""
_COPY_FRACTION: Final = 0.7
"""A sentence repeats a quote if this fraction of its words is in the quote, in the same order."""
_LETTER: Final = r"[a-z\u00df-\u00f6\u00f8-\u024f\u0370-\u052f\u1e00-\u1fff]"
"""A letter of Latin, Greek or Cyrillic; other scripts may have no spaces between words."""
_NEGATIONS: Final = frozenset(
    {"not", "no", "never", "none", "neither", "nor", "without", "cannot", "nobody", "nothing"}
)
_TITLES: Final = frozenset({"mr", "mrs", "ms", "dr", "prof", "sir", "lady", "lord", "st"})
_SENTENCE_OPENERS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        according although however overall moreover furthermore therefore thus hence likewise similarly
        accordingly instead nevertheless still yet finally meanwhile additionally consequently both either neither
        each every all most some many several few another such same first second third last next then here there
        while since unless until though whereas under upon within without along among between beyond despite
        except regarding concerning per via given if when yes no not none nothing nobody everything everyone
        everybody anything anyone something someone it its he she we they you half quarter much his her their our
        your my these those this that the a an one two also again only even later earlier
        """,
    )
)
"""Words that often begin a sentence. With a capital, they are not names."""


class ProblemKind(StrEnum):
    """Why a sentence is not quoted."""

    NO_QUOTE = "no_quote"
    """It cites no quotes."""
    QUOTE_NOT_IN_SOURCE = "quote_not_in_source"
    """A quote is not in its document."""
    QUOTE_CUT = "quote_cut"
    """A quote begins or ends within a sentence, so a negation or qualifier may be missing."""
    QUOTATION = "quotation"
    """None of its quotes contains the words between its quotation marks."""
    NUMBER = "number"
    """None of its quotes contains one of its numbers."""
    DATE = "date"
    """None of its quotes contains one of its dates."""
    NAME = "name"
    """None of its quotes contains one of its names."""
    WORDS = "words"
    """It repeats a quote with a changed word, or fewer than half of its words and values are in its quotes."""


@dataclass(frozen=True, slots=True)
class SentenceProblem:
    """Something in a sentence that its quotes do not support."""

    kind: ProblemKind
    detail: str


def check_sentence(
    sentence: str,
    quotes: Sequence[str],
    *,
    names: Iterable[str] = (),
    common_words: Collection[str] = (),
) -> tuple[SentenceProblem, ...]:
    """Return the problems of a sentence, such as facts that its quotes do not support; empty if it is quoted.

    Args:
        sentence: the sentence.
        quotes: passages of documents, word for word.
        names: the names of the quoted documents, which the sentence may mention; see `list_document_names`.
        common_words: ordinary words, in lower case, which are not names at the beginning of a sentence; for example
            those that the documents contain in lower case.
    """
    if not quotes:
        return (SentenceProblem(ProblemKind.NO_QUOTE, "no quote supports it"),)
    facts, quote_facts = extract_facts(_replace_names(sentence, names)), [extract_facts(quote) for quote in quotes]
    text = facts.text.rstrip(". ")
    if text and any(_has_copy(quote, text) for quote in quote_facts):
        return ()
    problems = [
        SentenceProblem(kind, f"{facts.text[start:end]} is in none of its quotes")
        for kind, start, end in _find_missing_parts(facts, quote_facts, common_words)
    ]
    return tuple(problems) or tuple(_find_word_problems(facts, quote_facts))


def _has_copy(quote: Facts, text: str) -> bool:
    """Return whether a quote contains a text as whole words and numbers: "5" is not in "50" or "5 million".

    A digit after a word in lower case may be the mark of a footnote.
    """
    end = rf"(?!{_LETTER})" if text[-1].islower() else rf"(?!{_LETTER}|\d)"
    copies = re.finditer(rf"(?<!{_LETTER})(?<!\d){re.escape(text)}{end}", quote.text, re.IGNORECASE)
    return any(
        not any(number.start < position < number.end for number in quote.numbers for position in copy.span())
        for copy in copies
    )


def _replace_names(sentence: str, names: Iterable[str]) -> str:
    """Replace the names of documents in a sentence with "it"."""
    for name in sorted(filter(None, names), key=len, reverse=True):
        sentence = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "it", sentence)
    return sentence


def _find_missing_parts(
    facts: Facts, quote_facts: Sequence[Facts], common_words: Collection[str]
) -> Iterator[tuple[ProblemKind, int, int]]:
    """Yield the quotations, numbers, dates and names that are in no quote, with their positions in the sentence."""
    for match in re.finditer(r'"([^"]{3,})"', facts.text):
        passage = match[1].strip(" .,;:").casefold()
        if not any(passage in quote.text.casefold() for quote in quote_facts):
            yield ProblemKind.QUOTATION, *match.span()
    quoted_values = {value for quote in quote_facts for number in quote.numbers for value in number.possible_values}
    quoted_values |= {Decimal(date.year) for quote in quote_facts for date in quote.dates if date.year is not None}
    for number in facts.numbers:
        if not number.possible_values & quoted_values:
            yield ProblemKind.NUMBER, number.start, number.end
    quote_dates = [date for quote in quote_facts for date in quote.dates]
    for date in facts.dates:
        is_stated = any(date.is_stated_by(quote_date) for quote_date in quote_dates)
        if not is_stated and not _is_in_two_parts(date, quote_facts):
            yield ProblemKind.DATE, date.start, date.end
    for word in _find_missing_names(facts, quote_facts, common_words):
        yield ProblemKind.NAME, word.start, word.end


def _is_in_two_parts(date: Date, quote_facts: Sequence[Facts]) -> bool:
    """Return whether a quote states the date in two parts, as in "from 3 to 5 March 2021" or "in 2021, on 3 March"."""
    for quote in quote_facts:
        numbers = {int(number.value) for number in quote.numbers if 1 <= number.value < 3000}
        for quote_date in quote.dates:
            has_same_month = date.month == quote_date.month
            has_same_day = date.day in {None, quote_date.day} or date.day in numbers
            has_same_year = date.year in {None, quote_date.year} or (quote_date.year is None and date.year in numbers)
            if has_same_month and has_same_day and has_same_year:
                return True
    return False


def _find_missing_names(facts: Facts, quote_facts: Sequence[Facts], common_words: Collection[str]) -> Iterator[Word]:
    quote_words = {word.text for quote in quote_facts for word in quote.words}
    possible_names = {word.text for quote in quote_facts for word in quote.words if word.is_name or word.opens_sentence}
    words_in_capitals = {word.text for quote in quote_facts if quote.text.isupper() for word in quote.words}
    for word in facts.words:
        if not (word.is_name or word.opens_sentence) or word.text in possible_names | words_in_capitals | _TITLES:
            continue
        if word.opens_sentence and (
            word.text in quote_words | _SENTENCE_OPENERS or word.text in common_words or not _has_content(word.text)
        ):
            continue
        if word.is_name and word.text in quote_words and _is_in_title_case(facts):
            continue
        yield word


def _has_content(word: str) -> bool:
    """Return whether a word is not a function word."""
    return word in select_content_words((word, "x"))


def _is_in_title_case(facts: Facts) -> bool:
    """Return whether most words have a capital, as in a title, so that a capital does not indicate a name."""
    words = [word for word in facts.words if len(word.text) > 3]
    return len(words) > 2 and sum(word.is_name or word.opens_sentence for word in words) > 0.7 * len(words)


def _find_word_problems(facts: Facts, quote_facts: Sequence[Facts]) -> Iterator[SentenceProblem]:
    """Report a changed word if the sentence repeats a quote, and otherwise too many words that are in no quote."""
    sentence, quotes = _list_terms(facts), [_list_terms(quote) for quote in quote_facts]
    matchers = [SequenceMatcher(None, sentence, quote, autojunk=False) for quote in quotes]
    overlaps = [sum(block.size for block in matcher.get_matching_blocks()) for matcher in matchers]
    best_index = overlaps.index(max(overlaps))
    if overlaps[best_index] >= _COPY_FRACTION * len(sentence):
        if change := _find_change(sentence, quotes[best_index], matchers[best_index]):
            yield SentenceProblem(
                ProblemKind.WORDS, f"it repeats a quote, but has {change!r} instead of the quote's words"
            )
        return
    stems = list_content_stems(facts)
    missing_stems = stems.difference(*map(list_content_stems, quote_facts))
    # The earlier checks found all numbers and dates in the quotes.
    term_count = len(stems) + len(facts.numbers) + len(facts.dates)
    if stems and len(missing_stems) > (1 - _MIN_OVERLAP) * term_count:
        yield SentenceProblem(
            ProblemKind.WORDS, f"{len(missing_stems)} of its {term_count} words and values are in none of its quotes"
        )


def _list_terms(facts: Facts) -> list[str]:
    """Return the words and numbers in their order."""
    numbers = ((number.start, number.key) for number in facts.numbers)
    return [term for _, term in sorted([*numbers, *((word.start, word.text) for word in facts.words)])]


def _find_change(sentence: Sequence[str], quote: Sequence[str], matcher: SequenceMatcher[str]) -> str:
    """Return the first terms of a sentence that differ from the quote at the same place; "" if all agree.

    These do not count: an added function word that is not a negation, another ending of a word, and a moved word that
    replaces no other word.
    """
    for operation, start, end, quote_start, quote_end in matcher.get_opcodes():
        quote_terms = quote[quote_start:quote_end]
        quote_stems = set(map(stem, quote_terms))
        for term in (term for term in sentence[start:end] if stem(term) not in quote_stems):
            is_negation = term in _NEGATIONS or term.endswith("n't")
            is_new = term not in quote and (operation == "replace" or is_negation or _has_content(term))
            if is_new or (operation == "replace" and _has_content(term) and any(map(_has_content, quote_terms))):
                return " ".join(sentence[start:end])
    return ""
