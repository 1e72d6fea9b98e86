"""Checks a sentence against its quotes: numbers, dates, names, negations, opposites, order, and changed copies.

A sentence that passes is "quoted": everything in it that can be compared without a model is in its quotes. It need not
be true, and it need not follow from the quotes. Changed verbs and adjectives in paraphrases are not detected, and the
rules are for English. `python -m benchmarks.report_mutations` measures how often each kind of change is detected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from memagent_graph.provenance.overlap import content_words
from memagent_report.copied_words import copy_changes, is_verbatim, omitted_qualifier
from memagent_report.fact_places import is_content_word, is_ordinary, same_value, separated_values, swapped_facts
from memagent_report.opposite_words import (
    NEGATIONS,
    OPPOSITE_PHRASES,
    OPPOSITES,
    SOFT_NEGATIONS,
    TITLES,
)
from memagent_report.sentence_problems import Problem, ProblemKind
from memagent_report.stated_facts import Date, Facts, Number, Word, content_stems, facts_of, stem

_LEAST_SHARED: Final = 0.5
"""The smallest share of a sentence's words and values that must be in its quotes."""


def check_sentence(
    sentence: str,
    quotes: Sequence[str],
    *,
    named: Iterable[str] = (),
    is_common: Callable[[str], bool] = lambda word: False,
) -> tuple[Problem, ...]:
    """Return what the quotes of a sentence do not support; empty if the sentence is quoted.

    Args:
        sentence: the sentence.
        quotes: passages of documents, word for word.
        named: the names of the quoted documents, which the sentence may mention; see `checked_report.document_names`.
        is_common: whether a word, in lower case, is an ordinary word and therefore not a name at the beginning of a
            sentence; for example because the documents contain it in lower case.
    """
    if not quotes:
        return (Problem(ProblemKind.NO_QUOTE, "no quote supports it"),)
    stated, known = facts_of(_without_names(sentence, named)), [facts_of(quote) for quote in quotes]
    if is_verbatim(stated, known):
        qualifier = omitted_qualifier(stated, known)
        detail = f"it is only a part of its quote and omits {qualifier!r}"
        return (Problem(ProblemKind.CHANGED, detail),) if qualifier else ()
    found = [
        *_quotations(stated, known),
        *_numbers(stated, known),
        *_dates(stated, known),
        *_codes(stated, known),
        *_names(stated, known, is_common),
        *_negations(stated, known),
        *_opposites(stated, known),
    ]
    if not found:
        found = [*_copied(stated, known), *swapped_facts(stated, known), *separated_values(stated, known, is_common)]
    return tuple(found) or tuple(_words(stated, known))


def _without_names(sentence: str, named: Iterable[str]) -> str:
    """Replace the names of documents in a sentence by "it"."""
    for name in sorted(filter(None, named), key=len, reverse=True):
        sentence = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "it", sentence)
    return sentence


# Values


def _quotations(stated: Facts, known: Sequence[Facts]) -> Iterator[Problem]:
    for match in re.finditer(r'"([^"]{3,})"', stated.text):
        passage = match[1].strip(" .,;:")
        if not any(passage.casefold() in each.text.casefold() for each in known):
            yield Problem(ProblemKind.QUOTATION, f"{match[0]} is in none of its quotes")


def _numbers(stated: Facts, known: Sequence[Facts]) -> Iterator[Problem]:
    for number in stated.numbers:
        holding = [(other, each) for each in known for other in each.numbers if same_value(number, other)]
        shown = stated.text[number.start : number.end]
        if not holding:
            parts = {part for each in known for date in each.dates for part in (date.year, date.month, date.day)}
            is_first_or_second = any(_ORDINALS.get(int(number.value)) in each.text.casefold().split() for each in known)
            if number.unit or (number.value not in parts and not is_first_or_second):
                yield Problem(ProblemKind.NUMBER, f"{shown} is in none of its quotes")
        elif number.unit and not any(_may_have_unit(number.unit, other, each) for other, each in holding):
            units = sorted({other.unit for other, _ in holding if other.unit})
            there = f"there it is {' or '.join(units)}" if units else "there it has none"
            yield Problem(ProblemKind.UNIT, f"{shown} has another unit in its quotes: {there}")


