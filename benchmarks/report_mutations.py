"""How often a report's check notices a falsified sentence, by kind, and how often it marks a faithful one.

    python -m benchmarks.report_mutations

Three kinds of sentences: sentences of real documents that are on any machine with Python (licences where there are
any, the language reference), bound to themselves and their two neighbours; invented facts in plain English, bound to
their paragraph; and sentences written by hand that say in other words what their quotes say (`report_mutations.toml`;
the rules were adjusted on those in `known`, and not on those that are held out). Each that is not marked as it is, is
falsified in every way that it allows, by code that shares no word list with the check.
"""

from __future__ import annotations

import random
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

import rich.box
from rich.console import Console
from rich.table import Table

from memagent_evaluation.english_facts import EnglishFacts
from memagent_evaluation.statistics import wilson
from memagent_report.checked_report import check_quote, find_lower_case_words
from memagent_report.evidence_matrix import SourceQuote
from memagent_report.sentence_checks import check_sentence
from memagent_report.source_text import SourceText

SEED: Final = 20
SENTENCES: Final = 400
LICENCES: Final = Path("/usr/share/common-licenses")
PAIRS: Final = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Claim:
    """A sentence, its quotes, and the document that they are from."""

    sentence: str
    quotes: tuple[SourceQuote, ...]
    source: SourceText


Mutation = Callable[[Claim, random.Random, Sequence[Claim]], Claim | None]
"""Falsifies a claim, with the help of others of its kind; None where it cannot."""


# The sentences


def real_sentences() -> list[Claim]:
    """Sentences of licences and of the language reference, those with numbers and names first."""
    texts = [path.read_text("utf-8", "replace") for path in sorted(LICENCES.glob("*")) if path.is_file()][:8]
    texts += [topics[name] for name in sorted(topics)]
    claims: list[Claim] = []
    for text in texts:
        source = SourceText(text)
        spans = list(_sentence_spans(source))
        for previous_span, span, next_span in zip(spans, spans[1:], spans[2:], strict=False):
            sentence = " ".join(text[slice(*span)].split())
            if 8 <= len(sentence.split()) <= 60 and re.match(r"[A-Z]", sentence) and sentence.endswith("."):
                quotes = tuple(_quote(source, *span) for span in (span, previous_span, next_span))
                claims.append(Claim(sentence, quotes, source))
    shuffled = random.Random(SEED).sample(claims, len(claims))
    return sorted(shuffled, key=lambda claim: -min(3, len(re.findall(r"\d+|(?<=[a-z] )[A-Z]", claim.sentence))))[
        :SENTENCES
    ]


def _sentence_spans(source: SourceText) -> Iterator[tuple[int, int]]:
    position = 0
    while position < len(source.text):
        start, end, is_complete = source.sentence(position, position + 1)
        if is_complete and end > start:
            yield start, end
        position = max(position, end) + 1


def _quote(source: SourceText, start: int, end: int) -> SourceQuote:
    return SourceQuote(source.text[start:end], start, end, None)


