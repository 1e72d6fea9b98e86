"""Answers to ask for: spans of a section's sentences that say who, when, where, how many, why or which.

A span is found by its form, such as a number with its unit, a date, a name, or what follows "because"; the question is
written by a language model (`prose_questions.py`) and kept only if the model then answers it with the span.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_NUMBER: Final = (
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|forty|fifty|hundred"
)
_MONTH: Final = "January|February|March|April|May|June|July|August|September|October|November|December"
_DAY: Final = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
_END: Final = r"(?=[,.;:)]|$| and | but | if | when )"
_THINGS: Final = "[a-z]{3,}s|percent|feet|men|people|children"
_PLACE_WORDS: Final = "in|at|near|behind|under|inside|outside|into"
_PERSON: Final = "[a-z]+(?: [a-z]+)?(?:er|or|ist|ian|ers|ors|ists|man|men|owner|team|people)"
_PAST: Final = "said|wrote|was|is|had|has|made|came|went|took|saw|will|and"
_OPTIONS: Final = "command|option|package|file|program|variable|tool|format"
_DOING: Final = "using|means of|running|typing|pressing|setting|adding|choosing|clicking|editing"
_HOLDING: Final = "contains|provides|requires|needs|gives|includes|means|found|wanted|bought|carried|wore"
_FORMS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("when", rf"\b(?:\d{{1,2}} )?(?:{_MONTH}) (?:\d{{1,2}}(?:st|nd|rd|th)?,? )?\d{{4}}\b"),
        ("when", r"\bin (?P<a>(?:early |late )?(?:1[5-9]|20)\d\d\b)"),
        ("when", rf"\b(?:on|last|next|every) (?:{_DAY})s?(?: (?:morning|night|evening|afternoon))?\b"),
        ("when", r"\b(?:after|before|until|at the end of|during) (?:the|a|an) [\w' -]{4,40}?" + _END),
        ("how many", rf"\b(?:\d[\d,.]*\d|\d|{_NUMBER}) (?:[a-z]+ )?(?:{_THINGS})\b"),
        ("how many", r"\b\d[\d,.]* ?(?:%|MB|GB|KB|kB|MiB|GiB|bits|bytes)"),
        ("why", r"\bbecause (?P<a>(?!of )[\w' ,-]{12,80}?)" + _END),
        ("why", r"\bbecause of (?P<a>[\w' -]{6,60}?)" + _END),
        ("why", r"\b(?:in order to|so that|so as to) [\w' -]{10,70}?" + _END),
        ("what for", r"\bused (?P<a>(?:to|for) [\w' -]{8,60}?)" + _END),
        ("where", rf"\b(?:{_PLACE_WORDS}) (?:the|a|an|his|her|their) (?:[a-z]+ ){{0,2}}[a-z]{{4,}}\b(?=[,.;])"),
        ("where", r"\bin (?P<a>/?[A-Z][a-z]{3,}(?: [A-Z][a-z]+)?\b)"),
        ("where", r"\bin (?P<a>/[a-z][\w/.-]{4,40}\b)"),
        ("who", r"(?:\bby |, )(?P<a>(?:the )?[A-Z][a-z]+(?: [A-Z]\.)?(?: [A-Z][a-z]+){1,2}\b)"),
        ("who", rf"\b(?:[A-Z][a-z]{{2,}} [A-Z][a-z]{{2,}})(?= (?:{_PAST})\b)"),
        ("who", rf"\bby (?P<a>(?:the|a|an) {_PERSON}\b)"),
        ("which", r"\bcalled (?P<a>(?:the |a |an )?[\w'-]+(?: [\w'-]+){0,2}?)" + _END),
        ("which", r"\bknown as (?P<a>(?:the |a |an )?[\w'-]+(?: [\w'-]+){0,3}?)" + _END),
        ("which", rf"\bthe (?P<a>(?:--?)?[a-z]+[-_][a-z_-]+)(?= (?:{_OPTIONS})\b)"),
        ("how", rf"\b(?:by|with) (?:{_DOING}) [\w' /.-]{{4,50}}?" + _END),
        ("what if", r"\botherwise (?P<a>[\w' -]{12,70}?)" + _END),
        ("what", r"\b(?:must|should) (?P<a>(?:not |be |use |have |also )?[a-z]+ [\w' -]{8,60}?)" + _END),
        ("what", r"\bis (?P<a>(?:a|an|the) [a-z][\w' -]{8,50}?)" + _END),
        ("what", rf"\b(?:{_HOLDING}) (?P<a>[\w' -]{{5,50}}?)" + _END),
    )
)
"""The kind of question, and the form of its answer: the group `a`, or the whole match."""
_SENTENCE: Final = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"'“‘(]?[A-Z0-9])|\n\s*\n\s*")
_VAGUE: Final = re.compile(
    r"^(?:it|this|that|these|those|them|he|she|they|him|her|you|the following|as follows)\b", re.I
)


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """An answer in a sentence, and what kind of question asks for it."""

    kind: str
    sentence: str
    """With single spaces."""
    answer: str


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, with single spaces, that are neither fragments nor lists."""
    plain = (" ".join(part.split()) for part in _SENTENCE.split(text))
    return [
        sentence
        for sentence in plain
        if 30 <= len(sentence) <= 260 and sentence[0].isupper() and sentence[-1] in ".!?\"”'" and "  " not in sentence
    ]


def spans(text: str) -> Iterator[AnswerSpan]:
    """Yield the spans of a text, at most two of a sentence."""
    for sentence in sentences(text):
        matches: list[AnswerSpan] = []
        for kind, form in _FORMS:
            for match in form.finditer(sentence):
                answer = (match.groupdict().get("a") or match[0]).strip(" ,-")
                if 1 <= len(answer.split()) <= 12 and not _VAGUE.match(answer):
                    matches.append(AnswerSpan(kind, sentence, answer))
        yield from matches[:2]