_ORDINALS: Final = {1: "first", 2: "second"}
"""Ordinals that `stated_facts` treats as words."""


def _may_have_unit(unit: str, number: Number, quote: Facts) -> bool:
    """Whether a number in a quote has this unit, or is followed by no word that could be another unit."""
    if any(own == unit for _, own in number.readings):
        return True
    if any(own for _, own in number.readings):
        return False
    following = re.match(r"[\s-]?([^\W\d_]+)", quote.text[number.end :])
    return following is None or not content_words((following[1].casefold(), "x")) - {"x"}


def _dates(stated: Facts, known: Sequence[Facts]) -> Iterator[Problem]:
    there = [date for each in known for date in each.dates]
    for date in stated.dates:
        if not any(date.is_within(other) for other in there) and not _is_spread(date, known):
            yield Problem(ProblemKind.DATE, f"{stated.text[date.start : date.end]} is in none of its quotes")


def _is_spread(date: Date, known: Sequence[Facts]) -> bool:
    """Whether a quote states the date in two parts, as in "from 3 to 5 March 2021" or "in 2021, on 3 March"."""
    for each in known:
        years = {int(number.value) for number in each.numbers if not number.unit and 1000 <= number.value < 3000}
        days = {int(number.value) for number in each.numbers if not number.unit and 1 <= number.value <= 31}
        for other in each.dates:
            same_month = date.month == other.month
            same_day = date.day in {None, other.day} or date.day in days
            same_year = date.year in {None, other.year} or (other.year is None and date.year in years)
            if same_month and same_day and same_year:
                return True
    return False


def _codes(stated: Facts, known: Sequence[Facts]) -> Iterator[Problem]:
    there = {code for each in known for code in each.codes}
    for code in stated.codes:
        if code not in there and not any(code in each.text.casefold() for each in known):
            yield Problem(ProblemKind.CODE, f"{code} is in none of its quotes")


# Names


def _names(stated: Facts, known: Sequence[Facts], is_common: Callable[[str], bool]) -> Iterator[Problem]:
    as_names = {word.text for each in known for word in each.words if word.is_name or word.is_first}
    as_words = {word.text for each in known for word in each.words}
    in_capitals = {word.text for each in known if each.text.isupper() for word in each.words}
    for word in stated.words:
        if word.text in as_names or word.text in in_capitals or word.text in TITLES:
            continue
        if word.is_first and is_ordinary(word.text, as_words, is_common):
            continue
        if word.is_name and word.text in as_words and _in_title_case(stated):
            continue
        if word.is_name or word.is_first:
            yield Problem(ProblemKind.NAME, f"{stated.text[word.start : word.end]} is in none of its quotes")


def _in_title_case(stated: Facts) -> bool:
    """Whether most words have a capital, as in a title, so that a capital does not indicate a name."""
    long = [word for word in stated.words if len(word.text) > 3]
    return len(long) > 2 and sum(word.is_name or word.is_first for word in long) > 0.7 * len(long)


# Negations and opposites

_NEAR: Final = 4
"""A negation applies to this many content words on either side."""


def _is_negation(word: Word, facts: Facts) -> bool:
    if word.text == "no" and _NO_IS_NOT_NEGATION.match(facts.text, word.end):
        return False
    return word.text in NEGATIONS or word.text.endswith("n't")


_NO_IS_NOT_NEGATION: Final = re.compile(r"\.?\s?\d| (?:longer|less|fewer|more|later|earlier|sooner)\b")
"""What follows a "no" that is not a negation: a number, as in "no. 5", or a comparative, as in "no longer"."""


@dataclass(frozen=True, slots=True)
class _Negation:
    """A negation, and the stems of the content words near it that are not names."""

    word: str
    before: frozenset[str]
    after: frozenset[str]
    negated: frozenset[str]
    """The first two content words after it."""

    def matches(self, other: _Negation) -> bool:
        """Whether both may negate the same thing, as in "it is not sold" and "its sale is not allowed"."""
        if not self.after and not other.after:
            return bool(self.before & other.before)
        return bool(self.after & (other.after | other.before) or self.before & other.after)


