"""Characters, words and sentences of all scripts, and the form in which words of two texts are compared.

Sentences, dictionary words and characters (grapheme clusters: what a reader sees as one) end where Unicode's rules
(UAX 29) say, by ICU. Words are compared in folded form, in which all spellings of a word are equal: composed or
decomposed, with or without vowel points and accents, with digits of any script, with separators in numbers, with
invisible characters, or with a hyphen at the end of a line. In scripts without spaces between words, every character
is a word, and texts are compared by pairs of characters. Positions of words refer to the unchanged text.

Thai, Lao and Khmer texts mark few or no sentences. For them, only words and characters are known.
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

_HIDDEN: Final = r"\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060\ufeff\ufffe"
"""Invisible characters in words: soft hyphens (pdfium writes U+FFFE), zero-width characters, marks of direction."""
_UNSPACED: Final = (
    r"\p{Line_Break=SA}\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Yi}\u30fc\uff70\uff9e\uff9f\u3099-\u309c"
)
_NUMBER: Final = (
    r"(?<![\w.,])(?:\d{1,3}(?:,\d{2,3})*,\d{3}|\d{1,3}(?:\.\d{3}){2,}"
    "|\\d{1,3}(?:['’\u066c\xa0\u2009\u202f]\\d{3})+)(?!\\d|,\\d)"
)
"""A number with thousands separators. Two parts with a point are excluded, because they may be a decimal fraction."""
_LINE_HYPHEN: Final = r"-\r?\n[^\S\n]*"
_ASCII_WORD: Final = re.compile(rf"{_NUMBER}|\w+(?:{_LINE_HYPHEN}(?=[a-z])\w+)*", re.ASCII)
WORD: Final = regex.compile(
    rf"{_NUMBER}|[{_UNSPACED}][\p{{M}}{_HIDDEN}]*|\p{{No}}"
    rf"|[^\W\p{{No}}{_UNSPACED}](?:[^\W\p{{No}}{_UNSPACED}]|[\p{{M}}{_HIDDEN}]|{_LINE_HYPHEN}(?=\p{{Ll}}))*"
)
"""A word; in scripts without spaces between words, a character with its marks."""
_IS_UNSPACED: Final = regex.compile(f"[{_UNSPACED}]")
_JOINTS: Final = regex.compile(r"[^\w\p{M}\p{No}]+")
_PARTS: Final = regex.compile(r"\p{Nd}+|[\p{L}\p{M}]+|\p{No}")
_OPTIONAL: Final = re.compile("[\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06ed]")
"""Marks that texts may leave out: accents, Hebrew and Arabic vowel points, and the Arabic stretching character."""
_PARTICLE: Final = re.compile(
    "(?<=[0-9가-힣][가-힣])(?:은|는|이|가|을|를|의|에|에서|에게|에는|에서는|께|로|으로|와|과|도|만|까지|부터|처럼|보다"
    "|라고|이라고|이다|입니다|이며|이고|였다|이었다)$"
)
_HIDDEN_ANYWHERE: Final = re.compile(f"[{_HIDDEN}]")
_HIRAGANA: Final = re.compile("[\u3041-\u309f]")
_APART: Final = regex.compile(
    r"(?:[\x00-\u02ff\u3000-\u3029\uff01-\uff60]"
    r"|(?=[\u0370-\uff60])[^\P{L}\u0d4e\u0e33\u0eb3\u1100-\u11ff\ua960-\ua97f\ud7b0-\ud7ff]){2}"
)
"""Two code points that are never one character: letters, except letters that join others."""
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_PARAGRAPH_END: Final = re.compile(r"\n[^\S\n]*\n\s*")
_ABBREVIATION: Final = re.compile(r"(?:^|\W)[A-Z]\w{0,2}\.\s*$")
_STOP_BEFORE_LOWER_CASE: Final = regex.compile(
    r"\.(?<=(?:[\p{L}\p{M}]{4}|(?<![\d.])\d{3,40}|[)\]`'\"”’»])\.)[)\]`'\"”’»]*\s+(?=[^\w\s.]*\p{Ll})"
)
"""A full stop after a word that is too long for an abbreviation. Before a small letter, ICU assumes an abbreviation."""
_SENTENCE_MARKS: Final = {"\n": " ", "\r": " ", "…": ".", "\u0f0d": "。", "\u0f0e": "。"}
"""Lines wrap within sentences, and ICU does not count these marks as ends."""
_GREEK_QUESTION: Final = re.compile("(?<=[\u0370-\u03ff\u1f00-\u1fff]);")
_OPENING: Final = "「『（《〈【“‘"
_REACH: Final = 80
"""The number of characters around a position that decide whether a sentence or a word ends there."""
_MAX_CHARACTERS: Final = 1024
"""A character that a position may split begins within this number of characters before it."""


def replace_lone_surrogates(text: str) -> str:
    """Replace code points that UTF-8 cannot encode, one for one."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text)
    return text


