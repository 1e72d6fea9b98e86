"""Checks that the names and values of a sentence are in the same order and in the same quote as in the source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from memagent_graph.provenance.overlap import content_words
from memagent_report.opposite_words import BETWEEN_WORDS, NEGATIONS, OPENERS, TITLES
from memagent_report.sentence_problems import Problem, ProblemKind
from memagent_report.stated_facts import Date, Facts, Number, stem


def is_ordinary(word: str, in_quotes: set[str], is_common: Callable[[str], bool]) -> bool:
    """Whether a word at the beginning of a sentence is not a name: it is in `in_quotes`, or it is an ordinary word."""
    return word in in_quotes or word in OPENERS or is_common(word) or not content_words((word, "x")) - {"x"}


def is_content_word(word: str) -> bool:
    """Whether a word has a meaning of its own, unlike function words and negations."""
    return len(word) > 2 and word not in NEGATIONS and word not in BETWEEN_WORDS


def same_value(one: Number, other: Number) -> bool:
    """Whether two numbers may have the same value; units are ignored."""
    return any(mine == theirs for mine, _ in one.readings for theirs, _ in other.readings)


@dataclass(frozen=True, slots=True)
class _Item:
    """A name or a value, its key for comparison, and its position."""

    key: str
    start: int
    end: int
    is_name: bool = False


def _items(facts: Facts) -> list[_Item]:
    values = [_Item(number.key, number.start, number.end) for number in facts.numbers]
    values += [_Item(f"{date.year}-{date.month}-{date.day}", date.start, date.end) for date in facts.dates]
    names: list[_Item] = []
    for word in facts.words:
        if not (word.is_name or word.is_first):
            continue
        if names and facts.text[names[-1].end : word.start].strip() in {"", "."} and word.start - names[-1].end <= 2:
            names[-1] = _Item(f"{names[-1].key} {word.text}", names[-1].start, word.end, is_name=True)
        else:
            names.append(_Item(word.text, word.start, word.end, is_name=True))
    return sorted((*values, *names), key=lambda item: item.start)


def _once(items: Iterable[_Item]) -> dict[str, _Item]:
    """Return the items whose key occurs only once, by key."""
    found: dict[str, _Item] = {}
    twice: set[str] = set()
    for item in items:
        twice |= {item.key} & found.keys()
        found[item.key] = item
    return {key: item for key, item in found.items() if key not in twice}


def swapped_facts(stated: Facts, known: Sequence[Facts]) -> Iterator[Problem]:
    """Find two names, or two values, whose order is reversed in a quote, with the same word between them."""
    here = _once(_items(stated))
    for quote in known:
        there = _once(_items(quote))
        both = sorted(here.keys() & there.keys(), key=lambda key: here[key].start)
        for first, second in combinations(both, 2):
            if there[first].start < there[second].start:
                continue
            if here[first].is_name is not here[second].is_name:
                continue
            # A passive sentence names in reverse order what an active one names.
            is_turned = here[first].is_name and (
                _is_passive(stated.text[here[first].end : here[second].start])
                is not _is_passive(quote.text[there[second].end : there[first].start])
            )
            between = _between(stated, here[first], here[second])
            if not is_turned and between & _between(quote, there[second], there[first]):
                if any(_in_this_order(first, second, other) for other in known):
                    continue
                names = (
                    stated.text[slice(here[first].start, here[first].end)],
                    stated.text[slice(here[second].start, here[second].end)],
                )
                yield Problem(ProblemKind.ORDER, f"{names[0]} and {names[1]} are in the opposite order in its quote")
                return


def _is_passive(passage: str) -> bool:
    return re.search(r"\b(?:by|from)\b", passage) is not None


def _in_this_order(first: str, second: str, quote: Facts) -> bool:
    places = {key: [item.start for item in _items(quote) if item.key == key] for key in (first, second)}
    return bool(places[first] and places[second] and min(places[first]) < max(places[second]))


def _between(facts: Facts, left: _Item, right: _Item) -> set[str]:
    """Return the names, the values, and the stems of the content words between two items."""
    words = {
        stem(word.text) for word in facts.words if left.end <= word.start < right.start and is_content_word(word.text)
    }
    return words | {item.key for item in _items(facts) if left.end <= item.start < right.start}


def separated_values(stated: Facts, known: Sequence[Facts], is_common: Callable[[str], bool]) -> Iterator[Problem]:
    """Find numbers and dates that occur in the quotes only with other names than those of the sentence."""
    names = _likely_names(stated, is_common)
    if not names:
        return
    words = [{word.text for word in each.words} for each in known]
    if not any(names & each for each in words):
        return
    values = [
        *((number.start, number.end, partial(_has_number, number)) for number in stated.numbers),
        *((date.start, date.end, partial(_has_date, date)) for date in stated.dates),
    ]
    for start, end, is_in in values:
        holding = [(each, own) for each, own in zip(known, words, strict=True) if is_in(each)]
        others = [_likely_names(each, is_common) - names for each, _ in holding]
        if holding and all(others) and not any(names & own for _, own in holding):
            shown_value, other = stated.text[start:end], sorted(others[0])[0].title()
            yield Problem(
                ProblemKind.APART,
                f"{shown_value} occurs with {other} in its quotes, not with its own names",
            )


def _likely_names(facts: Facts, is_common: Callable[[str], bool]) -> set[str]:
    """Return the names of a text, and the first words of its sentences, except ordinary words."""
    first = {word.text for word in facts.words if word.is_first and not is_ordinary(word.text, set(), is_common)}
    return first | {word.text for word in facts.names if word.text not in TITLES}


def _has_number(number: Number, quote: Facts) -> bool:
    return any(same_value(number, other) for other in quote.numbers)


def _has_date(date: Date, quote: Facts) -> bool:
    return any(date.is_within(other) for other in quote.dates)
