"""Western, Central European, Baltic or Turkish: which of four charsets a text's accented letters belong to.

In cp1252 and cp1250 the same byte is è or č, ñ or ń, and each reading is well formed. But a language has few accented
letters, and one language has nearly all of those in a text: French has è, é and à, while no language has the č, é and ŕ
that cp1250 shows in their places.
"""

from __future__ import annotations

import re
from typing import Final

_ALPHABETS: Final = {
    "cp1252": (
        "àâæçéèêëîïôœùûüÿ",  # French
        "äöüßéà",  # German
        "áéíñóúü",  # Spanish
        "áâãàçéêíóôõúü",  # Portuguese
        "àèéìíîòóùú",  # Italian
        "àçéèíïóòúü",  # Catalan
        "äåöéüà",  # Swedish, Finnish
        "æøåéèêóòôü",  # Danish, Norwegian
        "áéëèêïíóöúü",  # Dutch
        "áðéíóúýþæö",  # Icelandic
        "áéíóúàèìòù",  # Irish, Scottish Gaelic
        "äõöüšž",  # Estonian
        "àçèéêïñöûü",  # English, with words from its neighbours
    ),
    "cp1250": (
        "ąćęłńóśźż",  # Polish
        "áčďéěíňóřšťúůýž",  # Czech
        "áäčďéíĺľňóôŕšťúýž",  # Slovak
        "áéíóöőúüű",  # Hungarian
        "čćđšž",  # Croatian, Slovene
        "ăâîşţ",  # Romanian
    ),
    "cp1257": (
        "ąčęėįšųūž",  # Lithuanian
        "āčēģīķļņšūž",  # Latvian
        "äõöüšž",  # Estonian
    ),
    "cp1254": ("çğıöşüâîû",),  # Turkish
}
_SIGNS: Final = frozenset("€‚„…‰‹‘’“”•–—™›\xa0¢£¥§©«®°±·»½¼¾×".encode("cp1252"))
"""Signs of cp1252. A text whose only bytes beyond ASCII are these has no letters of another charset."""
_HIGH_WORD: Final = re.compile(rb"(?<![A-Za-z\x80-\xff])[\x80-\xff]{2,}(?![A-Za-z\x80-\xff])")
_FINAL: Final = frozenset("ךםןףץ".encode("cp1255"))
_FEWEST_LETTERS: Final = 6
_NEARLY_ALL: Final = 0.95
_MOST_ACCENTED: Final = 0.35
"""In no language of these charsets do more of the letters have accents."""


def latin_charset(sample: bytes) -> str | None:
    """Return the charset in which nearly all accented letters belong to one language; None if there is no such charset.

    If it is true of several, the more common one.

    Args:
        sample: bytes that are not UTF-8.
    """
    if all(byte < 0x80 or byte in _SIGNS for byte in sample):
        return "cp1252"
    shares = {charset: _share(sample, charset, alphabets) for charset, alphabets in _ALPHABETS.items()}
    best = max(shares, key=lambda charset: shares[charset])  # the first of equal ones
    return best if shares[best] >= _NEARLY_ALL else None


def is_hebrew(sample: bytes) -> bool:
    """Whether all letters beyond ASCII are Hebrew's in cp1255, with the five final forms only at the ends of words.

    In Cyrillic and Greek charsets these bytes are letters that stand anywhere.
    """
    words = _HIGH_WORD.findall(sample)
    return (
        _FEWEST_LETTERS <= sum(map(len, words)) >= 0.9 * sum(byte >= 0x80 for byte in sample)
        and all(0xE0 <= byte <= 0xFA for word in words for byte in word)
        and any(word[-1] in _FINAL for word in words)
        and not any(byte in _FINAL for word in words for byte in word[:-1])
    )


def _share(sample: bytes, charset: str, alphabets: tuple[str, ...]) -> float:
    """Return the largest share of the accented letters that one language has."""
    try:
        text = sample.decode(charset)
    except UnicodeDecodeError:
        return 0.0
    # ¹ and ³ are what other charsets' letters look like in this one.
    accented = [letter for letter in text.lower() if letter > "\x7f" and (letter.isalpha() or letter in "¹³")]
    letters = sum(letter.isalpha() for letter in text)
    if not accented or len(accented) > _MOST_ACCENTED * letters:
        return 0.0
    return max(sum(letter in alphabet for letter in accented) for alphabet in alphabets) / len(accented)
