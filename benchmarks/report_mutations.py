"""Measure how often a report's check detects a falsified sentence, by kind, and how often it marks a faithful one.

    python -m benchmarks.report_mutations

There are three kinds of sentences. Sentences of real documents (the language reference and, on Linux, licences) have
themselves and their two neighbours as quotes. Invented facts in plain English have sentences of their paragraph as
quotes. Paraphrases, written by hand, say in other words what their quotes say (`report_mutations.toml`; the rules of
the check were adjusted on those in `known`, not on the held-out ones). Each sentence that the check does not mark is
falsified in all ways that apply to it, by code that shares no word list with the check.
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
from memagent_evaluation.score_statistics import compute_wilson_interval
from memagent_report.checked_report import check_quote, find_lower_case_words
from memagent_report.evidence_matrix import SourceQuote
from memagent_report.sentence_checks import check_sentence
from memagent_report.source_text import SourceText

SEED: Final = 20
MAX_SENTENCES: Final = 400
LICENCE_FOLDER: Final = Path("/usr/share/common-licenses")
PARAPHRASES_FILE: Final = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Claim:
    """A sentence, its quotes, and the document that the quotes are from."""

    sentence: str
    quotes: tuple[SourceQuote, ...]
    source: SourceText


Mutation = Callable[[Claim, random.Random, Sequence[Claim]], Claim | None]
"""Returns a falsified claim, perhaps with words of other claims of its kind; None if it does not apply to the claim."""


# The sentences


def collect_real_sentences() -> list[Claim]:
    """Return sentences of licences and of the language reference, those with numbers and names first."""
    texts = [path.read_text("utf-8", "replace") for path in sorted(LICENCE_FOLDER.glob("*")) if path.is_file()][:8]
    texts += [topics[name] for name in sorted(topics)]
    claims: list[Claim] = []
    for text in texts:
        source = SourceText(text)
        spans = list(_iter_sentences(source))
        for previous_span, span, next_span in zip(spans, spans[1:], spans[2:], strict=False):
            sentence = " ".join(text[slice(*span)].split())
            if 8 <= len(sentence.split()) <= 60 and re.match(r"[A-Z]", sentence) and sentence.endswith("."):
                quotes = tuple(_make_quote(source, *span) for span in (span, previous_span, next_span))
                claims.append(Claim(sentence, quotes, source))
    shuffled = random.Random(SEED).sample(claims, len(claims))
    return sorted(shuffled, key=lambda claim: -min(3, len(re.findall(r"\d+|(?<=[a-z] )[A-Z]", claim.sentence))))[
        :MAX_SENTENCES
    ]


def _iter_sentences(source: SourceText) -> Iterator[tuple[int, int]]:
    """Yield start and end of the complete sentences of a text."""
    position = 0
    while position < len(source.text):
        start, end, is_complete = source.find_sentence(position, position + 1)
        if is_complete and end > start:
            yield start, end
        position = max(position, end) + 1


def _make_quote(source: SourceText, start: int, end: int) -> SourceQuote:
    return SourceQuote(source.text[start:end], start, end, None)


def generate_facts() -> list[Claim]:
    """Return invented facts about people, places and machines, from paragraphs of five facts each."""
    claims = []
    for paragraph_index in range(MAX_SENTENCES // 5):
        facts = EnglishFacts(SEED + paragraph_index)
        statements = []
        for _ in range(5):
            fact = facts.draw_fact()
            statements.append(facts.draw_statement(fact.relation, fact.subject, fact.value))
        text = " ".join(statements)
        source = SourceText(text)
        spans = [(text.index(statement), text.index(statement) + len(statement)) for statement in statements]
        for index, statement in enumerate(statements):
            other_spans = [span for other_index, span in enumerate(spans) if other_index != index][:2]
            claims.append(
                Claim(statement, tuple(_make_quote(source, *span) for span in (spans[index], *other_spans)), source)
            )
    return claims


def load_paraphrases(split: str) -> list[Claim]:
    """Return the sentences that were written by hand.

    Args:
        split: "known" or "held_out".
    """
    claims = []
    for pair in tomllib.loads(PARAPHRASES_FILE.read_text("utf-8"))[split]:
        text = " ".join(pair["quotes"])
        source = SourceText(text)
        starts = [text.index(quote) for quote in pair["quotes"]]
        quotes = [
            _make_quote(source, start, start + len(quote)) for start, quote in zip(starts, pair["quotes"], strict=True)
        ]
        claims.append(Claim(pair["sentence"], tuple(quotes), source))
    return claims


# The mutations


def _find_spans(pattern: str, text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(pattern, text)]


def _replace_span(claim: Claim, span: tuple[int, int], text: str) -> Claim | None:
    return _replace_sentence(claim, claim.sentence[: span[0]] + text + claim.sentence[span[1] :])


def _replace_random_match(claim: Claim, rng: random.Random, pattern: str, change: Callable[[str], str]) -> Claim | None:
    """Change one random match of a pattern in the sentence; return None if there is no match or no change."""
    spans = _find_spans(pattern, claim.sentence)
    if not spans:
        return None
    span = rng.choice(spans)
    return _replace_span(claim, span, change(claim.sentence[slice(*span)]))


def _replace_sentence(claim: Claim, sentence: str) -> Claim | None:
    """Return the claim with another sentence, or None if that is the same."""
    return None if sentence == claim.sentence else replace(claim, sentence=sentence)


_NAME: Final = r"(?<=[a-z,] )[A-Z][a-z]{2,}\b"
_MONTHS: Final[list[str]] = re.findall(
    r"\w+",
    "January February March April May June July August September October November December",
)


def change_number(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Replace one digit of a number."""

    def change(number: str) -> str:
        index = rng.randrange(len(number.rstrip(",")))
        while not number[index].isdigit():
            index = rng.randrange(len(number.rstrip(",")))
        digit = rng.choice([digit for digit in "123456789" if digit != number[index]])
        return number[:index] + digit + number[index + 1 :]

    return _replace_random_match(claim, rng, r"(?<![\w.])\d[\d,]*(?![\w.]*\w)", change)


