"""Serializes states: compressed, and decoded as data that cannot call code."""

from __future__ import annotations

import zlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NotRequired, TypedDict

import msgspec
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from memagent_graph.errors import CheckpointError

_WORTHWHILE_BYTES: Final = 400
_SUFFIX: Final = "+zlib"
_TEXT: Final = "text"
_MAX_BYTES: Final = 12 << 20
"""Maximum size of a decompressed value. The state of a report has the cells of all documents."""
_MAX_TOTAL_BYTES: Final = 2 * _MAX_BYTES
"""Maximum size of a state with the writes after it, which are in memory at the same time."""
_room: Final = ContextVar[list[int]]("_room")


class _GraphState(TypedDict):
    """The fields of a stored state that LangGraph needs."""

    v: int
    ts: str
    id: str
    channel_values: dict[str, Any]
    channel_versions: dict[str, str | int | float]
    versions_seen: dict[str, dict[str, str | int | float]]
    updated_channels: NotRequired[list[str] | None]


@dataclass(frozen=True, slots=True)
class SeparateText:
    """A text that PostgreSQL stores once as a separate value, and not in the JSON of every checkpoint."""

    text: str


class UndecodableStateError(ValueError):
    """A stored state that this program did not write. Savers raise `CheckpointError` with the file."""


class CompressedSerializer(SerializerProtocol):
    """LangGraph's serializer, with compression of large values. A memory takes less than half of its bytes.

    A file of checkpoints may come from somebody else. So decoding creates only the types that LangGraph lists as safe,
    calls no other code, and bounds the decompressed size. Values without compression can be read, too.
    """

    def __init__(self) -> None:
        self._plain = JsonPlusSerializer(allowed_msgpack_modules=None, allowed_json_modules=None)

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Return the value's type and bytes.

        Raises:
            CheckpointError: the value is too large to be decoded again.
        """
        is_text = isinstance(obj, SeparateText)
        kind, data = (_TEXT, obj.text.encode("utf-8", "surrogatepass")) if is_text else self._plain.dumps_typed(obj)
        if len(data) > _MAX_BYTES:
            raise CheckpointError(
                f"a checkpoint would have {len(data):,} bytes, and only {_MAX_BYTES:,} can be read again",
                hint="Use fewer documents or questions at a time, or a smaller memory. "
                "Earlier checkpoints are not lost.",
            )
        if is_text:
            return kind, zlib.compress(data, 1)
        return (kind, data) if len(data) < _WORTHWHILE_BYTES else (kind + _SUFFIX, zlib.compress(data, 1))

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return the value from its type and bytes.

        Raises:
            UndecodableStateError: the value is damaged, too large, or not one that a reader stores.
        """
        kind, content = data
        try:
            if kind == _TEXT:
                return decompress(content).decode("utf-8", "surrogatepass")
            content = decompress(content) if kind.endswith(_SUFFIX) else _account_for(content)
            return self._plain.loads_typed((kind.removesuffix(_SUFFIX), content))
        except Exception as error:  # decoders can raise anything for damaged bytes
            raise UndecodableStateError(f"a state of type {kind!r} cannot be decoded: {error}") from error


def bound_next_state() -> None:
    """Start counting the bytes of another state in this task."""
    _room.set([_MAX_TOTAL_BYTES])


def decompress(content: bytes) -> bytes:
    """Return decompressed bytes. Raises UndecodableStateError if they are damaged or too many."""
    decompressor = zlib.decompressobj()
    try:
        whole = decompressor.decompress(content, _MAX_BYTES)
    except zlib.error as error:
        raise UndecodableStateError(f"a state cannot be decompressed: {error}") from error
    if not decompressor.eof:
        raise UndecodableStateError(f"a state has more than {_MAX_BYTES:,} bytes, or is cut off")
    return _account_for(whole)


def _account_for(content: bytes) -> bytes:
    """Count bytes against the bounds and return them. Raises UndecodableStateError if there are too many."""
    room = _room.get([_MAX_TOTAL_BYTES])
    room[0] -= len(content)
    if len(content) > _MAX_BYTES or room[0] < 0:
        raise UndecodableStateError(
            f"a value has more than {_MAX_BYTES:,} bytes, or all of a state {_MAX_TOTAL_BYTES:,}"
        )
    return content


def require_state(state: CheckpointTuple | None) -> CheckpointTuple | None:
    """Return a stored state. Raises UndecodableStateError if it is not a state of a graph."""
    if state is not None:
        try:
            msgspec.convert((state.checkpoint, state.metadata), tuple[_GraphState, dict[str, Any]])
        except msgspec.ValidationError as error:
            raise UndecodableStateError(f"a row is not a state of a graph: {error}") from error
    return state