def _ends(breaker: type[BaseBreaker], text: str) -> Iterator[int]:
    return accumulate(map(len, breaker(replace_lone_surrogates(text), "en")))


# Ends


def is_character_end(text: str, at: int) -> bool:
    """Return whether a cut before `text[at]` splits no character as a reader sees it. CR LF counts as two."""
    if not 0 < at < len(text) or _APART.match(text, at - 1):
        return True
    begin = max(0, at - _MAX_CHARACTERS)
    begin = max(begin, text.rfind(" ", begin, at))  # no character goes on after a space but with it
    begin = next((position for position in range(at - 1, begin, -1) if _APART.match(text, position - 1)), begin)
    while begin and "\U0001f1e6" <= text[begin] <= "\U0001f1ff":  # flags are pairs, counted from the first letter
        begin -= 1
    return at - begin in _ends(CharacterBreaker, text[begin : at + 1])


def find_last_character_end(text: str, at: int, start: int = 0) -> int | None:
    """Return the last position from `start` to `at` that splits no character; None if there is none."""
    return next((position for position in range(at, start - 1, -1) if is_character_end(text, position)), None)


def find_sentence_ends(text: str, start: int = 0, end: int | None = None) -> list[int]:
    """Return where sentences and paragraphs end after `start` and up to `end`, in order, with the space after them.

    An abbreviation such as "Dr." or "e.g." does not end a sentence, and neither does the end of a single line. A full
    stop after a longer word does, even before a small letter. The end of the text is not included.
    """
    end = len(text) if end is None else end
    begin = max(0, start - _REACH)
    window = text[begin : end + _REACH]
    ends = {match.end() for match in _STOP_BEFORE_LOWER_CASE.finditer(window)}
    marked = _GREEK_QUESTION.sub("?", window) if ";" in window else window
    for mark, same in _SENTENCE_MARKS.items():
        marked = marked.replace(mark, same)
    for position in _ends(SentenceBreaker, marked):
        near = window[max(0, position - 4) : position]
        at = position - len(near) + len(near.rstrip(_OPENING))  # ICU ends a sentence after these
        if start < begin + at <= end and not _ABBREVIATION.search(window, max(0, at - 8), at):
            ends.add(at)
    ends.update(match.end() - begin for match in _PARAGRAPH_END.finditer(text, start, end))
    positions = sorted(begin + position for position in ends)
    return [position for position in positions if start < position <= end and position < len(text)]


def find_paragraph_ends(text: str, start: int, end: int) -> list[int]:
    """Return where paragraphs end after `start` and up to `end`, in order, with the blank lines after them."""
    return [match.end() for match in _PARAGRAPH_END.finditer(text, start, end)]


def find_word_ends(text: str, start: int, end: int) -> list[int]:
    """Return where words end after `start` and up to `end`; by a dictionary in scripts without spaces."""
    begin = max(0, start - _REACH)
    ends = (begin + position for position in _ends(WordBreaker, text[begin : end + _REACH]))
    return [position for position in ends if start < position <= end]


def is_unspaced(text: str) -> bool:
    """Return whether a text begins in a script without spaces between words."""
    return not text.isascii() and _IS_UNSPACED.match(text) is not None


# Words


