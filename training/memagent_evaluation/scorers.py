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
from memagent_graph.prompts import AnswerFormat, last_boxed
from memagent_graph.reasoning import extract_reply
from memagent_graph.words import ends_with_particle, is_unspaced, normalise_text

_ARTICLES: Final = frozenset({"a", "an", "the"})
_PUNCTUATION: Final = regex.compile(rf"[\p{{P}}{re.escape(string.punctuation)}]")
_NUMBER_MARKS: Final = r"(?<!\w)-(?=\.?\d)|(?<=\d)\.(?=\d)|(?<![\w.])\.(?=\d)"
"""Minus signs and decimal points."""
_NAME_MARKS: Final = r"(?<=[^\W\d_])(?:\+{1,2}|\#)(?!\w)"
"""Distinguishes C++ and C# from C, and A+ from A."""
_DIGIT_SEPARATORS: Final = r"(?<=\d)[/:-](?=\d)"
"""Fractions, times and dates. They may also separate items of a list, as in "12/7"."""
_KEPT: Final = re.compile(f"{_NUMBER_MARKS}|{_NAME_MARKS}|{_DIGIT_SEPARATORS}")
_KEPT_IN_LISTS: Final = re.compile(f"{_NUMBER_MARKS}|{_NAME_MARKS}")
_MARKS: Final = frozenset("-./:+#")
"""Punctuation that may be left in a normal form, and then belongs to the word next to it."""
_GROUPED: Final = re.compile(r"(?<!\d)(?<!\d,)\d{1,3}(?:,\d{3})+(?!\d)(?!,\d)")
"""Numbers whose commas group digits by three; "12,7" and "1234567,12" are two each."""
_BOX_CHARACTERS: Final = 300
"""The characters at the completion's end in which the paper looks for the box."""
_BETWEEN_ITEMS: Final = re.compile(r"[,;\n]|\band\b", re.IGNORECASE)
_BETWEEN_WORDS: Final = re.compile(r"[,;\s]|\band\b", re.IGNORECASE)
_MARK_AT_LINE_START: Final = re.compile(r"^[ \t]*(?:[-*•]|\d{1,3}[.)])[ \t]+(?=\S)", re.MULTILINE)
_MARK_ANYWHERE: Final = re.compile(r"(?:^|(?<=\s))(?:[-*•]|\d{1,3}[.)])\s+(?=\S)")


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
    """A task that its publisher scores by its own rule; the result replaces RULER's string match."""

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
        answer_format: the answer's form in the prompts. BOXED: strict looks at the last \boxed{} in the completion's
            last 300 characters, as the paper does (more if the gold strings would not fit). PLAIN: at the whole answer.
    """
    if outcome is not QuestionOutcome.ANSWERED or answer is None or not sample.gold:
        return WRONG
    reply = extract_reply(answer if raw_answer is None else raw_answer)
    metric = sample.task.metric
    candidate = find_boxed_at_end(reply, sample.gold) if answer_format is AnswerFormat.BOXED else answer
    task = sample.task
    return Scores(
        strict=float(candidate is not None and is_exactly(candidate, sample.gold, metric)),
        lenient=float(holds(answer, sample.gold, metric)),
        string_match=task.own_score(sample, answer)
        if isinstance(task, OwnMetric)
        else match_strings(reply, sample.gold, metric),
        token_f1=compute_best_f1(answer, sample.gold, metric),
    )


def find_boxed_at_end(reply: str, gold: tuple[str, ...] = ()) -> str | None:
    r"""Return the last \boxed{} in the last 300 characters, or in twice the length of all gold strings if more."""
    return last_boxed(reply[-max(_BOX_CHARACTERS, 2 * sum(map(len, gold))) :])


def is_exactly(answer: str, gold: tuple[str, ...], metric: Metric) -> bool:
    """Return whether an answer is the gold one, both normalised.

    Wordings of one answer (`Metric.ANY`): it equals one of them. Several required strings: its items are exactly those
    strings, in any order. Commas, semicolons, line ends and "and" separate items, and so do spaces if every gold string
    is a single word; list markers ("1.", "-") are left out.
    """
    if metric is Metric.ANY or len(gold) == 1:
        return normalise(answer) in {normalise(string) for string in gold}
    separator = _BETWEEN_WORDS if all(len(string.split()) == 1 for string in gold) else _BETWEEN_ITEMS
    numeric = any(character.isdigit() for string in gold for character in string)
    items = (_MARK_AT_LINE_START if numeric else _MARK_ANYWHERE).sub(" , ", answer)
    # A gold string may itself have a separator, so both sides are split in the same way.
    return _split_items(items, separator) == frozenset().union(*(_split_items(string, separator) for string in gold))


def holds(answer: str, gold: tuple[str, ...], metric: Metric) -> bool:
    """Return whether an answer contains any gold string (`Metric.ANY`) or all of them, as whole words.

    An exactly right answer has them: "123,456" is two of two numbers, although it may be one compared with another gold
    string.
    """
    matches = [contains(answer, string) for string in gold]
    return is_exactly(answer, gold, metric) or (any(matches) if metric is Metric.ANY else all(matches))


def match_strings(reply: str, gold: tuple[str, ...], metric: Metric) -> float:
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

    Unlike there, what distinguishes numbers and names is kept: sign, decimal point, slash, colon and hyphen between
    digits, and the marks of C++ and C#. A text of only punctuation and articles keeps them; "The" must not become equal
    to an empty text.
    """
    folded = _fold(text)
    return _remove_articles(_strip(folded, _KEPT, "")) or " ".join(folded.split())


