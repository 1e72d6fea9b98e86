"""Western, Central European, Baltic or Turkish: which of four charsets a text's accented letters belong to.

In cp1252 and cp1250 the same byte is è or č, ñ or ń, and each reading is well formed. But a language has few accented
letters, and one language has nearly all of those in a text: French has è, é and à, while no language has the č, é and ŕ
that cp1250 shows in their places.
"""

from __future__ import annotations

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
_NEARLY_ALL: Final = 0.95
_MOST_ACCENTED: Final = 0.35
"""In no language of these charsets do more of the letters have accents."""


def latin_charset(sample: bytes) -> str | None:
    """Return the charset in which nearly all accented letters belong to one language; None if there is no such charset.

    If it is true of several, the more common one.

    Args:
        sample: bytes that are not UTF-8.
    """
    shares = {charset: _share(sample, charset, alphabets) for charset, alphabets in _ALPHABETS.items()}
    best = max(shares, key=lambda charset: shares[charset])  # the first of equal ones
    return best if shares[best] >= _NEARLY_ALL else None


def _share(sample: bytes, charset: str, alphabets: tuple[str, ...]) -> float:
    """Return the largest share of the accented letters that one language has."""
    try:
        text = sample.decode(charset)
    except UnicodeDecodeError:
        return 0.0
    accented = [letter for letter in text.lower() if letter > "\x7f" and _is_in_a_word(letter)]
    letters = sum(letter.isalpha() for letter in text)
    if not accented or len(accented) > _MOST_ACCENTED * letters:
        return 0.0
    return max(sum(letter in alphabet for letter in accented) for alphabet in alphabets) / len(accented)


def _is_in_a_word(character: str) -> bool:
    """Whether it is a letter, or what the other charset's letters look like in this one."""
    return character.isalpha() or character in "¹³"