def invented_facts() -> list[Claim]:
    """Paragraphs of five facts about invented people, places and machines; each claim is one of them."""
    claims = []
    for number in range(SENTENCES // 5):
        facts = EnglishFacts(SEED + number)
        lines = []
        for _ in range(5):
            fact = facts.fact()
            lines.append(facts.state(fact.relation, fact.subject, fact.value))
        text = " ".join(lines)
        source = SourceText(text)
        spans = [(text.index(line), text.index(line) + len(line)) for line in lines]
        for index, line in enumerate(lines):
            others = [span for number_of_span, span in enumerate(spans) if number_of_span != index][:2]
            claims.append(Claim(line, tuple(_quote(source, *span) for span in (spans[index], *others)), source))
    return claims


def paraphrases(part: str) -> list[Claim]:
    """The pairs that were written by hand."""
    claims = []
    for pair in tomllib.loads(PAIRS.read_text("utf-8"))[part]:
        text = " ".join(pair["quotes"])
        source = SourceText(text)
        starts = [text.index(quote) for quote in pair["quotes"]]
        quotes = [
            _quote(source, start, start + len(quote)) for start, quote in zip(starts, pair["quotes"], strict=True)
        ]
        claims.append(Claim(pair["sentence"], tuple(quotes), source))
    return claims


# The mutations


def _spans(pattern: str, text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(pattern, text)]


def _put(text: str, span: tuple[int, int], new: str) -> str:
    return text[: span[0]] + new + text[span[1] :]


def _said(claim: Claim, sentence: str | None) -> Claim | None:
    same = sentence is None or sentence == claim.sentence
    return None if same else replace(claim, sentence=str(sentence))


_NAME: Final = r"(?<=[a-z,] )[A-Z][a-z]{2,}\b"
_MONTHS: Final = re.findall(
    r"\w+",
    "January February March April May June July August September October November December",
)


def number_changed(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    spans = _spans(r"(?<![\w.])\d[\d,]*(?![\w.]*\w)", claim.sentence)
    if not spans:
        return None
    span = source.choice(spans)
    old = claim.sentence[slice(*span)].rstrip(",")
    index = source.randrange(len(old))
    while not old[index].isdigit():
        index = source.randrange(len(old))
    digit = source.choice([digit_option for digit_option in "123456789" if digit_option != old[index]])
    return _said(claim, _put(claim.sentence, (span[0], span[0] + len(old)), old[:index] + digit + old[index + 1 :]))


def number_word_changed(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    words = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "twenty"]
    spans = _spans(rf"\b(?:{'|'.join(words)})\b", claim.sentence)
    if not spans:
        return None
    span = source.choice(spans)
    old = claim.sentence[slice(*span)]
    return _said(claim, _put(claim.sentence, span, source.choice([word for word in words if word != old])))


def unit_changed(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    changes = {
        "metres": "feet", "m": "km", "kg": "g", "kilograms": "pounds", "percent": "points", "per cent": "points",
        "%": " degrees", "degrees": "percent", "euros": "dollars", "dollars": "euros", "francs": "euros",
        "crowns": "dollars", "pounds": "euros", "hours": "minutes", "minutes": "hours", "seconds": "minutes",
        "days": "weeks", "months": "years", "years": "months", "mg": "g", "grams": "kilograms", "million": "billion",
        "monthly": "weekly", "bytes": "bits", "mmHg": "bar", "°C": "°F", "g": "mg",
    }  # fmt: skip
    names = "|".join(map(re.escape, sorted(changes, key=len, reverse=True)))
    spans = _spans(rf"(?<=\d)\s?(?:{names})(?!\w)|(?<=\d )(?:{names})(?!\w)", claim.sentence)
    if not spans:
        return None
    span = source.choice(spans)
    old = claim.sentence[slice(*span)]
    return _said(claim, _put(claim.sentence, span, old.replace(old.strip(), changes[old.strip()])))


def date_shifted(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    names = "|".join(_MONTHS)
    spans = _spans(rf"\b(?:{names})\b(?= \d)|(?<=\d )(?:{names})\b|\b(?:1[5-9]|20)\d\d\b", claim.sentence)
    if not spans:
        return None
    span = source.choice(spans)
    old = claim.sentence[slice(*span)]
    if old.isdigit():
        new = str(int(old) + source.choice([-3, -1, 1, 2]))
    else:
        new = source.choice([month for month in _MONTHS if month != old])
    return _said(claim, _put(claim.sentence, span, new))


def name_replaced(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    spans = _spans(_NAME, claim.sentence)
    pool = sorted({name for other in others for name in re.findall(_NAME, other.sentence)} - set(_MONTHS))
    quoted = " ".join(quote.text for quote in claim.quotes)
    pool = [name for name in pool if name not in quoted]
    if not spans or not pool:
        return None
    return _said(claim, _put(claim.sentence, source.choice(spans), source.choice(pool)))


def names_swapped(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    """The first two full names of a sentence change places."""
    full = r"(?<![\w.])(?:[A-Z][a-z]{2,})(?: [A-Z][a-z]{2,})*\b"
    spans = [span for span in _spans(full, claim.sentence) if claim.sentence[slice(*span)] not in _COMMON_FIRST]
    spans = [span for span in spans if not set(claim.sentence[slice(*span)].split()) & set(_MONTHS)]
    return _swapped(claim, spans)


_COMMON_FIRST: Final = frozenset(
    re.findall(
        r"\w+",
        """
        The This That These Those If When While For From According Between Before After Because Over Within Until Every
        Each Three Two Half Children Participants Nobody Either Neither Both You Your All Any Some One There Lead Adults
        Version Minutes Mean Revenue Samples Witness Driver And But Not Its It They She Who What Contrary Officer
        Inspector Judge Mayor Sleep Residents Lighthouse Botanist Contractor
        """,
    )
)


def numbers_swapped(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    spans = _spans(r"(?<![\w.,])\d[\d,.]*\d\b|(?<![\w.,])\d\b", claim.sentence)
    return _swapped(claim, spans)


def _swapped(claim: Claim, spans: Sequence[tuple[int, int]]) -> Claim | None:
    if len(spans) < 2 or claim.sentence[slice(*spans[0])] == claim.sentence[slice(*spans[1])]:
        return None
    (a, b), (c, d) = spans[:2]
    text = claim.sentence
    return _said(claim, text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:])


_VERBS: Final = "is|are|was|were|may|must|can|will|shall|has|have|had|should|could|would|does|do|did"


def negation_inserted(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    match = re.search(rf"\b(?:{_VERBS})\b(?! not)", claim.sentence)
    if match is None or re.search(r"\b(?:not|no|never|nobody|neither|without)\b|n't", claim.sentence):
        return None
    return _said(claim, _put(claim.sentence, match.span(), f"{match[0]} not"))


def negation_removed(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    match = re.search(rf"\b(?:{_VERBS})( not)\b", claim.sentence)
    return None if match is None else _said(claim, _put(claim.sentence, match.span(1), ""))


def cut_after_a_denial(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    """What follows a denial, as a sentence of its own."""
    match = re.search(r"\b(?:not|no|never|nobody|neither|unless|except)\b ", claim.sentence)
    rest = claim.sentence[match.end() :] if match else ""
    return _said(claim, rest[0].upper() + rest[1:]) if len(rest.split()) >= 5 else None


_ANTONYMS: Final = (
    ("may", "must"), ("can", "must"), ("shall", "may"), ("before", "after"), ("more", "less"), ("at least", "at most"),
    ("always", "seldom"), ("all", "some"), ("first", "last"), ("above", "below"), ("rose", "fell"),
    ("opened", "closed"),
    ("same", "different"), ("possible", "impossible"), ("true", "false"), ("left", "right"), ("large", "small"),
    ("long", "short"), ("public", "private"), ("include", "exclude"), ("allowed", "forbidden"), ("old", "new"),
    ("approved", "refused"), ("bought", "sold"), ("highest", "lowest"), ("early", "late"), ("with", "without"),
    ("begins", "ends"), ("started", "stopped"), ("empty", "full"), ("equal", "unequal"), ("valid", "invalid"),
)  # fmt: skip


def opposite_word(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    matches = []
    for word, opposite in _ANTONYMS:
        for old, new in ((word, opposite), (opposite, word)):
            matches += [(span, new) for span in _spans(rf"\b{old}\b", claim.sentence)]
    if not matches:
        return None
    span, new = source.choice(matches)
    return _said(claim, _put(claim.sentence, span, new))


def word_replaced(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    """An ordinary word becomes another: what the check does not look for."""
    spans = _spans(r"(?<=[a-z] )[a-z]{5,}\b", claim.sentence)
    if not spans:
        return None
    span = source.choice(spans)
    pool = re.findall(r"(?<=[a-z] )[a-z]{5,}\b", source.choice(others).sentence)
    return _said(claim, _put(claim.sentence, span, source.choice(pool))) if pool else None


def quotes_of_another(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    """The sentence names the quotes of another sentence of another document."""
    foreign = [other for other in others if other.source is not claim.source]
    other = source.choice(foreign)
    return replace(claim, quotes=other.quotes, source=other.source)


def quote_cut_at_end(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    words = claim.quotes[0].text.split(" ")
    if len(words) < 6:
        return None
    return _with_quote(claim, " ".join(words[: source.randrange(3, len(words) - 1)]))


def quote_cut_at_beginning(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    words = claim.quotes[0].text.split(" ")
    if len(words) < 6:
        return None
    return _with_quote(claim, " ".join(words[source.randrange(1, len(words) - 3) :]))


def quote_reworded(claim: Claim, source: random.Random, others: Sequence[Claim]) -> Claim | None:
    words = claim.quotes[0].text.split(" ")
    index = source.randrange(len(words))
    other = source.choice(source.choice(others).sentence.split())
    return None if words[index] == other else _with_quote(claim, " ".join([*words[:index], other, *words[index + 1 :]]))


def _with_quote(claim: Claim, text: str) -> Claim:
    first = claim.quotes[0]
    start = first.start_char + max(0, first.text.find(text))
    return replace(claim, quotes=(SourceQuote(text, start, start + len(text), None), *claim.quotes[1:]))


MUTATIONS: Final[dict[str, Mutation]] = {
    each.__name__.replace("_", " "): each
    for each in (
        number_changed, number_word_changed, unit_changed, date_shifted, name_replaced, names_swapped, numbers_swapped,
        negation_inserted, negation_removed, cut_after_a_denial, opposite_word, word_replaced, quotes_of_another,
        quote_cut_at_end, quote_cut_at_beginning, quote_reworded,
    )
}  # fmt: skip


# Faithful changes


def written_otherwise(claim: Claim) -> Claim | None:
    """The same in other forms: dates the other way round, thousands without commas, % for percent."""
    names = "|".join(_MONTHS)
    text = re.sub(rf"\b(\d{{1,2}}) ({names}) (\d{{4}})\b", r"\2 \1, \3", claim.sentence)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"(?<=\d) per ?cent\b", "%", text)
    text = re.sub(r"(?<=\d)%", " percent", text) if text == claim.sentence else text
    return _said(claim, text)


def first_clause(claim: Claim) -> Claim | None:
    """A sentence up to its first comma, where no exception follows."""
    clause, comma, rest = claim.sentence.partition(",")
    if not comma or len(clause.split()) < 6 or re.match(r"\s*(?:unless|except|if|but|provided|only)\b", rest):
        return None
    return _said(claim, f"{clause}.") if re.match(r"(?!If|When|While|After|Before|Because|In|For)", clause) else None


def _is_common(claims: Sequence[Claim]) -> Callable[[str], bool]:
    sources = {id(claim.source): claim.source for claim in claims}
    return frozenset().union(*map(find_lower_case_words, sources.values())).__contains__


def is_noticed(claim: Claim, is_common: Callable[[str], bool]) -> bool:
    """Whether the check finds something: with a quote, or with the sentence."""
    if any(check_quote(quote, claim.source, "it") for quote in claim.quotes):
        return True
    return bool(check_sentence(claim.sentence, [quote.text for quote in claim.quotes], is_common=is_common))


@dataclass(frozen=True)
class Count:
    """How many of how many."""

    noticed: int
    of: int

    def __str__(self) -> str:
        if not self.of:
            return ""
        interval = wilson(self.noticed, self.of)
        return f"{100 * interval.mean:.0f} [{100 * interval.low:.0f}, {100 * interval.high:.0f}] of {self.of}"


def corpora() -> dict[str, list[Claim]]:
    return {
        "real documents": real_sentences(),
        "invented facts": invented_facts(),
        "other words, known": paraphrases("known"),
        "other words, held out": paraphrases("held_out"),
    }


def measured(step: int = 1) -> dict[str, dict[str, Count]]:
    """By row and corpus. The rows of faithful sentences count false alarms. Of many, every `step`-th is falsified."""
    rows: dict[str, dict[str, Count]] = defaultdict(dict)
    for name, claims in corpora().items():
        is_common = _is_common(claims)
        passing_claims = [claim for claim in claims if not is_noticed(claim, is_common)]
        passing_count = len(passing_claims)
        passing_claims = passing_claims[:: step if len(passing_claims) > 100 else 1]
        for kind, mutation in MUTATIONS.items():
            source = random.Random(f"{SEED} {name} {kind}")
            mutants = [mutant for claim in passing_claims if (mutant := mutation(claim, source, claims)) is not None]
            rows[kind][name] = Count(sum(is_noticed(mutant, is_common) for mutant in mutants), len(mutants))
        rows["false alarms: as it is"][name] = Count(len(claims) - passing_count, len(claims))
        for kind, rewrite in (("other forms", written_otherwise), ("first clause", first_clause)):
            variants = [mutant for claim in claims if (mutant := rewrite(claim)) is not None]
            rows[f"false alarms: {kind}"][name] = Count(
                sum(is_noticed(variant, is_common) for variant in variants), len(variants)
            )
    return dict(rows)


def main() -> None:
    """Print the table; with "-v", what was wrong: alarms at faithful sentences, and falsified ones that passed."""
    rows = measured()
    table = Table(box=rich.box.MARKDOWN)
    names = list(next(iter(rows.values())))
    for column in ("% detected [95 %]", *names):
        table.add_column(column, no_wrap=True)
    for kind, counts in rows.items():
        table.add_row(kind, *(str(counts[name]) for name in names))
    Console(width=160).print(table)
    if "-v" in sys.argv:
        _print_errors()


def _print_errors() -> None:
    """What the rules may be adjusted by: not the sentences that are held out."""
    for name, claims in list(corpora().items())[:3]:
        is_common = _is_common(claims)
        for claim in claims:
            for problem in check_sentence(claim.sentence, [q.text for q in claim.quotes], is_common=is_common):
                print(f"{name}: alarm: {problem.kind}: {problem.detail}\n    {claim.sentence}")
        for kind, mutation in MUTATIONS.items():
            source = random.Random(f"{SEED} {name} {kind}")
            for claim in claims:
                mutant = mutation(claim, source, claims)
                if mutant is not None and not is_noticed(mutant, is_common):
                    print(f"{name}: missed: {kind}\n    {claim.sentence}\n    {mutant.sentence}")


if __name__ == "__main__":
    main()
