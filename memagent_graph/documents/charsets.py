"""Charsets: looks up labels as browsers do, and detects the charset of a text from its letters.

On the web `iso-8859-1` means cp1252, and `shift_jis` includes the letters that Windows added. The labels come from the
WHATWG's Encoding Standard in the package webencodings, which also gives a Python codec. If that codec lacks characters
of the standard, another codec is used here.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

import webencodings

_WIDER: Final = {
    "shift_jis": "cp932", "euc-kr": "cp949", "gbk": "gb18030", "big5": "big5hkscs", "iso-2022-jp": "iso2022_jp_2",
    "euc-jp": "euc_jis_2004",
}  # fmt: skip
"""By name of a web encoding: a Python codec with all its characters."""
_OTHER_LABELS: Final = {
    "x-gb2312": "gb18030", "hz-gb-2312": "hz", "iso-2022-kr": "iso2022_kr", "x-iso-2022-jp": "iso2022_jp_2",
    "cp1252": "cp1252",
}  # fmt: skip
_SEVEN_BIT_MARKS: Final = (
    (re.compile(rb"\x1b\$[@B]|\x1b\$\(D|\x1b\([JI]"), ("iso2022_jp_2", "iso2022_jp_ext")),
    (re.compile(rb"\x1b\$\)C"), ("iso2022_kr",)),
    (re.compile(rb"~\{(?:[\x21-\x77][\x21-\x7e])+~\}"), ("hz",)),
)
_BYTE_ORDER_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
AS_C1: Final = "memagent.c1"
"""The name of the error handler for bytes that cp1252 does not define."""


def _as_c1(error: UnicodeError) -> tuple[str, int]:
    """Decode the five bytes that cp1252 does not define as browsers do: as control characters."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "".join(map(chr, error.object[error.start : error.end])), error.end


codecs.register_error(AS_C1, _as_c1)


def find_byte_order_mark(sample: bytes) -> tuple[str, int] | None:
    """Return the charset of a byte order mark, and the length of the mark in bytes."""
    return next(((charset, len(mark)) for mark, charset in _BYTE_ORDER_MARKS if sample.startswith(mark)), None)


def find_web_codec(label: str) -> str | None:
    """Return the codec for a label, as browsers read it; None for an unknown label."""
    label = label.strip().lower()
    if codec := _OTHER_LABELS.get(label):
        return codec
    encoding = webencodings.lookup(label)
    if encoding is None or encoding.name in {"x-user-defined", "replacement"}:
        return None
    return _WIDER.get(encoding.name, str(encoding.codec_info.name))


def detect_seven_bit_codec(sample: bytes) -> str | None:
    """Return the codec of East Asian text in 7-bit bytes: ISO-2022-JP, ISO-2022-KR or HZ."""
    for mark, names in _SEVEN_BIT_MARKS:
        if mark.search(sample):
            for name in names:
                try:
                    text = codecs.getincrementaldecoder(name)().decode(sample)
                except UnicodeDecodeError:
                    continue
                if any(character > "\u2e80" for character in text):
                    return name
    return None


def decode_web_text(data: bytes, label: str | None) -> str:
    """Decode bytes as a browser or mail reader does: by byte order mark, label, as UTF-8, or else as cp1252."""
    if (mark := find_byte_order_mark(data)) is not None:
        return data[mark[1] :].decode(mark[0], "replace")
    names = [find_web_codec(label) if label else None, detect_seven_bit_codec(data), "utf-8"]
    for name in filter(None, names):
        try:
            return data.decode(name)
        except UnicodeDecodeError:
            continue
    return data.decode(next(filter(None, names[:1]), "cp1252"), "replace")


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
"""Signs of cp1252. If a text has no other bytes beyond ASCII, it has no letters of another charset."""
_HIGH_WORD: Final = re.compile(rb"(?<![A-Za-z\x80-\xff])[\x80-\xff]{2,}(?![A-Za-z\x80-\xff])")
_FINAL: Final = frozenset("ךםןףץ".encode("cp1255"))
_MIN_LETTERS: Final = 6
_NEARLY_ALL: Final = 0.95
_MAX_ACCENTED_SHARE: Final = 0.35
"""No language of these charsets has accents on more of its letters."""


def detect_latin_charset(sample: bytes) -> str | None:
    """Return the charset in which nearly all accented letters belong to one language; None if there is no such charset.

    The same byte is è in cp1252 and č in cp1250, and both are valid text. But a language has few accented letters, and
    nearly all of the accented letters in a text belong to one language. French has è, é and à, while no language has
    the č, é and ŕ that cp1250 shows for the same bytes. If several charsets fit, the most common one is returned.

    Args:
        sample: bytes that are not UTF-8.
    """
    if all(byte < 0x80 or byte in _SIGNS for byte in sample):
        return "cp1252"
    fractions = {charset: _language_fraction(sample, charset, texts) for charset, texts in _ALPHABETS.items()}
    best = max(fractions, key=lambda charset: fractions[charset])  # the first of equal ones
    return best if fractions[best] >= _NEARLY_ALL else None


def is_hebrew(sample: bytes) -> bool:
    """Return whether all non-ASCII letters are Hebrew in cp1255, with the five final forms only at the ends of words.

    In Cyrillic and Greek charsets, letters with the same bytes occur anywhere in a word.
    """
    words = _HIGH_WORD.findall(sample)
    return (
        _MIN_LETTERS <= sum(map(len, words)) >= 0.9 * sum(byte >= 0x80 for byte in sample)
        and all(0xE0 <= byte <= 0xFA for word in words for byte in word)
        and any(word[-1] in _FINAL for word in words)
        and not any(byte in _FINAL for word in words for byte in word[:-1])
    )


def _language_fraction(sample: bytes, charset: str, alphabets: tuple[str, ...]) -> float:
    """Return the largest fraction of the accented letters that belong to one language."""
    try:
        text = sample.decode(charset)
    except UnicodeDecodeError:
        return 0.0
    # Letters of other charsets look like ¹ and ³ in this charset.
    accented = [letter for letter in text.lower() if letter > "\x7f" and (letter.isalpha() or letter in "¹³")]
    letters = sum(letter.isalpha() for letter in text)
    if not accented or len(accented) > _MAX_ACCENTED_SHARE * letters:
        return 0.0
    return max(sum(letter in alphabet for letter in accented) for alphabet in alphabets) / len(accented)
