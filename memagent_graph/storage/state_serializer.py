"""Serializes states of graphs: compresses them, and decodes them without running code from the file."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any, Final, NotRequired, TypeAlias, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import ormsgpack
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import (
    EXT_CONSTRUCTOR_KW_ARGS,
    EXT_CONSTRUCTOR_POS_ARGS,
    EXT_DELTA_SNAPSHOT,
    EXT_NUMPY_ARRAY,
    JsonPlusSerializer,
)
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Interrupt, Overwrite, Send, TimeoutPolicy

from memagent_graph.errors import CheckpointError
from memagent_graph.storage.bounded_files import inflate

_State = TypeVar("_State", CheckpointTuple, CheckpointTuple | None)

_MIN_COMPRESSED_BYTES: Final = 400
_COMPRESSED_SUFFIX: Final = "+zlib"
_TEXT_TYPE: Final = "text"
_MAX_BYTES: Final = 12 << 20
"""Maximum size of a decompressed value. The state of a report has the cells of all documents."""
_MAX_TOTAL_BYTES: Final = 2 * _MAX_BYTES
"""Maximum size of a state with the writes after it, which are in memory at the same time."""
_SMALL_BYTES: Final = 128 << 10
"""Maximum size of a value with keys that are no texts. Tuples can be chosen so that all have the same hash, and then a
dict of this size takes a second, and one of 12 MiB hours."""
_MAX_KEY_SECONDS: Final = 5.0
"""After this processor time for such values of a state, no further one is decoded. Usual ones take milliseconds."""
_MAX_NESTING: Final = 6
"""Maximum number of objects inside each other. Each is decoded from a copy of its bytes; small ones may be ten times as
many."""
_Element: TypeAlias = str | bytes | int | float | date | None
"""What sets are made of: no tuples and other objects, for the same reason."""
_CONSTRUCTORS: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        Overwrite,
        Interrupt,
        set,
        frozenset,
        deque,
        date,
        time,
        timedelta,
        timezone,
        Decimal,
        UUID,
        type(Path()),
        ZoneInfo,
    )
} | {
    ("datetime", "datetime"): datetime.fromisoformat,
    ("langgraph.types", "Send"): lambda node, argument, timeout=None: Send(
        str(node), argument, timeout=timeout and TimeoutPolicy(**timeout)
    ),
}
"""What a state can have besides plain values: what LangGraph adds to states, and types of Python's library."""


@dataclass(slots=True)
class _Limits:
    """What the other values of a state may need."""

    byte_count: int = _MAX_TOTAL_BYTES
    key_seconds: float = _MAX_KEY_SECONDS


_limits: Final = ContextVar[_Limits]("_limits")


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
    """A stored state that this program did not write. Savers turn it into a `CheckpointError` with the file's name."""


class CompressedSerializer(SerializerProtocol):
    """LangGraph's serializer, with compression of large values. A memory takes less than half of its size.

    A file of checkpoints may come from somebody else. So decoding makes only plain values and objects of a few types,
    and bounds the decompressed size. Objects of other types become the values that they were saved as; messages become
    dicts. (LangGraph lists more types as safe, also regular expressions, which can take hours to compile.)
    Uncompressed values can be read, too.
    """

    def __init__(self) -> None:
        self._plain = JsonPlusSerializer()

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Return the value's type and bytes.

        Raises:
            CheckpointError: the value cannot be decoded again, because it is too large, is large and has keys that are
                no texts, or has arrays of NumPy.
        """
        if isinstance(obj, SeparateText):
            type_name, data = _TEXT_TYPE, obj.text.encode("utf-8", "surrogatepass")
        else:
            type_name, data = self._plain.dumps_typed(obj)
        if len(data) > _MAX_BYTES:
            raise CheckpointError(
                f"a checkpoint would have {len(data):,} bytes, and only {_MAX_BYTES:,} can be read again",
                hint="Use fewer documents or questions at a time, or a smaller memory. "
                "Earlier checkpoints are not lost.",
            )
        if type_name == _TEXT_TYPE:
            return type_name, zlib.compress(data, 1)
        if type_name == "msgpack":
            _require_decodable(data)
        if len(data) < _MIN_COMPRESSED_BYTES:
            return type_name, data
        return type_name + _COMPRESSED_SUFFIX, zlib.compress(data, 1)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Return the value from its type and bytes.

        Raises:
            UndecodableStateError: the value is damaged, too large, or of a type that a reader does not store.
        """
        type_name, content = data
        try:
            if type_name == _TEXT_TYPE or type_name.endswith(_COMPRESSED_SUFFIX):
                content = inflate(content, _MAX_BYTES)
            limits = _limits.get(_Limits())
            limits.byte_count -= len(content)
            if len(content) > _MAX_BYTES or limits.byte_count < 0:
                raise ValueError(f"it has more than {_MAX_BYTES:,} bytes, or its state more than {_MAX_TOTAL_BYTES:,}")
            if type_name == _TEXT_TYPE:
                return content.decode("utf-8", "surrogatepass")
            plain_type = type_name.removesuffix(_COMPRESSED_SUFFIX)
            if plain_type == "json":
                raise ValueError("only old versions of LangGraph wrote JSON")
            if plain_type == "msgpack":
                return _decode(content, limits)
            return self._plain.loads_typed((plain_type, content))
        except Exception as error:  # decoders can raise anything for damaged bytes
            raise UndecodableStateError(f"a state of type {type_name!r} cannot be decoded: {error}") from error


