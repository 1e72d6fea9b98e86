"""How states are stored: compressed, and decoded as data that calls nothing."""

from __future__ import annotations

import zlib
from typing import Any, Final, TypedDict

import msgspec
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

_WORTHWHILE_BYTES: Final = 400
_SUFFIX: Final = "+zlib"
_MOST_BYTES: Final = 6 << 20
"""Of one value, decompressed. States hold a memory and references, a few kilobytes. A byte can be an object of 64."""


class _GraphState(TypedDict):
    """What LangGraph relies on in a stored state."""

    v: int
    ts: str
    id: str
    channel_values: dict[str, Any]
    channel_versions: dict[str, str | int | float]
    versions_seen: dict[str, dict[str, str | int | float]]


class UndecodableStateError(ValueError):
    """A stored state is not one that this program wrote. Savers raise `CheckpointError` for it, with the file."""


class CompressedSerializer(SerializerProtocol):
    """LangGraph's serialisation, with large values compressed: a memory takes less than half of its bytes.

    A file of checkpoints may come from somebody else, so it is data: decoding makes the types that LangGraph lists
    as safe and calls nothing else, and what it decompresses is bounded. Values without compression can be read, too.
    """

    def __init__(self) -> None:
        self._plain = JsonPlusSerializer(allowed_msgpack_modules=None, allowed_json_modules=None)

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Return the value's type and bytes."""
        kind, data = self._plain.dumps_typed(obj)
        return (kind, data) if len(data) < _WORTHWHILE_BYTES else (kind + _SUFFIX, zlib.compress(data, 1))

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return the value from its type and bytes.

        Raises:
            UndecodableStateError: it is damaged, too large, or not a value that a reader stores.
        """
        kind, content = data
        try:
            if kind.endswith(_SUFFIX):
                kind, content = kind.removesuffix(_SUFFIX), decompress(content)
            if len(content) > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
            return self._plain.loads_typed((kind, content))
        except Exception as error:  # whatever the decoders raise for bytes that are not theirs
            raise UndecodableStateError(f"a state of type {kind!r} cannot be decoded: {error}") from error


def decompress(content: bytes) -> bytes:
    """Return decompressed bytes. Raises UndecodableStateError if they are damaged or too many."""
    decompressor = zlib.decompressobj()
    try:
        whole = decompressor.decompress(content, _MOST_BYTES)
    except zlib.error as error:
        raise UndecodableStateError(f"a state cannot be decompressed: {error}") from error
    if not decompressor.eof:
        raise UndecodableStateError(f"a state has more than {_MOST_BYTES:,} bytes, or is cut off")
    return whole


def require_state(state: CheckpointTuple | None) -> CheckpointTuple | None:
    """Return a stored state. Raises UndecodableStateError if it is not a state of a graph."""
    if state is not None:
        try:
            msgspec.convert((state.checkpoint, state.metadata), tuple[_GraphState, dict[str, Any]])
        except msgspec.ValidationError as error:
            raise UndecodableStateError(f"a row is not a state of a graph: {error}") from error
    return state
