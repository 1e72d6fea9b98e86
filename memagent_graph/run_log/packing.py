"""Token ids, log-probs and texts as small blobs, without loss.

Numbers are stored as little-endian 32-bit values, byte planes apart (all lowest bytes first, and so on), then deflated:
the high bytes of ids, and the exponents of log-probs, repeat. Prompt ids of English take about 2 bytes each.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any, Final

_LEVEL: Final = 1
"""Higher levels take several times the time for some 3 % less."""
_WIDTH: Final = 4


def pack_ids(ids: Sequence[int] | None) -> bytes | None:
    """Token ids, 0 to 2^32 - 1."""
    return None if ids is None else _pack(array("I", ids))


def unpack_ids(blob: bytes | None) -> list[int] | None:
    """The inverse of `pack_ids`."""
    return None if blob is None else _unpack("I", blob)


def pack_logprobs(logprobs: Sequence[float] | None) -> bytes | None:
    """Log-probs as 32-bit floats, which is what policies compute."""
    return None if logprobs is None else _pack(array("f", logprobs))


def unpack_logprobs(blob: bytes | None) -> list[float] | None:
    """The inverse of `pack_logprobs`."""
    return None if blob is None else _unpack("f", blob)


def pack_text(text: str | None) -> bytes | None:
    """A text, lone surrogates included."""
    return None if text is None else zlib.compress(text.encode("utf-8", "surrogatepass"), _LEVEL)


def unpack_text(blob: bytes | None) -> str | None:
    """The inverse of `pack_text`."""
    return None if blob is None else zlib.decompress(blob).decode("utf-8", "surrogatepass")


def _pack(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    data = numbers.tobytes()
    return zlib.compress(b"".join(data[plane::_WIDTH] for plane in range(_WIDTH)), _LEVEL)


def _unpack(kind: str, blob: bytes) -> list[Any]:
    data = zlib.decompress(blob)
    count = len(data) // _WIDTH
    planes = bytearray(len(data))
    for plane in range(_WIDTH):
        planes[plane::_WIDTH] = data[plane * count : (plane + 1) * count]
    numbers: array[Any] = array(kind, bytes(planes))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