def find_words(text: str) -> list[tuple[int, int]]:
    """Return where words begin and end."""
    return [match.span() for match in (_ASCII_WORD if text.isascii() else WORD).finditer(text)]


def normalise_text(text: str) -> str:
    """Return a text in composed form and lower case, without invisible characters, with ASCII digits. Accents stay."""
    if text.isascii():
        return text.lower()
    text = unicodedata.normalize("NFC", _HIDDEN_ANYWHERE.sub("", text).casefold())
    return "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)


def ends_with_particle(word: str, at: int) -> bool:
    """Return whether the end of a Korean word, from a position on, is a particle."""
    return (match := _PARTICLE.search(word)) is not None and match.start() == at


@lru_cache(maxsize=1 << 16)
def fold_word(word: str) -> str:
    """Return the form in which a word is compared (see the module), without the particle of a Korean word."""
    if word.isascii():
        return (word if word.isalnum() else _JOINTS.sub("", word)).lower()
    folded = unicodedata.normalize("NFKD", _JOINTS.sub("", word)).casefold().replace("ı", "i")
    folded = unicodedata.normalize("NFKC", _OPTIONAL.sub("", folded))
    return _PARTICLE.sub("", normalise_text(folded))


def fold_words(text: str) -> list[str]:
    """Return a text's words, folded."""
    return [fold_word(text[start:end]) for start, end in find_words(text)]


def list_terms(text: str) -> Iterator[str]:
    """Yield the search terms of a text: folded words; in scripts without spaces, characters and pairs of characters."""
    for run in _iter_runs(text):
        folded = [fold_word(word) for word in run]
        yield from folded
        yield from _make_pairs(folded)


def _make_pairs(run: Sequence[str]) -> list[str]:
    return [first + second for first, second in pairwise(run)]


def _iter_runs(text: str) -> Iterator[list[str]]:
    """Yield words alone; in scripts without spaces, adjacent words together. A line break does not separate them."""
    run: list[str] = []
    reached = 0
    for start, end in find_words(text):
        continues = is_unspaced(text[start]) and text[reached:start] in {"", "\n", "\r\n"}
        if run and not (continues and is_unspaced(run[0])):
            yield run
            run = []
        run.append(text[start:end])
        reached = end
    if run:
        yield run


def find_invented_word(text: str, sources: Iterable[str]) -> str | None:
    """Return the first word or number of a text, folded, that is in none of its sources; None if there is none.

    The sources may have a word in parts, such as `4711 kg` for `4711kg`, or `1, 234` for `1,234`. In scripts without
    spaces, each character must be in a source, and of two neighbouring characters at least one must have the same
    neighbour in a source. Hiragana, in which Japanese endings are written, is not checked.
    """
    vocabulary: set[str] = set()
    for source in sources:
        for run in _iter_runs(source):
            folded = [fold_word(word) for word in run]
            vocabulary.update(folded, _make_pairs(folded), *(_split_parts(word) for word in run if not word.isalpha()))
    for run in _iter_runs(text):
        if is_unspaced(run[0]):
            invented = _find_invented(run, vocabulary)
        else:
            parts = [] if fold_word(run[0]) in vocabulary else _split_parts(run[0])
            invented = next((part for part in parts if part not in vocabulary), None)
        if invented is not None:
            return invented
    return None


def _split_parts(word: str) -> list[str]:
    """Return the numbers and words that a word is made of."""
    return [fold_word(part) for part in _PARTS.findall(word)]


def _find_invented(run: Sequence[str], vocabulary: set[str]) -> str | None:
    """Return the first characters of a run, in a script without spaces, that no source has in this combination."""
    folded = [fold_word(word) for word in run]
    known_pairs = [pair in vocabulary for pair in _make_pairs(folded)]
    unconfirmed = ""
    for character, before, after in zip(folded, [False, *known_pairs], [*known_pairs, False], strict=True):
        if _HIRAGANA.match(character) or before or after:
            unconfirmed = ""
        elif character not in vocabulary or unconfirmed:
            return unconfirmed + character
        else:
            unconfirmed = character
    return None
