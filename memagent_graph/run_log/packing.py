"""Packs token ids, log-probs and texts into small blobs, without loss.

Numbers are 32-bit values in separate byte planes: all lowest bytes, then all second bytes, and so on. Machines that
read and write logs are little-endian. Planes that hardly compress are stored unchanged, the lowest first. The others
(mostly zeros for ids, a few exponents for log-probs) are deflated; only runs of one byte are searched, because there
are no other matches. An id of a prompt takes about 2 bytes, an id of a completion 1.65, and a log-prob 3.3. A blob
begins with the number of unchanged planes.

A log may come from somebody else, so the inflated size of a blob is bounded: a small file cannot fill the memory.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any, Final

from memagent_graph.storage.bounded_files import inflate

_NUMBERS_LEVEL: Final = 1
_TEXT_LEVEL: Final = 6
"""The compression levels of numbers and texts. Higher levels take more time and hardly save space."""
_WINDOW_BITS: Final = -12
_MEMORY_LEVEL: Final = 5
"""A window of 4 kB, because zlib's default needs 268 kB per blob. The minus sign leaves out the header."""
_RAW_PLANES_OF_IDS: Final = 2
_RAW_PLANES_OF_FEW_IDS: Final = 1
_FEW_IDS: Final = 1024
"""Up to this many ids, the second plane is deflated, too, which takes four times the time and saves a fifth."""
MAX_TEXT_BYTES: Final = 1 << 24
"""Maximum UTF-8 bytes of a text. A completion of a million tokens has about 4 MB."""
MAX_LIST_LENGTH: Final = 1 << 22
"""Maximum number of ids or log-probs in a blob. Contexts have up to a million tokens."""
_RAW_PLANES_OF_LOGPROBS: Final = 3
_HEADER_BYTES: Final = 5
_NUMBER_BYTES: Final = 4


def pack_numbers(type_code: str, numbers: Sequence[float] | None) -> bytes | None:
    """Pack token ids, 0 to 2^32 - 1 (type code "I"), or log-probs as 32-bit floats, as policies return them ("f").

    Raises:
        ValueError: there are more than `MAX_LIST_LENGTH` numbers.
    """
    if numbers is None:
        return None
    _require_list_length(len(numbers))
    id_planes = _RAW_PLANES_OF_FEW_IDS if len(numbers) <= _FEW_IDS else _RAW_PLANES_OF_IDS
    raw_plane_count = id_planes if type_code == "I" else _RAW_PLANES_OF_LOGPROBS
    values = array(type_code, numbers)
    data = values.tobytes()
    planes = [data[plane::_NUMBER_BYTES] for plane in range(_NUMBER_BYTES)]
    header = raw_plane_count.to_bytes(1, "little") + len(values).to_bytes(_HEADER_BYTES - 1, "little")
    other_planes = _deflate(b"".join(planes[raw_plane_count:]), _NUMBERS_LEVEL, zlib.Z_RLE)
    return b"".join((header, *planes[:raw_plane_count], other_planes))


def unpack_numbers(type_code: str, blob: bytes | None) -> array[Any] | None:
    """Unpack a blob from `pack_numbers`.

    Raises:
        ValueError: the blob is damaged, or has more than `MAX_LIST_LENGTH` numbers.
    """
    if blob is None:
        return None
    if len(blob) < _HEADER_BYTES or not 0 < blob[0] < _NUMBER_BYTES:
        raise ValueError("a list of numbers is damaged")
    raw_plane_count, count = blob[0], int.from_bytes(blob[1:_HEADER_BYTES], "little")
    _require_list_length(count)
    end = _HEADER_BYTES + count * raw_plane_count
    other_planes = inflate(blob[end:], count * (_NUMBER_BYTES - raw_plane_count), _WINDOW_BITS)
    data = blob[_HEADER_BYTES:end] + other_planes
    if len(data) != count * _NUMBER_BYTES:
        raise ValueError("a list of numbers is cut off")
    planes = bytearray(count * _NUMBER_BYTES)
    for plane in range(_NUMBER_BYTES):
        planes[plane::_NUMBER_BYTES] = data[plane * count : (plane + 1) * count]
    return array(type_code, bytes(planes))


def pack_text(text: str | None) -> bytes | None:
    """Pack a text, lone surrogates included.

    Raises:
        ValueError: the text has more than `MAX_TEXT_BYTES`.
    """
    if text is None:
        return None
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(f"a text has more than {MAX_TEXT_BYTES:,} bytes")
    return _deflate(data, _TEXT_LEVEL)


def unpack_text(blob: bytes | None) -> str | None:
    """Unpack a blob from `pack_text`.

    Raises:
        ValueError: the blob is damaged, or has more than `MAX_TEXT_BYTES`.
    """
    return None if blob is None else inflate(blob, MAX_TEXT_BYTES, _WINDOW_BITS).decode("utf-8", "surrogatepass")


def _deflate(data: bytes, level: int, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    stream = zlib.compressobj(level, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL, strategy)
    return stream.compress(data) + stream.flush()


def _require_list_length(count: int) -> None:
    if count > MAX_LIST_LENGTH:
        raise ValueError(f"a list has more than {MAX_LIST_LENGTH:,} numbers")
