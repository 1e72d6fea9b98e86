"""A JSON string of any length, decoded piece by piece from the bytes of its request, never whole in memory."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

_PIECE_BYTES: Final = 1 << 20
_LONGEST_ESCAPE: Final = 6
_LOOK_BACK: Final = 1 << 16
_LOW_SURROGATES: Final = frozenset({b"udc", b"udd", b"ude", b"udf"})
_BACKSLASH: Final = 0x5C
_SPACE: Final = 0x20
_LEAD: Final = 0xC0
"""UTF-8 bytes from this one on begin a character; those from 0x80 to 0xBF continue one."""


@dataclass(frozen=True, slots=True)
class JsonText:
    """A text in a request: its JSON bytes, including the quotation marks."""

    raw: memoryview

    @classmethod
    def of(cls, raw: msgspec.Raw) -> JsonText | None:
        """The text; None if the JSON value is not a string."""
        view = memoryview(raw)
        return cls(view) if len(view) >= 2 and view[0] == ord('"') else None

    @property
    def size(self) -> int:
        """The size of the JSON in bytes; the text has at most as many."""
        return len(self.raw) - 2

    def pieces(self) -> Iterator[str]:
        """The text from its beginning to its end, about a megabyte at a time.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError: it is not well formed.
        """
        start, end = 1, len(self.raw) - 1
        while start < end:
            stop = min(start + _PIECE_BYTES, end)
            if stop < end:
                stop = _boundary(self.raw, start, stop)
                stop = end if stop == start else stop  # no place in a megabyte: then all at once
            yield _decoded(self.raw[start:stop])
            start = stop

    def text(self) -> str:
        """The whole text. Raises like `pieces`."""
        return "".join(self.pieces())

    def head(self, size: int) -> str:
        """About the first `size` bytes. Raises like `pieces`."""
        end = len(self.raw) - 1
        stop = min(1 + size, end)
        return _decoded(self.raw[1 : stop if stop == end else _boundary(self.raw, 1, stop)])

    def tail(self, size: int) -> str:
        """About the last `size` bytes. Raises like `pieces`."""
        end = len(self.raw) - 1
        start = max(1, end - size)
        return _decoded(self.raw[start if start == 1 else _boundary(self.raw, 1, start) : end])

    def from_base64(self) -> Iterator[bytes]:
        """The decoded bytes, if it is base64, alone or in a data URL.

        Raises:
            ValueError: it is not base64.
        """
        begun, rest = False, ""
        for piece in self.pieces():
            is_url = not begun and piece.startswith("data:")
            begun = True
            rest += "".join((piece.partition(",")[2] if is_url else piece).split())
            whole = len(rest) - len(rest) % 4
            yield _bytes_of(rest[:whole])
            rest = rest[whole:]
        if rest:
            yield _bytes_of(rest + "=" * (-len(rest) % 4))


def _bytes_of(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data is not valid base64: {error}") from error


def _decoded(part: memoryview) -> str:
    return msgspec.json.decode(b'"' + bytes(part) + b'"', type=str)


def _boundary(raw: memoryview, start: int, stop: int) -> int:
    """The last place at or before `stop` where the text may be cut: not inside a character or an escape."""
    place = stop
    while place > start and not _is_safe(raw, start, place):
        place -= 1
    return place


def _is_safe(raw: memoryview, start: int, place: int) -> bool:
    byte = raw[place]
    if byte == _SPACE or byte >= _LEAD:
        return True
    if byte >= 0x80:
        return False
    if byte == _BACKSLASH:
        # It begins an escape if there is an even number of backslashes before it. The second half of a surrogate pair
        # belongs to the first.
        before = bytes(raw[max(start, place - _LOOK_BACK) : place])
        begins = (len(before) - len(before.rstrip(b"\\"))) % 2 == 0
        return begins and bytes(raw[place + 1 : place + 4]).lower() not in _LOW_SURROGATES
    return _BACKSLASH not in bytes(raw[max(start, place - _LONGEST_ESCAPE + 1) : place])
