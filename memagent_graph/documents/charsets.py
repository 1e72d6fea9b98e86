"""Charsets: looks up labels as browsers do, and detects the charset of a text.

On the web `iso-8859-1` means cp1252, and `shift_jis` includes the letters that Windows added. The labels come from the
WHATWG's Encoding Standard, through the package webencodings, which also names a Python codec for each. If that codec
lacks characters of the standard, another codec is used here.
"""

from __future__ import annotations

import codecs
from typing import Final

import chardet
import webencodings

_WIDER_CODECS: Final = {
    "shift_jis": "cp932", "euc-kr": "cp949", "gbk": "gb18030", "big5": "big5hkscs", "iso-2022-jp": "iso2022_jp_2",
    "euc-jp": "euc_jis_2004",
}  # fmt: skip
"""Maps names of web encodings to Python codecs with all their characters."""
_CODECS_OF_OTHER_LABELS: Final = {
    "x-gb2312": "gb18030", "hz-gb-2312": "hz", "iso-2022-kr": "iso2022_kr", "x-iso-2022-jp": "iso2022_jp_2",
    "cp1252": "cp1252",
}  # fmt: skip
_MIN_CONFIDENCE: Final = 0.08
"""chardet has a confidence of at least 0.09 for texts, and less for random bytes."""
_CP1252_SIGNS: Final = frozenset("€‚„…‰‹‘’“”•–—™›\xa0¢£¥§©«®°±·»½¼¾×".encode("cp1252"))
"""Punctuation and symbols of cp1252. If a text has no other non-ASCII bytes, chardet has no letters to judge by."""
_SEVEN_BIT_CODECS: Final = frozenset({"iso2022_jp_2", "iso2022_kr", "hz"})
_BYTE_ORDER_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
C1_HANDLER: Final = "memagent.c1"
"""The name of the codec error handler for bytes that cp1252 does not define."""


def _decode_as_c1(error: UnicodeError) -> tuple[str, int]:
    """Decode the five bytes that cp1252 does not define as browsers do: as control characters."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "".join(map(chr, error.object[error.start : error.end])), error.end


codecs.register_error(C1_HANDLER, _decode_as_c1)


def find_byte_order_mark(sample: bytes) -> tuple[str, int] | None:
    """Return the charset of a byte order mark, and the length of the mark in bytes."""
    return next(((charset, len(mark)) for mark, charset in _BYTE_ORDER_MARKS if sample.startswith(mark)), None)


def find_web_codec(label: str) -> str | None:
    """Return the codec for a label, as browsers read it; None for an unknown label."""
    label = label.strip().lower()
    if codec := _CODECS_OF_OTHER_LABELS.get(label):
        return codec
    encoding = webencodings.lookup(label)
    if encoding is None or encoding.name in {"x-user-defined", "replacement"}:
        return None
    return _WIDER_CODECS.get(encoding.name, str(encoding.codec_info.name))


def detect_codec(sample: bytes) -> str | None:
    """Return the codec of bytes that are not UTF-8, from letter frequencies; None if the bytes are not text."""
    if not sample.isascii() and all(byte < 0x80 or byte in _CP1252_SIGNS for byte in sample):
        return "cp1252"
    guess = chardet.detect(sample)
    name = guess["encoding"] if guess["confidence"] >= _MIN_CONFIDENCE else None
    return name and (find_web_codec(name) or name)


def detect_seven_bit_codec(sample: bytes) -> str | None:
    """Return the codec of East Asian text in 7-bit bytes: ISO-2022-JP, ISO-2022-KR or HZ."""
    if b"\x1b" not in sample and b"~{" not in sample:
        return None
    return codec if (codec := detect_codec(sample)) in _SEVEN_BIT_CODECS else None


def decode_web_text(data: bytes, label: str | None) -> str:
    """Decode bytes as a browser or mail reader does: by byte order mark, by label, as UTF-8, or else as cp1252."""
    if (mark := find_byte_order_mark(data)) is not None:
        return data[mark[1] :].decode(mark[0], "replace")
    candidates = [find_web_codec(label) if label else None, detect_seven_bit_codec(data), "utf-8"]
    for codec in filter(None, candidates):
        try:
            return data.decode(codec)
        except UnicodeDecodeError:
            continue
    return data.decode(next(filter(None, candidates[:1]), "cp1252"), "replace")