def _decode(data: bytes, limits: _Limits) -> Any:
    try:
        return _unpack(data, None, 0)
    except ormsgpack.MsgpackDecodeError as error:
        if len(data) > _SMALL_BYTES or limits.key_seconds <= 0:
            reason = f"above {_SMALL_BYTES:,} bytes, or after {_MAX_KEY_SECONDS:g} seconds, keys have to be texts"
            raise ValueError(f"{error}; {reason}") from error
        start = thread_time()
        value = _unpack(data, ormsgpack.OPT_NON_STR_KEYS, 0)
        limits.key_seconds -= thread_time() - start
        return value


def _require_decodable(data: bytes) -> None:
    try:
        _decode(data, _Limits())
    except Exception as error:  # the decoder does not say which
        raise CheckpointError(
            f"a checkpoint of {len(data):,} bytes cannot be read again: it has arrays of NumPy, too many "
            f"objects inside each other or, above {_SMALL_BYTES:,} bytes, keys that are no texts",
            hint="Use lists instead of arrays, and texts as the keys of dicts in the state, such as str(page).",
        ) from error


def _unpack(data: bytes, option: int | None, depth: int) -> Any:
    make_object = partial(_make_object, option=option, depth=depth + 1)
    return ormsgpack.unpackb(data, ext_hook=make_object, option=option)


def _make_object(code: int, data: bytes, option: int | None, depth: int) -> Any:
    """Return an object that LangGraph's serializer encoded, or the values it was made of if this makes no such objects.

    Raises:
        ValueError: no state has such objects, or so many inside each other.
    """
    max_nesting = _MAX_NESTING if len(data) > _SMALL_BYTES else 10 * _MAX_NESTING
    if (code >= EXT_NUMPY_ARRAY and code != EXT_DELTA_SNAPSHOT) or depth > max_nesting:
        raise ValueError(f"it has an array of NumPy or more than {max_nesting} objects inside each other")
    content = _unpack(data, option, depth)
    if code == EXT_DELTA_SNAPSHOT:
        return _DeltaSnapshot(content)
    module, name, arguments = content[:3]
    constructor = _CONSTRUCTORS.get((module, name))
    if constructor is None or (constructor in {set, frozenset} and not all(isinstance(a, _Element) for a in arguments)):
        return arguments
    if code == EXT_CONSTRUCTOR_POS_ARGS:
        return constructor(*arguments)
    return constructor(**arguments) if code == EXT_CONSTRUCTOR_KW_ARGS else constructor(arguments)


def reset_size_limits() -> None:
    """Start counting the bytes of the next state in this task."""
    _limits.set(_Limits())


def require_state(state: _State) -> _State:
    """Return a stored state unchanged, and count the bytes of the next one from zero.

    Raises:
        UndecodableStateError: it is not a state of a graph.
    """
    if state is not None:
        try:
            msgspec.convert((state.checkpoint, state.metadata), tuple[_GraphState, dict[str, Any]])
        except msgspec.ValidationError as error:
            raise UndecodableStateError(f"a row is not a state of a graph: {error}") from error
    reset_size_limits()
    return state
