"""Finds characters, words and sentences in all scripts, and folds words, so that words of two texts can be compared.

ICU finds the ends of sentences, dictionary words and characters (grapheme clusters: what a reader sees as one) by
Unicode's rules (UAX 29). Words are compared in folded form, in which all spellings of a word are equal: composed or
decomposed, with or without vowel points and accents, with digits of any script, with separators in numbers, with
invisible characters, or with a hyphen at the end of a line. In scripts without spaces between words, every character
is a word, and texts are compared by pairs of characters. Positions of words refer to the original text.

Thai, Lao and Khmer texts mark few or no sentence ends, so only their words and characters are found.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final

import regex
from icu4py.breakers import BaseBreaker, CharacterBreaker, SentenceBreaker, WordBreaker

from memagent_graph.plain_text import replace_lone_surrogates

_INVISIBLE: Final = r"\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060\ufeff\ufffe"
"""Invisible characters in words: soft hyphens (pdfium writes U+FFFE), zero-width characters, direction marks."""
_UNSPACED: Final = (
    r"\p{Line_Break=SA}\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Yi}\u30fc\uff70\uff9e\uff9f\u3099-\u309c"
)
_NUMBER: Final = (
    r"(?<![\w.,])(?:\d{1,3}(?:,\d{2,3})*,\d{3}|\d{1,3}(?:\.\d{3}){2,}"
    "|\\d{1,3}(?:['’\u066c\xa0\u2009\u202f]\\d{3})+)(?!\\d|,\\d)"
)
"""A number with thousands separators. A single point is excluded, because the number may be a decimal fraction."""
_LINE_HYPHEN: Final = r"-\r?\n[^\S\n]*"
_ASCII_WORD: Final = re.compile(rf"{_NUMBER}|\w+(?:{_LINE_HYPHEN}(?=[a-z])\w+)*", re.ASCII)
WORD: Final = regex.compile(
    rf"{_NUMBER}|[{_UNSPACED}][\p{{M}}{_INVISIBLE}]*|\p{{No}}"
    rf"|[^\W\p{{No}}{_UNSPACED}](?:[^\W\p{{No}}{_UNSPACED}]|[\p{{M}}{_INVISIBLE}]|{_LINE_HYPHEN}(?=\p{{Ll}}))*"
)
"""A word; in scripts without spaces between words, a character with its marks."""
_UNSPACED_CHARACTER: Final = regex.compile(f"[{_UNSPACED}]")
_WORD_JOINERS: Final = regex.compile(r"[^\w\p{M}\p{No}]+")
_WORD_PARTS: Final = regex.compile(r"\p{Nd}+|[\p{L}\p{M}]+|\p{No}")
_OPTIONAL_MARKS: Final = re.compile("[\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06ed]")
"""Marks that texts may omit: accents, Hebrew and Arabic vowel points, and the Arabic elongation character."""
_KOREAN_PARTICLE: Final = re.compile(
    "(?<=[0-9가-힣][가-힣])(?:은|는|이|가|을|를|의|에|에서|에게|에는|에서는|께|로|으로|와|과|도|만|까지|부터|처럼|보다"
    "|라고|이라고|이다|입니다|이며|이고|였다|이었다)$"
)
_INVISIBLE_CHARACTER: Final = re.compile(f"[{_INVISIBLE}]")
_HIRAGANA: Final = re.compile("[\u3041-\u309f]")
_SEPARATE_PAIR: Final = regex.compile(
    r"(?:[\x00-\u02ff\u3000-\u3029\uff01-\uff60]"
    r"|(?=[\u0370-\uff60])[^\P{L}\u0d4e\u0e33\u0eb3\u1100-\u11ff\ua960-\ua97f\ud7b0-\ud7ff]){2}"
)
"""Two code points that never form one character: letters, except those that combine with others."""
_PARAGRAPH_END: Final = re.compile(r"\n[^\S\n]*\n\s*")
_ABBREVIATION: Final = re.compile(r"(?:^|\W)[A-Z]\w{0,2}\.\s*$")
_STOP_BEFORE_LOWER_CASE: Final = regex.compile(
    r"\.(?<=(?:[\p{L}\p{M}]{4}|(?<![\d.])\d{3,40}|[)\]`'\"”’»])\.)[)\]`'\"”’»]*\s+(?=[^\w\s.]*\p{Ll})"
)
"""A full stop after a word that is too long for an abbreviation. Before a lower-case letter, ICU assumes one."""
_SENTENCE_REPLACEMENTS: Final = {"\n": " ", "\r": " ", "…": ".", "\u0f0d": "。", "\u0f0e": "。"}
"""Replacements before ICU finds sentences: line breaks do not end sentences, and ICU ignores the other marks."""
_GREEK_QUESTION: Final = re.compile("(?<=[\u0370-\u03ff\u1f00-\u1fff]);")
_OPENING_QUOTES: Final = "「『（《〈【“‘"
_CONTEXT_CHARACTERS: Final = 80
"""The number of characters around a position that decide whether a sentence or a word ends there."""
_MAX_CODE_POINTS: Final = 1024
"""The maximum number of code points before a position to search for the start of the character that it may split."""


def _iter_ends(breaker: type[BaseBreaker], text: str) -> Iterator[int]:
    """Yield the ends of the segments that an ICU breaker finds."""
    return accumulate(map(len, breaker(replace_lone_surrogates(text), "en")))


# Ends of characters, sentences and words


def is_character_end(text: str, position: int) -> bool:
    """Return whether a cut at a position splits no character as a reader sees it. CR LF counts as two."""
    if not 0 < position < len(text) or _SEPARATE_PAIR.match(text, position - 1):
        return True
    start = max(0, position - _MAX_CODE_POINTS)
    start = max(start, text.rfind(" ", start, position))  # a space begins a character
    start = next((cut for cut in range(position - 1, start, -1) if _SEPARATE_PAIR.match(text, cut - 1)), start)
    while start and "\U0001f1e6" <= text[start] <= "\U0001f1ff":  # flags are pairs, counted from the first letter
        start -= 1
    return position - start in _iter_ends(CharacterBreaker, text[start : position + 1])


def find_last_character_end(text: str, end: int, start: int = 0) -> int | None:
    """Return the last position from `start` to `end` that splits no character; None if there is none."""
    return next((position for position in range(end, start - 1, -1) if is_character_end(text, position)), None)


def find_sentence_ends(text: str, start: int = 0, end: int | None = None) -> list[int]:
    """Return the ends of sentences and paragraphs after `start` and up to `end`, in order, with the space after them.

    An abbreviation such as "Dr." or "e.g." does not end a sentence, and neither does a single line break. A full stop
    after a longer word does, even before a lower-case letter. The end of the text is not included.
    """
    end = len(text) if end is None else end
    window_start = max(0, start - _CONTEXT_CHARACTERS)
    window = text[window_start : end + _CONTEXT_CHARACTERS]
    ends = {match.end() for match in _STOP_BEFORE_LOWER_CASE.finditer(window)}
    prepared = _GREEK_QUESTION.sub("?", window) if ";" in window else window
    for mark, replacement in _SENTENCE_REPLACEMENTS.items():
        prepared = prepared.replace(mark, replacement)
    for icu_end in _iter_ends(SentenceBreaker, prepared):
        tail = window[max(0, icu_end - 4) : icu_end]
        # ICU ends a sentence after the opening quotes of the next one.
        sentence_end = icu_end - len(tail) + len(tail.rstrip(_OPENING_QUOTES))
        if not _ABBREVIATION.search(window, max(0, sentence_end - 8), sentence_end):
            ends.add(sentence_end)
    positions = sorted({*(window_start + position for position in ends), *find_paragraph_ends(text, start, end)})
    return [position for position in positions if start < position <= end and position < len(text)]


def find_paragraph_ends(text: str, start: int, end: int) -> list[int]:
    """Return the ends of paragraphs after `start` and up to `end`, in order, with the blank lines after them."""
    return [match.end() for match in _PARAGRAPH_END.finditer(text, start, end)]


def find_word_ends(text: str, start: int, end: int) -> list[int]:
    """Return the ends of words after `start` and up to `end`; in scripts without spaces, by a dictionary."""
    window_start = max(0, start - _CONTEXT_CHARACTERS)
    window = text[window_start : end + _CONTEXT_CHARACTERS]
    ends = (window_start + position for position in _iter_ends(WordBreaker, window))
    return [position for position in ends if start < position <= end]


def is_unspaced(text: str) -> bool:
    """Return whether a text begins in a script without spaces between words."""
    return not text.isascii() and _UNSPACED_CHARACTER.match(text) is not None


# Words


def find_words(text: str) -> list[tuple[int, int]]:
    """Return the start and end of each word."""
    return [match.span() for match in (_ASCII_WORD if text.isascii() else WORD).finditer(text)]


def normalise_text(text: str) -> str:
    """Return a text composed, in lower case, with ASCII digits and without invisible characters. Accents stay."""
    if text.isascii():
        return text.lower()
    text = unicodedata.normalize("NFC", _INVISIBLE_CHARACTER.sub("", text).casefold())
    return "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)


def ends_with_particle(word: str, start: int) -> bool:
    """Return whether the end of a Korean word, from `start` on, is a particle."""
    return (match := _KOREAN_PARTICLE.search(word)) is not None and match.start() == start


@lru_cache(maxsize=1 << 16)
def fold_word(word: str) -> str:
    """Return the form of a word for comparisons (see the module), and of a Korean word without its particle."""
    if word.isascii():
        return (word if word.isalnum() else _WORD_JOINERS.sub("", word)).lower()
    folded = unicodedata.normalize("NFKD", _WORD_JOINERS.sub("", word)).casefold().replace("ı", "i")
    folded = unicodedata.normalize("NFKC", _OPTIONAL_MARKS.sub("", folded))
    return _KOREAN_PARTICLE.sub("", normalise_text(folded))


def fold_words(text: str) -> list[str]:
    """Return the words of a text, folded."""
    return [fold_word(text[start:end]) for start, end in find_words(text)]


def list_terms(text: str) -> Iterator[str]:
    """Yield the search terms of a text: folded words; in scripts without spaces, characters and pairs of characters."""
    for run in _iter_runs(text):
        folded_words = [fold_word(word) for word in run]
        yield from folded_words
        yield from _make_pairs(folded_words)


def find_character_pairs(text: str) -> frozenset[str]:
    """Return the pairs of characters in the search terms of a text in a script without spaces."""
    return frozenset(term for term in list_terms(text) if len(term) > 1 and is_unspaced(term))


def _make_pairs(run: Sequence[str]) -> list[str]:
    """Return the adjacent pairs of a run, each as one text."""
    return [first + second for first, second in pairwise(run)]


def _iter_runs(text: str) -> Iterator[list[str]]:
    """Yield runs of words: single words, or in scripts without spaces, adjacent words, across line breaks."""
    run: list[str] = []
    previous_end = 0
    for start, end in find_words(text):
        is_adjacent = is_unspaced(text[start]) and text[previous_end:start] in {"", "\n", "\r\n"}
        if run and not (is_adjacent and is_unspaced(run[0])):
            yield run
            run = []
        run.append(text[start:end])
        previous_end = end
    if run:
        yield run


def find_invented_word(text: str, sources: Iterable[str]) -> str | None:
    """Return the first word or number of a text, folded, that is in none of its sources; None if there is none.

    A source may have the parts of a word, such as `4711 kg` for `4711kg`, or `1, 234` for `1,234`. In scripts without
    spaces, each character must be in a source, and of two adjacent characters, at least one must have the same
    neighbour in a source. Hiragana, in which Japanese endings are written, is not checked.
    """
    vocabulary: set[str] = set()
    for source in sources:
        for run in _iter_runs(source):
            folded_words = [fold_word(word) for word in run]
            parts = (_split_parts(word) for word in run if not word.isalpha())
            vocabulary.update(folded_words, _make_pairs(folded_words), *parts)
    for run in _iter_runs(text):
        if is_unspaced(run[0]):
            invented_word = _find_invented_characters(run, vocabulary)
        else:
            word_parts = [] if fold_word(run[0]) in vocabulary else _split_parts(run[0])
            invented_word = next((part for part in word_parts if part not in vocabulary), None)
        if invented_word is not None:
            return invented_word
    return None


def _split_parts(word: str) -> list[str]:
    """Return the numbers and words in a word, folded."""
    return [fold_word(part) for part in _WORD_PARTS.findall(word)]


def _find_invented_characters(run: Sequence[str], vocabulary: set[str]) -> str | None:
    """Return the first characters of a run, in a script without spaces, that no source has in this combination."""
    characters = [fold_word(word) for word in run]
    known_pairs = [pair in vocabulary for pair in _make_pairs(characters)]
    previous_unpaired = ""
    for character, is_pair_before, is_pair_after in zip(
        characters, [False, *known_pairs], [*known_pairs, False], strict=True
    ):
        if _HIRAGANA.match(character) or is_pair_before or is_pair_after:
            previous_unpaired = ""
        elif character not in vocabulary or previous_unpaired:
            return previous_unpaired + character
        else:
            previous_unpaired = character
    return None
