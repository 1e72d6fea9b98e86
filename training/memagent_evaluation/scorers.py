r"""Scores an answer against the gold strings: strict, lenient, RULER's string match and token F1.

A read that failed, did not finish or gave no answer is wrong in every score.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, runtime_checkable

import regex

from memagent_evaluation.result_table import QuestionOutcome
from memagent_evaluation.samples import Metric, Sample
from memagent_graph.prompts import AnswerFormat, extract_last_boxed
from memagent_graph.reasoning import extract_reply
from memagent_graph.words import ends_with_particle, is_unspaced, normalise_text

_ARTICLES: Final = frozenset({"a", "an", "the"})
_PUNCTUATION: Final = regex.compile(rf"[\p{{P}}{re.escape(string.punctuation)}]")
_NUMBER_MARKS: Final = r"(?<!\w)-(?=\.?\d)|(?<=\d)\.(?=\d)|(?<![\w.])\.(?=\d)"
"""Minus signs and decimal points."""
_NAME_MARKS: Final = r"(?<=[^\W\d_])(?:\+{1,2}|\#)(?!\w)"
"""The signs of C++, C# and A+."""
_DIGIT_SEPARATORS: Final = r"(?<=\d)[/:-](?=\d)"
"""Fractions, times and dates. They may also separate items of a list, as in "12/7"."""
_MEANINGFUL_MARKS: Final = re.compile(f"{_NUMBER_MARKS}|{_NAME_MARKS}|{_DIGIT_SEPARATORS}")
_MEANINGFUL_MARKS_IN_LISTS: Final = re.compile(f"{_NUMBER_MARKS}|{_NAME_MARKS}")
_WORD_MARKS: Final = frozenset("-./:+#")
"""Punctuation that a normal form may have; there it is part of the word next to it."""
_GROUPED_NUMBER: Final = re.compile(r"(?<!\d)(?<!\d,)\d{1,3}(?:,\d{3})+(?!\d)(?!,\d)")
"""A number whose commas group digits by three; "12,7" and "1234567,12" are two numbers each."""
_BOX_CHARACTERS: Final = 300
"""The number of characters at the end of a completion in which the paper looks for the box."""
_ITEM_SEPARATOR: Final = re.compile(r"[,;，；、،؛\n]|\band\b", re.IGNORECASE)
_WORD_SEPARATOR: Final = re.compile(r"[,;，；、،؛\s]|\band\b", re.IGNORECASE)
_LIST_MARKER_AT_LINE_START: Final = re.compile(r"^[ \t]*(?:[-*•]|\d{1,3}[.)])[ \t]+(?=\S)", re.MULTILINE)
_LIST_MARKER: Final = re.compile(r"(?:^|(?<=\s))(?:[-*•]|\d{1,3}[.)])\s+(?=\S)")


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one answer, each 0 to 1."""

    strict: float
    """0 or 1: the answer is the gold one in the requested form. Training rewards this."""
    lenient: float
    """0 or 1: the gold string, or each of several required ones, is in the answer as whole words."""
    string_match: float
    """RULER's metric: the fraction of gold strings in the completion, or 1 if it has any. `OwnMetric` replaces it."""
    token_f1: float
    """F1 over words, as in SQuAD."""


WRONG: Final = Scores(0.0, 0.0, 0.0, 0.0)

REWARD_NAMES: Final = {
    "strict": "exact_match", "lenient": "lenient_match", "string_match": "string_match", "token_f1": "token_f1",
}  # fmt: skip
"""The name of each score as a reward."""


@runtime_checkable
class OwnMetric(Protocol):
    """A task with a score of its own, which replaces RULER's string match."""

    def own_score(self, sample: Sample, answer: str) -> float:
        """Return the score of the reader's answer, 0 to 1."""
        ...


def score(
    sample: Sample,
    answer: str | None,
    raw_answer: str | None,
    *,
    outcome: QuestionOutcome = QuestionOutcome.ANSWERED,
    answer_format: AnswerFormat = AnswerFormat.BOXED,
) -> Scores:
    r"""Return all scores of one answer.

    Args:
        sample: the question, with its gold strings.
        answer: the reader's answer; None if there is none.
        raw_answer: the completion that it was taken from; None means `answer`.
        outcome: how the read ended. All but ANSWERED are wrong in every score, whatever text there is.
        answer_format: the form of answers that prompts ask for. BOXED: strict compares the last \boxed{} in the last
            300 characters of the completion, as the paper does (in more if gold strings are long). PLAIN: the answer.
    """
    if outcome is not QuestionOutcome.ANSWERED or answer is None or not sample.gold:
        return WRONG
    reply = extract_reply(answer if raw_answer is None else raw_answer)
    metric = sample.task.metric
    candidate = find_boxed_at_end(reply, sample.gold) if answer_format is AnswerFormat.BOXED else answer
    task = sample.task
    return Scores(
        strict=float(candidate is not None and is_exact_match(candidate, sample.gold, metric)),
        lenient=float(is_lenient_match(answer, sample.gold, metric)),
        string_match=float(task.own_score(sample, answer))
        if isinstance(task, OwnMetric)
        else compute_string_match(reply, sample.gold, metric),
        token_f1=compute_best_f1(answer, sample.gold, metric),
    )


def find_boxed_at_end(reply: str, gold: tuple[str, ...] = ()) -> str | None:
    r"""Return the last \boxed{} in the last 300 characters, or in twice the length of all gold strings if more."""
    return extract_last_boxed(reply[-max(_BOX_CHARACTERS, 2 * sum(map(len, gold))) :])


