"""Decodes bytes piece by piece: finds their charset, and refuses what is not text."""

from __future__ import annotations

import codecs
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Literal

from memagent_graph.documents.charsets import (
    AS_C1,
    detect_codec,
    detect_seven_bit_codec,
    find_byte_order_mark,
    find_web_codec,
)
from memagent_graph.errors import EncodingError, UnsupportedDocumentError

Errors = Literal["strict", "replace"]

SAMPLE_BYTES = 65_536
_TELLING_BYTES = 8
_BINARY_KINDS = {
    "an image": (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8"),
    "a program": (b"\x7fELF", b"MZ\x90"),
    "a zip archive": (b"PK\x03\x04",),
    "an archive": (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a", b"\x28\xb5\x2f\xfd"),
    "an old Microsoft Office file, or one with a password": (b"\xd0\xcf\x11\xe0",),
    "a table or database": (b"SQLite format 3\x00", b"PAR1", b"\x93NUMPY"),
    "a recording or film": (b"OggS", b"ID3", b"RIFF"),
}
_ESCAPES = {"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"}
_TEXT_CONTROLS = frozenset(b"\t\n\r\x0b\x0c\x1b\x08")

log = logging.getLogger(__name__)


def detect_binary_kind(sample: bytes) -> str | None:
    """Return the kind of a binary file, from its first bytes; None if it may be text."""
    for kind, marks in _BINARY_KINDS.items():
        if sample.startswith(marks) and (b"\x00" in sample or not _is_utf8(sample)):
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


def find_charset(name: str) -> str:
    """Return the Python codec for the name of a charset, as browsers do. Raises EncodingError if unknown."""
    if (codec := find_web_codec(name)) is not None and not codec.startswith("utf-16"):
        return codec
    try:
        if not (codec_info := codecs.lookup(name))._is_text_encoding or codec_info.name in _ESCAPES:
            raise LookupError(name)
    except LookupError as error:
        raise EncodingError(
            f"there is no charset {name!r}", hint="Use a name such as utf-8, cp1252, latin-1, shift_jis."
        ) from error
    return name


def detect_charset(sample: bytes) -> str | None:
    """Return the most likely charset of bytes that are not UTF-8; None if the bytes do not suffice.

    A few non-ASCII bytes do not suffice. Text that is mostly UTF-8 counts as damaged UTF-8, because with any other
    charset most of it would be wrong.
    """
    has_few = sum(byte > 0x7F for byte in sample) < _TELLING_BYTES
    return None if has_few or _looks_like_damaged_utf8(sample) else detect_codec(sample)


def _looks_like_damaged_utf8(sample: bytes) -> bool:
    replaced = sample.decode("utf-8", "replace")
    bad = replaced.count("\ufffd")
    return sum(character > "\x7f" for character in replaced) - bad > bad


def undecodable(name: str, charset: str, offset: int) -> EncodingError:
    """Return the error, with a remedy, for bytes that are not text in `charset`."""
    return EncodingError(
        f"{name} is not {charset} text: the byte at offset {offset} cannot be decoded",
        hint="Pass its charset with --encoding (for example cp1252), or use --replace-undecodable.",
    )


def _detect_utf16_without_mark(sample: bytes) -> str | None:
    """Return the kind of UTF-16 in which a sample with many zero bytes is readable text; None if there is none."""
    if sample.count(b"\x00") * 5 < len(sample):
        return None
    # ASCII characters have a zero as their first byte in one kind, and as their second byte in the other.
    charset = "utf-16-be" if sample[::2].count(b"\x00") > sample[1::2].count(b"\x00") else "utf-16-le"
    text = sample[: len(sample) // 2 * 2].decode(charset, "replace")
    return charset if sum(char.isprintable() or char.isspace() for char in text) > 0.95 * len(text) else None


def decode_pieces(
    name: str,
    reopen: Callable[[], Iterator[bytes]],
    *,
    encoding: str | None = None,
    errors: Errors = "strict",
) -> Iterator[str]:
    """Decode a source that can be read again, with one piece at a time in memory.

    The charset comes from the byte order mark, else from `encoding`, else it is UTF-8. At a byte that is not UTF-8, the
    charset is detected from the text around it, a warning is logged, and reading starts again.

    Args:
        name: the document's name, for messages.
        reopen: returns the bytes from the start at every call.
        encoding: the declared charset.
        errors: `replace` puts U+FFFD where bytes cannot be decoded.

    Raises:
        EncodingError: bytes cannot be decoded. The message has the offset and the charset.
        UnsupportedDocumentError: the source is not text.
    """
    mark = find_byte_order_mark(next(reopen(), b""))
    label = encoding or ("utf-8" if mark is not None else _find_charset(name, reopen, errors))
    charset, offset = mark or (find_charset(label), 0)
    if mark is None and (kind := codecs.lookup(charset).name) in {"utf-16", "utf-32"}:
        raise EncodingError(
            f"{name} has no byte order mark, which {kind} needs", hint=f"Pass --encoding {kind}-le or {kind}-be."
        )
    reads_c1 = errors == "strict" and charset == "cp1252" and label.lower() not in {"cp1252", "windows-1252"}
    decoder = codecs.getincrementaldecoder(charset)(AS_C1 if reads_c1 else errors)
    data = reopen()
    for piece in itertools.chain([next(data, b"")[offset:]], data, [b""]):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(piece, not piece)
        except UnicodeDecodeError as error:
            raise undecodable(name, charset, offset - pending + error.start) from None
        offset += len(piece)
        if text:
            yield text


def _find_charset(name: str, reopen: Callable[[], Iterator[bytes]], errors: Errors) -> str:
    """Read a source without a byte order mark once, and return its charset."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    before = b""
    seven_bit: str | None = None
    for piece in itertools.chain(reopen(), [b""]):
        if offset == 0:
            seven_bit = detect_seven_bit_codec(piece[:SAMPLE_BYTES])
            if seven_bit is None:
                _refuse_binary(name, piece[:SAMPLE_BYTES])
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(piece, not piece)
        except UnicodeDecodeError as error:
            at = offset - pending + error.start
            near = (before + piece)[max(0, len(before) - pending + error.start - SAMPLE_BYTES // 2) :][:SAMPLE_BYTES]
            charset = detect_charset(near)
            if charset is not None:
                log.warning("%s is not UTF-8 (see the byte at offset %d); reading it as %s", name, at, charset)
                return charset
            if errors == "replace":
                return "utf-8"
            raise undecodable(name, "utf-8", at) from None
        if seven_bit is None:
            seven_bit = detect_seven_bit_codec(piece)
        offset += len(piece)
        before = piece[-SAMPLE_BYTES:]
    if seven_bit is not None:
        log.warning("%s has the marks of %s; reading it as that", name, seven_bit)
    return seven_bit or "utf-8"


def _refuse_binary(name: str, sample: bytes) -> None:
    """Raise UnsupportedDocumentError if a sample is not text, EncodingError if it is UTF-16 without a mark."""
    kind = detect_binary_kind(sample)
    if kind is not None and (charset := _detect_utf16_without_mark(sample)) is not None:
        raise EncodingError(
            f"{name} looks like {charset} without a byte order mark", hint=f"Pass --encoding {charset}."
        )
    if kind is not None:
        raise UnsupportedDocumentError(
            f"{name} is not text: it looks like {kind}",
            hint="Unpack it; `memagent corpus FOLDER -q QUESTION --out TABLE` reads every file in a folder."
            if "archive" in kind
            else "Convert it to text, or to a kind of file that has a converter (the extra `files` has PDF, HTML, "
            "Office files, e-mail and others).",
        )
