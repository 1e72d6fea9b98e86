"""Decodes bytes: looks up charsets as browsers do, detects the charset of a text, and refuses binary data.

On the web `iso-8859-1` means cp1252, and `shift_jis` includes the letters that Windows added. The labels come from the
WHATWG's Encoding Standard, through the package webencodings, which also names a Python codec for each. If that codec
lacks characters of the standard, another codec is used here.
"""

from __future__ import annotations

import codecs
import itertools
import logging
import re
from collections.abc import Iterator
from functools import partial
from typing import IO, Any, Final

import chardet
import webencodings

from memagent_graph.errors import DocumentError, EncodingError, UnsupportedDocumentError

_WIDER_CODECS: Final = {
    "shift_jis": "cp932", "euc-kr": "cp949", "gbk": "gb18030", "big5": "big5hkscs", "iso-2022-jp": "iso2022_jp_2",
    "euc-jp": "euc_jis_2004",
}  # fmt: skip
"""Maps names of web encodings to Python codecs with all their characters."""
_CODECS_OF_OTHER_LABELS: Final = {
    "x-gb2312": "gb18030", "hz-gb-2312": "hz", "iso-2022-kr": "iso2022_kr", "x-iso-2022-jp": "iso2022_jp_2",
}  # fmt: skip
_MIN_CONFIDENCE: Final = 0.08
"""chardet has a confidence of at least 0.09 for texts, and less for random bytes."""
_MIN_WEB_CONFIDENCE: Final = 0.3
"""The same for mail and pages, which are mostly in cp1252: chardet has less for Italian and Norwegian in it."""
_CP1252_SIGNS: Final = frozenset("€‚„…‰‹‘’“”•–—™›\xa0¢£¥§©«®°±·»½¼¾×".encode("cp1252"))
"""Punctuation and symbols of cp1252. If a text has no other non-ASCII bytes, chardet has no letters to judge by."""
_SEVEN_BIT_CODECS: Final = frozenset({"iso2022_jp_2", "iso2022_kr", "hz"})
_BYTE_ORDER_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32-le"), (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"),
)  # fmt: skip
_DECLARED_CHARSET: Final = re.compile(
    rb"(?:^\s*<\?xml[^>]{0,100}?encoding|<meta[^>]{0,200}?charset)\s*=\s*[\"']?\s*([a-zA-Z0-9_:.-]+)", re.IGNORECASE
)
_C1_HANDLER: Final = "memagent.c1"
"""The name of the codec error handler for bytes that cp1252 does not define."""
READ_BYTES = 1 << 20
SAMPLE_BYTES = 65_536
_MIN_NON_ASCII_BYTES = 8
"""The minimum number of non-ASCII bytes from which a charset is detected."""
_BINARY_KINDS = {
    "an image": (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8"),
    "a program": (b"\x7fELF", b"MZ\x90"),
    "a zip archive": (b"PK\x03\x04",),
    "an archive": (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a", b"\x28\xb5\x2f\xfd"),
    "an old Microsoft Office file, or one with a password": (b"\xd0\xcf\x11\xe0",),
    "a table or database": (b"SQLite format 3\x00", b"PAR1", b"\x93NUMPY"),
    "a recording, film or image": (b"OggS", b"ID3", b"RIFF"),
}
_NON_CHARSET_CODECS = {"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"}
_TEXT_CONTROLS = frozenset(b"\t\n\r\x0b\x0c\x1b\x08")

log = logging.getLogger(__name__)


def _decode_as_c1(error: UnicodeError) -> tuple[str, int]:
    """Decode the five bytes that cp1252 does not define as browsers do: as control characters."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "".join(map(chr, error.object[error.start : error.end])), error.end


codecs.register_error(_C1_HANDLER, _decode_as_c1)


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


def find_declared_charset(page: bytes) -> str | None:
    """Return the charset that an HTML page declares in itself, if it has no byte order mark."""
    declaration = None if find_byte_order_mark(page) else _DECLARED_CHARSET.search(page[:4096])
    label = declaration[1].decode("ascii") if declaration else ""
    # As browsers do, ignore charsets that only Python knows, and UTF-16, because the declaration itself is ASCII.
    return None if (find_web_codec(label) or "utf-16").startswith("utf-16") else label


def _detect_codec(sample: bytes, min_confidence: float = _MIN_CONFIDENCE) -> str | None:
    """Return the codec of bytes that are not UTF-8, from letter frequencies; None if the bytes are not text."""
    if not sample.isascii() and all(byte < 0x80 or byte in _CP1252_SIGNS for byte in sample):
        return "cp1252"
    guess = chardet.detect(sample)
    name = guess["encoding"] if guess["confidence"] >= min_confidence else None
    return name and (find_web_codec(name) or name)


def _detect_seven_bit_codec(sample: bytes) -> str | None:
    """Return the codec of East Asian text in 7-bit bytes: ISO-2022-JP, ISO-2022-KR or HZ."""
    if b"\x1b" not in sample and b"~{" not in sample:
        return None
    return codec if (codec := _detect_codec(sample)) in _SEVEN_BIT_CODECS else None


def decode_web_text(data: bytes, label: str | None) -> str:
    """Decode bytes as mail readers do: by byte order mark, by label, as UTF-8, by their letters, or else as cp1252."""
    if (mark := find_byte_order_mark(data)) is not None:
        return data[mark[1] :].decode(mark[0], "replace")
    candidates = [find_web_codec(label) if label else None, _detect_seven_bit_codec(data), "utf-8"]
    for codec in filter(None, candidates):
        try:
            return data.decode(codec)
        except UnicodeDecodeError as error:
            sample = data[max(0, error.start - SAMPLE_BYTES // 2) :][:SAMPLE_BYTES]
    return data.decode(candidates[0] or detect_charset(sample, _MIN_WEB_CONFIDENCE) or "cp1252", "replace")


def decode_web_page(data: bytes, label: str | None = None) -> str:
    """Decode an HTML page as a browser does: by the label that came with it, or else by its own declaration."""
    return decode_web_text(data, label or find_declared_charset(data))


def detect_binary_kind(sample: bytes) -> str | None:
    """Return the kind of a binary file, from its first bytes; None if it may be text."""
    for kind, signatures in _BINARY_KINDS.items():
        if sample.startswith(signatures) and (b"\x00" in sample or not _is_utf8(sample)):
            return kind
    if find_byte_order_mark(sample) is not None:
        return None
    controls = sum(sample.count(byte) for byte in range(32) if byte not in _TEXT_CONTROLS)
    is_binary = controls > 0.1 * len(sample) or (b"\x00" in sample and not _is_utf8(sample))
    return "a binary file" if is_binary else None


def _is_utf8(sample: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError:
        return False
    return True


def find_codec(name: str) -> str:
    """Return the Python codec that browsers use for a charset's name. Raises EncodingError for an unknown name."""
    if (codec := find_web_codec(name)) is not None and not codec.startswith("utf-16"):
        return codec
    try:
        if not (codec_info := codecs.lookup(name))._is_text_encoding or codec_info.name in _NON_CHARSET_CODECS:
            raise LookupError(name)
    except LookupError as error:
        raise EncodingError(
            f"there is no charset {name!r}", hint="Use a name such as utf-8, cp1252, latin-1, shift_jis."
        ) from error
    return name


def detect_charset(sample: bytes, min_confidence: float = _MIN_CONFIDENCE) -> str | None:
    """Return the most likely charset of bytes that are not UTF-8; None if they do not show it.

    A few non-ASCII bytes are not enough. Text that is mostly UTF-8 counts as damaged UTF-8, because with any other
    charset most of it would be wrong.
    """
    text = sample.decode("utf-8", "replace")
    error_count = text.count("\ufffd")
    is_damaged_utf8 = sum(character > "\x7f" for character in text) > 2 * error_count
    has_few = sum(byte > 0x7F for byte in sample) < _MIN_NON_ASCII_BYTES
    return None if has_few or is_damaged_utf8 else _detect_codec(sample, min_confidence)


def _make_decoding_error(name: str, charset: str, offset: int) -> EncodingError:
    """Return the error, with a remedy, for a byte that cannot be decoded with `charset`."""
    return EncodingError(
        f"{name} is not {charset} text: the byte at offset {offset} cannot be decoded",
        hint="Pass its charset with --encoding (for example cp1252), or use --replace-undecodable.",
    )


def _detect_utf16_without_mark(sample: bytes) -> str | None:
    """Return the byte order (a charset) in which a sample with many zero bytes is readable UTF-16, or None."""
    if sample.count(b"\x00") * 5 < len(sample):
        return None
    # The zero byte of an ASCII character comes first in big-endian order, second in little-endian order.
    charset = "utf-16-be" if sample[::2].count(b"\x00") > sample[1::2].count(b"\x00") else "utf-16-le"
    text = sample[: len(sample) // 2 * 2].decode(charset, "replace")
    return charset if sum(char.isprintable() or char.isspace() for char in text) > 0.95 * len(text) else None


def read_pieces(name: str, source: Any) -> Iterator[Any]:
    """Yield the pieces of an open file or an iterator. They must be all text or all bytes."""
    allowed_type: Any = str | bytes
    is_file = hasattr(source, "read")
    try:
        for piece in itertools.takewhile(bool, iter(partial(source.read, READ_BYTES), None)) if is_file else source:
            if not isinstance(piece, allowed_type):
                raise DocumentError(
                    f"the stream {name} gave a {type(piece).__name__}, not text or bytes",
                    hint="Pass an iterator of only str or only bytes; LangChain Documents go in a list.",
                )
            allowed_type = str if isinstance(piece, str) else bytes
            yield piece
    except DocumentError:
        raise
    except Exception as error:  # the caller's source may raise anything
        raise DocumentError(
            f"{name} cannot be read to its end: {error}",
            hint="Read it again from its beginning, or pass a file that you may read, in binary mode.",
        ) from error


def decode_pieces(name: str, file: IO[bytes], encoding: str | None, *, replace: bool) -> Iterator[str]:
    """Decode a file from its beginning, with one piece at a time in memory.

    The charset comes from the byte order mark, else from `encoding`, else it is UTF-8. If a byte is not UTF-8, the
    charset is detected from the text around that byte, a warning is logged, and reading starts again.

    Args:
        name: the document's name, for messages.
        file: a file that is read twice.
        encoding: the declared charset.
        replace: whether to put U+FFFD in place of bytes that cannot be decoded.

    Raises:
        EncodingError: bytes cannot be decoded. The message has the offset and the charset.
        UnsupportedDocumentError: the source is not text.
    """
    file.seek(0)
    sample = file.read(SAMPLE_BYTES)
    byte_order_mark = find_byte_order_mark(sample)
    label = encoding or ("utf-8" if byte_order_mark else _scan_for_charset(name, file, sample, replace=replace))
    charset, offset = byte_order_mark or (find_codec(label), 0)
    if byte_order_mark is None and (kind := codecs.lookup(charset).name) in {"utf-16", "utf-32"}:
        raise EncodingError(
            f"{name} has no byte order mark, which {kind} needs", hint=f"Pass --encoding {kind}-le or {kind}-be."
        )
    uses_c1 = charset == "cp1252" and label.lower() not in {"cp1252", "windows-1252"}
    decoder = codecs.getincrementaldecoder(charset)("replace" if replace else _C1_HANDLER if uses_c1 else "strict")
    file.seek(offset)
    for piece in itertools.chain(read_pieces(name, file), [b""]):
        pending_bytes = len(decoder.getstate()[0])
        try:
            text = decoder.decode(piece, not piece)
        except UnicodeDecodeError as error:
            raise _make_decoding_error(name, charset, offset - pending_bytes + error.start) from None
        offset += len(piece)
        if text:
            yield text


def _scan_for_charset(name: str, file: IO[bytes], sample: bytes, *, replace: bool) -> str:
    """Return the charset of a source without a byte order mark. Reads up to the first byte that is not UTF-8."""
    seven_bit_codec = _detect_seven_bit_codec(sample)
    if seven_bit_codec is None:
        _refuse_binary(name, sample)
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    file.seek(0)
    for piece in itertools.chain(read_pieces(name, file), [b""]):
        pending_bytes = len(decoder.getstate()[0])
        try:
            decoder.decode(piece, not piece)
        except UnicodeDecodeError as error:
            error_offset = offset - pending_bytes + error.start
            file.seek(max(0, error_offset - SAMPLE_BYTES // 2))
            charset = detect_charset(file.read(SAMPLE_BYTES))
            if charset is not None:
                log.warning(
                    "%s is not UTF-8 (see the byte at offset %d); reading it as %s", name, error_offset, charset
                )
                return charset
            if replace:
                return "utf-8"
            raise _make_decoding_error(name, "utf-8", error_offset) from None
        if seven_bit_codec is None:
            seven_bit_codec = _detect_seven_bit_codec(piece)
        offset += len(piece)
    if seven_bit_codec is not None:
        log.warning("%s has escape sequences of %s; reading it with this charset", name, seven_bit_codec)
    return seven_bit_codec or "utf-8"


def _refuse_binary(name: str, sample: bytes) -> None:
    """Raise UnsupportedDocumentError for binary data, EncodingError for UTF-16 without a byte order mark."""
    kind = detect_binary_kind(sample)
    if kind is not None and (charset := _detect_utf16_without_mark(sample)) is not None:
        raise EncodingError(
            f"{name} looks like {charset} without a byte order mark", hint=f"Pass --encoding {charset}."
        )
    if kind is not None:
        raise UnsupportedDocumentError(
            f"{name} is not text: it looks like {kind}",
            hint="Unpack it (`memagent corpus FOLDER -q QUESTION --out TABLE` reads a folder), or save it as PDF."
            if "archive" in kind
            else "Convert it to text, or to a kind of file that has a converter (the extra `files` has PDF, HTML, "
            "Office files, e-mail and others).",
        )