def _negations_in(facts: Facts, *, soft: bool = False) -> list[_Negation]:
    """Return the negations of a text or, with `soft`, the words that can have the meaning of a negation."""
    found = []
    for place, word in enumerate(facts.words):
        if word.text in SOFT_NEGATIONS if soft else _is_negation(word, facts):
            before = [stem(other.text) for other in facts.words[:place] if _can_be_negated(other)][-_NEAR:]
            after = [stem(other.text) for other in facts.words[place + 1 :] if _can_be_negated(other)][:_NEAR]
            found.append(_Negation(word.text, frozenset(before), frozenset(after), frozenset(after[:2])))
    return found


def _can_be_negated(word: Word) -> bool:
    return not word.is_name and is_content_word(word.text)


def _negations(stated: Facts, known: Sequence[Facts]) -> Iterator[Problem]:
    here, there = _negations_in(stated), [_negations_in(each) for each in known]
    every = [negation for negations in there for negation in negations]
    soft = [negation for each in known for negation in _negations_in(each, soft=True)]
    for negation in here:
        has_words = negation.after or negation.before
        if not (every or soft) or (has_words and not any(negation.matches(other) for other in (*every, *soft))):
            yield Problem(ProblemKind.NEGATION, f"{negation.word!r} negates what its quotes do not negate")
    words = {stem(word.text) for word in stated.words}
    near_here = frozenset[str]().union(
        *(each.after | each.before for each in (*here, *_negations_in(stated, soft=True)))
    )
    affirmed = [
        content_stems(each) - frozenset[str]().union(*(negation.negated for negation in negations))
        for each, negations in zip(known, there, strict=True)
    ]
    for negation in every:
        negated = negation.negated
        if negated and negated <= words and not near_here & negated and not any(negated <= each for each in affirmed):
            yield Problem(ProblemKind.NEGATION, f"it affirms what its quotes negate with {negation.word!r}")


def _opposites(stated: Facts, known: Sequence[Facts]) -> Iterator[Problem]:
    here = {word.text for word in stated.words}
    there = {word.text for each in known for word in each.words}
    for pair in OPPOSITES:
        for own, other in (pair, pair[::-1]):
            turned = (here & own) - there
            if turned and there & other and not there & own and not here & other:
                yield Problem(
                    ProblemKind.OPPOSITE,
                    f"it has {sorted(turned)[0]!r} where its quotes have {sorted(there & other)[0]!r}",
                )
    yield from _turned_phrases(stated, [each.text for each in known])


def _turned_phrases(stated: Facts, texts: Sequence[str]) -> Iterator[Problem]:
    for pair in OPPOSITE_PHRASES:
        for own, other in (pair, pair[::-1]):
            match = own.search(stated.text)
            if match is None or other.search(stated.text) or any(map(own.search, texts)):
                continue
            if turned_to := next((found[0] for found in map(other.search, texts) if found), None):
                yield Problem(ProblemKind.OPPOSITE, f"it has {match[0]!r} where its quotes have {turned_to!r}")


def _copied(stated: Facts, known: Sequence[Facts]) -> Iterator[Problem]:
    for change in copy_changes(stated, known):
        if change.own and change.quoted:
            detail = f"it has {change.own!r} where its quote has {change.quoted!r}"
        elif change.own:
            detail = f"it adds {change.own!r} to the words of its quote"
        else:
            detail = f"it repeats its quote but omits {change.quoted!r}"
        yield Problem(ProblemKind.CHANGED, detail)


def _words(stated: Facts, known: Sequence[Facts]) -> Iterator[Problem]:
    own = content_stems(stated)
    missing = own - frozenset().union(*(content_stems(each) for each in known))
    # Its numbers and dates are in the quotes, and count as words that were found.
    total = len(own) + len(stated.numbers) + len(stated.dates)
    if own and len(missing) > (1 - _LEAST_SHARED) * total:
        yield Problem(ProblemKind.WORDS, f"{len(missing)} of its {total} words and values are in none of its quotes")