def is_exact_match(answer: str, gold: tuple[str, ...], metric: Metric) -> bool:
    """Return whether an answer is the gold one, both normalised.

    If gold strings are wordings of one answer (`Metric.ANY`), it equals one of them. If all are required, its items are
    exactly those strings, in any order. Commas, semicolons, line ends and "and" separate items, and so do spaces if
    every gold string is a single word; list markers ("1.", "-") are left out.
    """
    if metric is Metric.ANY or len(gold) == 1:
        return normalise(answer) in {normalise(string) for string in gold}
    separator = _WORD_SEPARATOR if all(len(string.split()) == 1 for string in gold) else _ITEM_SEPARATOR
    has_numbers = any(character.isdigit() for string in gold for character in string)
    items = (_LIST_MARKER_AT_LINE_START if has_numbers else _LIST_MARKER).sub(" , ", answer)
    # A gold string may itself have a separator, so both sides are split in the same way.
    return _split_items(items, separator) == frozenset().union(*(_split_items(string, separator) for string in gold))


def is_lenient_match(answer: str, gold: tuple[str, ...], metric: Metric) -> bool:
    """Return whether an answer contains any gold string (`Metric.ANY`) or all of them, as whole words.

    An exact match always does: "123,456" matches two gold numbers, although it could also be a single one.
    """
    matches = [contains(answer, string) for string in gold]
    return is_exact_match(answer, gold, metric) or (any(matches) if metric is Metric.ANY else all(matches))


def compute_string_match(reply: str, gold: tuple[str, ...], metric: Metric) -> float:
    """Return the fraction of gold strings in the completion, as in RULER: in lower case, and also inside words."""
    lowered = reply.lower()
    matches = [string.lower() in lowered for string in gold]
    return float(any(matches)) if metric is Metric.ANY else sum(matches) / len(matches)


def compute_best_f1(answer: str, gold: tuple[str, ...], metric: Metric) -> float:
    """Return F1 compared with the nearest of several wordings, or with all strings together if all are required."""
    if metric is Metric.ANY:
        return max(compute_token_f1(answer, string) for string in gold)
    return compute_token_f1(answer, " ".join(gold))


def normalise(text: str) -> str:
    """Return a text without punctuation, English articles and letter case, as in SQuAD, but in all scripts.

    Unlike SQuAD's, it keeps the punctuation that distinguishes numbers and names: sign, decimal point, slash, colon and
    hyphen between digits, and the signs of C++ and C#. A text of only punctuation and articles keeps them: "The" must
    not become empty.
    """
    folded = _fold(text)
    return _remove_articles(_replace_punctuation(folded, _MEANINGFUL_MARKS, "")) or " ".join(folded.split())


def separate_words(text: str, *, split_numbers: bool = True) -> str:
    """Normalise like `normalise`, but put spaces for punctuation ("key:7", "red/blue") unless it is part of a number.

    With `split_numbers`, "12/7" is two numbers; otherwise it is one fraction.
    """
    folded = _fold(text)
    ungrouped = _GROUPED_NUMBER.sub(lambda match: match[0].replace(",", ""), re.sub("['’]", "", folded))
    return _remove_articles(
        _replace_punctuation(ungrouped, _MEANINGFUL_MARKS_IN_LISTS if split_numbers else _MEANINGFUL_MARKS, " ")
    ) or " ".join(folded.split())


def _fold(text: str) -> str:
    return normalise_text(text).replace("\N{MINUS SIGN}", "-")


def _replace_punctuation(text: str, exceptions: re.Pattern[str], replacement: str) -> str:
    """Return the text with `replacement` for its punctuation, except what `exceptions` matches."""
    kept_positions = {position for match in exceptions.finditer(text) for position in range(*match.span())}
    stripped: str = _PUNCTUATION.sub(lambda match: match[0] if match.start() in kept_positions else replacement, text)
    return stripped


def contains(text: str, gold: str) -> bool:
    """Return whether `text` contains `gold` as whole words: "7" is not in "1977", "12.7" or "1,777".

    They may match in either of two normal forms: SQuAD's (`normalise`), or with spaces for punctuation
    (`separate_words`). A gold fraction, time or date ("1/2") is one word.
    """
    can_be_list = re.search(_DIGIT_SEPARATORS, gold) is None
    normalisers = (normalise, partial(separate_words, split_numbers=False), *((separate_words,) if can_be_list else ()))
    return any(_contains_phrase(normalise_form(text), normalise_form(gold)) for normalise_form in normalisers)


def _contains_phrase(text: str, phrase: str) -> bool:
    start = text.find(phrase) if phrase else -1
    while start >= 0:
        end = start + len(phrase)
        ends_at_boundary = not _is_inside_word(text, end) or ends_with_particle(
            text[start:].partition(" ")[0], len(phrase)
        )
        if ends_at_boundary and not _is_inside_word(text, start):
            return True
        start = text.find(phrase, start + 1)
    return False


def compute_token_f1(text: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over normalised words, as in SQuAD. 0 to 1.

    As in SQuAD, words that only punctuation separates are one word: "7,12" shares no word with "7 12".
    """
    words, gold_words = normalise(text).split(), normalise(gold).split()
    shared = sum((Counter(words) & Counter(gold_words)).values())
    return 2 * shared / (len(words) + len(gold_words)) if shared else 0.0


def _remove_articles(text: str) -> str:
    return " ".join(word for word in text.split() if word not in _ARTICLES)


def _split_items(text: str, separator: re.Pattern[str]) -> frozenset[str]:
    return frozenset(filter(None, map(normalise, separator.split(text))))


def _is_inside_word(text: str, position: int) -> bool:
    neighbours = text[position - 1 : position + 1]
    return 0 < position < len(text) and all(
        (character.isalnum() or character in _WORD_MARKS or unicodedata.combining(character))
        and not is_unspaced(character)
        for character in neighbours
    )