def separate_words(text: str, *, lists: bool = True) -> str:
    """Normalise like `normalise`, but with spaces for punctuation ("key:7", "red/blue") that is not part of a number.

    With `lists`, it also separates numbers, as in "12/7"; otherwise that is one fraction.
    """
    folded = _fold(text)
    whole = _GROUPED.sub(lambda match: match[0].replace(",", ""), re.sub("['’]", "", folded))
    return _remove_articles(_strip(whole, _KEPT_IN_LISTS if lists else _KEPT, " ")) or " ".join(folded.split())


def _fold(text: str) -> str:
    return normalise_text(text).replace("\N{MINUS SIGN}", "-")


def _strip(text: str, kept: re.Pattern[str], replacement: str) -> str:
    """Return the text with `replacement` for its punctuation, except what `kept` matches."""
    positions = {position for match in kept.finditer(text) for position in range(*match.span())}
    stripped: str = _PUNCTUATION.sub(lambda match: match[0] if match.start() in positions else replacement, text)
    return stripped


def contains(text: str, gold: str) -> bool:
    """Return whether `text` contains `gold` as whole words: "7" is not in "1977", "12.7" or "1,777".

    They may match in either of two normal forms: SQuAD's (`normalise`), or with spaces for punctuation
    (`separate_words`).
    A gold fraction, time or date ("1/2") is searched as a whole.
    """
    lists = re.search(_DIGIT_SEPARATORS, gold) is None
    forms = (normalise, partial(separate_words, lists=False), *((separate_words,) if lists else ()))
    return any(_has_words(form(text), form(gold)) for form in forms)


def _has_words(text: str, phrase: str) -> bool:
    start = text.find(phrase) if phrase else -1
    while start >= 0:
        end = start + len(phrase)
        is_whole = not _is_inside_word(text, end) or ends_with_particle(text[start:].partition(" ")[0], len(phrase))
        if is_whole and not _is_inside_word(text, start):
            return True
        start = text.find(phrase, start + 1)
    return False


def compute_token_f1(text: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over normalised words, as in SQuAD. 0 to 1.

    As there, words separated only by punctuation are one word: "7,12" shares none with "7 12", although it has both
    numbers.
    """
    words, gold_words = normalise(text).split(), normalise(gold).split()
    shared = sum((Counter(words) & Counter(gold_words)).values())
    return 2 * shared / (len(words) + len(gold_words)) if shared else 0.0


def _remove_articles(text: str) -> str:
    return " ".join(word for word in text.split() if word not in _ARTICLES)


def _split_items(text: str, separator: re.Pattern[str]) -> frozenset[str]:
    return frozenset(filter(None, map(normalise, separator.split(text))))


def _is_inside_word(text: str, position: int) -> bool:
    around = text[position - 1 : position + 1]
    return 0 < position < len(text) and all(
        (character.isalnum() or character in _MARKS or unicodedata.combining(character)) and not is_unspaced(character)
        for character in around
    )
