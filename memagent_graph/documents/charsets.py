"""Charsets as the web names and reads them: `iso-8859-1` means cp1252, `shift_jis` has the letters that Windows added.

The labels are those of the WHATWG's Encoding Standard, from the package webencodings, which also says which of Python's
codecs is meant. Where that codec has fewer characters than the standard's, another one is named here.
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
"""Python's codec with all characters that the web's encoding of this name has."""
_OUR_OWN: Final = {
    "x-gb2312": "gb18030", "hz-gb-2312": "hz", "iso-2022-kr": "iso2022_kr", "x-iso-2022-jp": "iso2022_jp_2",
    "cp1252": "cp1252",
}  # fmt: skip
_SEVEN_BITS: Final = (
    (re.compile(rb"\x1b\$[@B]|\x1b\$\(D|\x1b\([JI]"), ("iso2022_jp_2", "iso2022_jp_ext")),
    (re.compile(rb"\x1b\$\)C"), ("iso2022_kr",)),
    (re.compile(rb"~\{(?:[\x21-\x77][\x21-\x7e])+~\}"), ("hz",)),
)
_BYTE_ORDER_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
AS_C1: Final = "memagent.c1"
"""How to treat errors of cp1252."""


def _as_c1(error: UnicodeError) -> tuple[str, int]:
    """Read the five bytes that cp1252 leaves open as the web does: as control characters."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "".join(map(chr, error.object[error.start : error.end])), error.end


codecs.register_error(AS_C1, _as_c1)


def byte_order_mark(sample: bytes) -> tuple[str, int] | None:
    """Return the charset of a byte order mark, and the mark's length in bytes."""
    return next(((charset, len(mark)) for mark, charset in _BYTE_ORDER_MARKS if sample.startswith(mark)), None)


def web_codec(label: str) -> str | None:
    """Return the codec that the web means by a label; None for a label that it does not know."""
    label = label.strip().lower()
    if own := _OUR_OWN.get(label):
        return own
    encoding = webencodings.lookup(label)
    if encoding is None or encoding.name in {"x-user-defined", "replacement"}:
        return None
    return _WIDER.get(encoding.name, str(encoding.codec_info.name))


def seven_bit_codec(sample: bytes) -> str | None:
    """Return the codec of East Asian text that consists of ASCII's bytes: ISO-2022-JP, ISO-2022-KR, HZ."""
    for mark, names in _SEVEN_BITS:
        if mark.search(sample):
            for name in names:
                try:
                    text = codecs.getincrementaldecoder(name)().decode(sample)
                except UnicodeDecodeError:
                    continue
                if any(character > "\u2e80" for character in text):
                    return name
    return None


def web_text(data: bytes, label: str | None) -> str:
    """Return bytes as text as a browser or mail reader would: by their mark, their label, UTF-8, or else as cp1252."""
    if (mark := byte_order_mark(data)) is not None:
        return data[mark[1] :].decode(mark[0], "replace")
    names = [web_codec(label) if label else None, seven_bit_codec(data), "utf-8"]
    for name in filter(None, names):
        try:
            return data.decode(name)
        except UnicodeDecodeError:
            continue
    return data.decode(next(filter(None, names[:1]), "cp1252"), "replace")