def change_number_word(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Replace a number word, such as "three", with another."""
    number_words = [
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "twenty",
    ]
    pattern = rf"\b(?:{'|'.join(number_words)})\b"

    def change(old: str) -> str:
        return rng.choice([word for word in number_words if word != old])

    return _replace_random_match(claim, rng, pattern, change)


def change_unit(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Replace the unit of a number."""
    changes = {
        "metres": "feet", "m": "km", "kg": "g", "kilograms": "pounds", "percent": "points", "per cent": "points",
        "%": " degrees", "degrees": "percent", "euros": "dollars", "dollars": "euros", "francs": "euros",
        "crowns": "dollars", "pounds": "euros", "hours": "minutes", "minutes": "hours", "seconds": "minutes",
        "days": "weeks", "months": "years", "years": "months", "mg": "g", "grams": "kilograms", "million": "billion",
        "monthly": "weekly", "bytes": "bits", "mmHg": "bar", "°C": "°F", "g": "mg",
    }  # fmt: skip
    names = "|".join(map(re.escape, sorted(changes, key=len, reverse=True)))
    pattern = rf"(?<=\d)\s?(?:{names})(?!\w)|(?<=\d )(?:{names})(?!\w)"
    return _replace_random_match(claim, rng, pattern, lambda old: old.replace(old.strip(), changes[old.strip()]))


def shift_date(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Replace a month or a year."""
    names = "|".join(_MONTHS)

    def change(old: str) -> str:
        if old.isdigit():
            return str(int(old) + rng.choice([-3, -1, 1, 2]))
        return rng.choice([month for month in _MONTHS if month != old])

    pattern = rf"\b(?:{names})\b(?= \d)|(?<=\d )(?:{names})\b|\b(?:1[5-9]|20)\d\d\b"
    return _replace_random_match(claim, rng, pattern, change)


def replace_name(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Replace a name with one from another sentence that none of the quotes has."""
    spans = _find_spans(_NAME, claim.sentence)
    candidates = sorted({name for other in claims for name in re.findall(_NAME, other.sentence)} - set(_MONTHS))
    quoted_text = " ".join(quote.text for quote in claim.quotes)
    candidates = [name for name in candidates if name not in quoted_text]
    if not spans or not candidates:
        return None
    return _replace_span(claim, rng.choice(spans), rng.choice(candidates))


def swap_names(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Exchange the first two full names of a sentence."""
    full_name = r"(?<![\w.])(?:[A-Z][a-z]{2,})(?: [A-Z][a-z]{2,})*\b"
    spans = [
        span
        for span in _find_spans(full_name, claim.sentence)
        if claim.sentence[slice(*span)] not in _COMMON_FIRST_WORDS
    ]
    spans = [span for span in spans if not set(claim.sentence[slice(*span)].split()) & set(_MONTHS)]
    return _swap_spans(claim, spans)


_COMMON_FIRST_WORDS: Final = frozenset(
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


def swap_numbers(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Exchange the first two numbers of a sentence."""
    spans = _find_spans(r"(?<![\w.,])\d[\d,.]*\d\b|(?<![\w.,])\d\b", claim.sentence)
    return _swap_spans(claim, spans)


def _swap_spans(claim: Claim, spans: Sequence[tuple[int, int]]) -> Claim | None:
    if len(spans) < 2 or claim.sentence[slice(*spans[0])] == claim.sentence[slice(*spans[1])]:
        return None
    (first_start, first_end), (second_start, second_end) = spans[:2]
    text = claim.sentence
    return _replace_sentence(
        claim,
        text[:first_start]
        + text[second_start:second_end]
        + text[first_end:second_start]
        + text[first_start:first_end]
        + text[second_end:],
    )


_VERBS: Final = "is|are|was|were|may|must|can|will|shall|has|have|had|should|could|would|does|do|did"


def insert_negation(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Insert "not" after the first auxiliary verb of a sentence without a negation."""
    match = re.search(rf"\b(?:{_VERBS})\b(?! not)", claim.sentence)
    if match is None or re.search(r"\b(?:not|no|never|nobody|neither|without)\b|n't", claim.sentence):
        return None
    return _replace_span(claim, match.span(), f"{match[0]} not")


def remove_negation(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Remove the "not" after an auxiliary verb."""
    match = re.search(rf"\b(?:{_VERBS})( not)\b", claim.sentence)
    return None if match is None else _replace_span(claim, match.span(1), "")


def cut_after_denial(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Return the clause after a negation as a sentence."""
    match = re.search(r"\b(?:not|no|never|nobody|neither|unless|except)\b ", claim.sentence)
    clause = claim.sentence[match.end() :] if match else ""
    return _replace_sentence(claim, clause[0].upper() + clause[1:]) if len(clause.split()) >= 5 else None


_ANTONYMS: Final = (
    ("may", "must"), ("can", "must"), ("shall", "may"), ("before", "after"), ("more", "less"), ("at least", "at most"),
    ("always", "seldom"), ("all", "some"), ("first", "last"), ("above", "below"), ("rose", "fell"),
    ("opened", "closed"),
    ("same", "different"), ("possible", "impossible"), ("true", "false"), ("left", "right"), ("large", "small"),
    ("long", "short"), ("public", "private"), ("include", "exclude"), ("allowed", "forbidden"), ("old", "new"),
    ("approved", "refused"), ("bought", "sold"), ("highest", "lowest"), ("early", "late"), ("with", "without"),
    ("begins", "ends"), ("started", "stopped"), ("empty", "full"), ("equal", "unequal"), ("valid", "invalid"),
)  # fmt: skip


def replace_by_opposite(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Replace a word with its opposite."""
    matches = []
    for word, opposite in _ANTONYMS:
        for old, new in ((word, opposite), (opposite, word)):
            matches += [(span, new) for span in _find_spans(rf"\b{old}\b", claim.sentence)]
    if not matches:
        return None
    span, new = rng.choice(matches)
    return _replace_span(claim, span, new)


def replace_word(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Replace an ordinary word with one from another sentence; the check does not look for such changes."""
    pattern = r"(?<=[a-z] )[a-z]{5,}\b"

    def change(old: str) -> str:
        words = re.findall(pattern, rng.choice(claims).sentence)
        return rng.choice(words) if words else old

    return _replace_random_match(claim, rng, pattern, change)


def take_foreign_quotes(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Replace the quotes with those of a sentence from another document."""
    other_claim = rng.choice([other_claim for other_claim in claims if other_claim.source is not claim.source])
    return replace(claim, quotes=other_claim.quotes, source=other_claim.source)


def cut_quote_at_end(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Cut the last words of the first quote."""
    words = claim.quotes[0].text.split(" ")
    return None if len(words) < 6 else _replace_first_quote(claim, " ".join(words[: rng.randrange(3, len(words) - 1)]))


def cut_quote_at_beginning(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Cut the first words of the first quote."""
    words = claim.quotes[0].text.split(" ")
    return None if len(words) < 6 else _replace_first_quote(claim, " ".join(words[rng.randrange(1, len(words) - 3) :]))


def reword_quote(claim: Claim, rng: random.Random, claims: Sequence[Claim]) -> Claim | None:
    """Replace a word of the first quote with one from another sentence."""
    words = claim.quotes[0].text.split(" ")
    index = rng.randrange(len(words))
    other_word = rng.choice(rng.choice(claims).sentence.split())
    if words[index] == other_word:
        return None
    return _replace_first_quote(claim, " ".join([*words[:index], other_word, *words[index + 1 :]]))


def _replace_first_quote(claim: Claim, text: str) -> Claim:
    """Return the claim with another text of its first quote."""
    first_quote = claim.quotes[0]
    start = first_quote.start_char + max(0, first_quote.text.find(text))
    return replace(claim, quotes=(SourceQuote(text, start, start + len(text), None), *claim.quotes[1:]))


MUTATIONS: Final[dict[str, Mutation]] = {
    "number changed": change_number,
    "number word changed": change_number_word,
    "unit changed": change_unit,
    "date shifted": shift_date,
    "name replaced": replace_name,
    "names swapped": swap_names,
    "numbers swapped": swap_numbers,
    "negation inserted": insert_negation,
    "negation removed": remove_negation,
    "cut after a denial": cut_after_denial,
    "opposite word": replace_by_opposite,
    "word replaced": replace_word,
    "quotes of another": take_foreign_quotes,
    "quote cut at end": cut_quote_at_end,
    "quote cut at beginning": cut_quote_at_beginning,
    "quote reworded": reword_quote,
}


# Faithful changes


def change_formats(claim: Claim) -> Claim | None:
    """Write dates in the other order, thousands without commas, and % for percent."""
    names = "|".join(_MONTHS)
    text = re.sub(rf"\b(\d{{1,2}}) ({names}) (\d{{4}})\b", r"\2 \1, \3", claim.sentence)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"(?<=\d) per ?cent\b", "%", text)
    text = re.sub(r"(?<=\d)%", " percent", text) if text == claim.sentence else text
    return _replace_sentence(claim, text)


def keep_first_clause(claim: Claim) -> Claim | None:
    """Return the sentence up to its first comma, if no exception follows."""
    clause, comma, remainder = claim.sentence.partition(",")
    if not comma or len(clause.split()) < 6 or re.match(r"\s*(?:unless|except|if|but|provided|only)\b", remainder):
        return None
    return (
        _replace_sentence(claim, f"{clause}.")
        if re.match(r"(?!If|When|While|After|Before|Because|In|For)", clause)
        else None
    )


def _collect_common_words(claims: Sequence[Claim]) -> frozenset[str]:
    """Return the words that the sources also have in lower case."""
    sources = {id(claim.source): claim.source for claim in claims}
    return frozenset().union(*map(find_lower_case_words, sources.values()))


def is_detected(claim: Claim, common_words: frozenset[str]) -> bool:
    """Return whether the check finds a problem with a quote or with the sentence."""
    if any(check_quote(quote, claim.source, "it") for quote in claim.quotes):
        return True
    return bool(check_sentence(claim.sentence, [quote.text for quote in claim.quotes], common_words=common_words))


@dataclass(frozen=True)
class DetectionCount:
    """The sentences that the check detected, and all sentences."""

    detected: int
    total: int

    def __str__(self) -> str:
        if not self.total:
            return ""
        interval = compute_wilson_interval(self.detected, self.total)
        return f"{100 * interval.mean:.0f} [{100 * interval.low:.0f}, {100 * interval.high:.0f}] of {self.total}"


def load_corpora() -> dict[str, list[Claim]]:
    """Return all sentences by the name of their corpus."""
    return {
        "real documents": collect_real_sentences(),
        "invented facts": generate_facts(),
        "other words, known": load_paraphrases("known"),
        "other words, held out": load_paraphrases("held_out"),
    }


def generate_mutants(
    name: str, kind: str, passing_claims: Sequence[Claim], claims: Sequence[Claim]
) -> Iterator[tuple[Claim, Claim]]:
    """Yield the sentences of a corpus that can be falsified in a way, each with its falsified form."""
    rng = random.Random(f"{SEED} {name} {kind}")
    for claim in passing_claims:
        if (mutant := MUTATIONS[kind](claim, rng, claims)) is not None:
            yield claim, mutant


def measure_detection(step: int = 1) -> dict[str, dict[str, DetectionCount]]:
    """Return the counts by row and corpus; the rows of faithful sentences count false alarms.

    Args:
        step: of a corpus with more than 100 sentences, only every `step`-th is falsified.
    """
    rows: dict[str, dict[str, DetectionCount]] = defaultdict(dict)
    for name, claims in load_corpora().items():
        common_words = _collect_common_words(claims)
        passing_claims = [claim for claim in claims if not is_detected(claim, common_words)]
        passing_count = len(passing_claims)
        passing_claims = passing_claims[:: step if passing_count > 100 else 1]
        for kind in MUTATIONS:
            mutants = [mutant for _, mutant in generate_mutants(name, kind, passing_claims, claims)]
            rows[kind][name] = DetectionCount(
                sum(is_detected(mutant, common_words) for mutant in mutants), len(mutants)
            )
        rows["false alarms: as it is"][name] = DetectionCount(len(claims) - passing_count, len(claims))
        for kind, rewrite in (("other forms", change_formats), ("first clause", keep_first_clause)):
            variants = [mutant for claim in claims if (mutant := rewrite(claim)) is not None]
            rows[f"false alarms: {kind}"][name] = DetectionCount(
                sum(is_detected(variant, common_words) for variant in variants), len(variants)
            )
    return dict(rows)


def main() -> None:
    """Print the table; with "-v", also the false alarms and the falsified sentences that were not detected."""
    rows = measure_detection()
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
    """Print errors for adjusting the rules, without those of held-out sentences."""
    for name, claims in list(load_corpora().items())[:3]:
        common_words = _collect_common_words(claims)
        for claim in claims:
            for problem in check_sentence(claim.sentence, [q.text for q in claim.quotes], common_words=common_words):
                print(f"{name}: alarm: {problem.kind}: {problem.detail}\n    {claim.sentence}")
        passing_claims = [claim for claim in claims if not is_detected(claim, common_words)]
        for kind in MUTATIONS:
            for claim, mutant in generate_mutants(name, kind, passing_claims, claims):
                if not is_detected(mutant, common_words):
                    print(f"{name}: missed: {kind}\n    {claim.sentence}\n    {mutant.sentence}")


if __name__ == "__main__":
    main()
