"""How the log stores records: fields as columns, numbers and texts as blobs, the tables, and statements on them.

The annotation of a field determines its column, in SQLite tables and in Parquet files; the dataclasses in `records` and
`Span` are the only lists of columns. Callers open the transactions.

Token ids, log-probs and texts are packed into small blobs, without loss. Numbers are 32-bit values in separate byte
planes: all lowest bytes, then all second bytes, and so on. Machines that read and write logs are little-endian. Planes
that hardly compress are stored unchanged, the lowest first. The others (mostly zeros for ids, a few exponents for
log-probs) are deflated; only runs of one byte are searched, because there are no other matches. An id of a prompt takes
about 2 bytes, an id of a completion 1.65, and a log-prob 3.3. A blob begins with the number of unchanged planes.

A log may come from somebody else, so the inflated size of a blob is bounded: a small file cannot fill the memory.
"""

from __future__ import annotations

import json
import math
import sqlite3
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from memagent_graph.errors import RunLogError
from memagent_graph.events import ReadEvent
from memagent_graph.policy import ARRAY_TYPES
from memagent_graph.run_log.records import Conversation, LoggedEvent, Reward, RunRecord
from memagent_graph.storage.bounded_files import inflate
from memagent_graph.storage.database import open_database, open_database_to_read
from memagent_graph.trace import Span

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


Record = TypeVar("Record")
MAX_RUN_SIZE: Final = 1 << 26
"""Maximum size of a run (characters of long texts, ids, log-probs): about 40 million tokens of a document."""


def _return_unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Column:
    """How a field is stored: its column in SQLite tables, and in Parquet files.

    `pack` and `unpack` convert a value to SQLite and back, `export` and `restore` to Parquet and back. `unpack` and
    `restore` return plain data, whose types must be checked.
    """

    sql: str
    arrow: str
    """Arrow's alias of a type, or ids, logprobs, names, spans or rewards (see `exchange.parquet`)."""
    pack: Callable[[Any], Any] = _return_unchanged
    unpack: Callable[[Any], Any] = _return_unchanged
    export: Callable[[Any], Any] = _return_unchanged
    restore: Callable[[Any], Any] = _return_unchanged


def _dump_json(values: Mapping[str, Any]) -> str:
    return json.dumps(dict(values))


def _pack_events(events: tuple[ReadEvent | LoggedEvent, ...]) -> str:
    return json.dumps(list(map(asdict, events)))


def _pack_spans(spans: tuple[Span, ...]) -> str:
    return json.dumps(list(map(_GET_SPAN_VALUES, spans)), separators=(",", ":"))


def _unpack_spans(text: str) -> list[dict[str, Any]]:
    return [dict(zip(_SPAN_FIELDS, values, strict=True)) for values in json.loads(text)]


_SPAN_FIELDS: Final = tuple(field.name for field in fields(Span))
_GET_SPAN_VALUES: Final = attrgetter(*_SPAN_FIELDS)
_GET_VALUE: Final = attrgetter("value")
_JSON_COLUMN: Final = Column("TEXT NOT NULL", "string", _dump_json, json.loads, _dump_json, json.loads)
_COLUMN_BY_ANNOTATION: Final = {
    "str": Column("TEXT NOT NULL", "string"),
    "str | None": Column("TEXT", "string"),
    "int": Column("INTEGER NOT NULL", "int64"),
    "int | None": Column("INTEGER", "int64"),
    "float": Column("REAL NOT NULL", "double"),
    "Time": Column("REAL NOT NULL", "double"),
    "Time | None": Column("REAL", "double"),
    "bool": Column("INTEGER NOT NULL", "bool", int, bool),
    "Writes": Column("TEXT NOT NULL", "string", _GET_VALUE, export=_GET_VALUE),
    "Outcome": Column("TEXT NOT NULL", "string", _GET_VALUE, export=_GET_VALUE),
    "DocumentRef": _JSON_COLUMN,
    "Mapping[str, Any]": _JSON_COLUMN,
    "Mapping[str, str]": _JSON_COLUMN,
    "LongText": Column("BLOB", "string", pack_text, unpack_text),
    "TokenIds": Column("BLOB", "ids", partial(pack_numbers, "I"), partial(unpack_numbers, "I")),
    "LogProbs": Column("BLOB", "logprobs", partial(pack_numbers, "f"), partial(unpack_numbers, "f")),
    "tuple[str, ...]": Column("TEXT NOT NULL", "names", json.dumps, json.loads, list),
    "tuple[Span, ...]": Column(
        "TEXT NOT NULL", "spans", _pack_spans, _unpack_spans, lambda spans: list(map(asdict, spans))
    ),
    "tuple[ReadEvent, ...]": Column("TEXT NOT NULL", "string", _pack_events, json.loads, _pack_events, json.loads),
}


RECORD_COLUMNS: Final[Mapping[type, Mapping[str, Column]]] = {
    record_class: {field.name: _COLUMN_BY_ANNOTATION[str(field.type)] for field in fields(record_class)}
    for record_class in (RunRecord, Conversation, LoggedEvent, Reward, Span)
}
"""The columns of each record class, by field name. Those of `Span` are in Parquet files."""


def pack_row(record: Any) -> dict[str, Any]:
    """Return the row of a record: its values in SQLite, by column."""
    return {name: column.pack(getattr(record, name)) for name, column in RECORD_COLUMNS[type(record)].items()}


def unpack_row(record_class: type[Record], row: Mapping[str, Any]) -> Record:
    """Return the record in a row. Missing columns get the defaults of their fields; other columns are ignored.

    Raises:
        ValueError, TypeError: `pack_row` did not make this row, or a value is of another type.
    """
    columns = RECORD_COLUMNS[record_class]
    values = {name: columns[name].unpack(row[name]) for name in row.keys() if name in columns}  # noqa: SIM118  a sqlite3.Row
    numbers = {name: values.pop(name) for name in tuple(values) if name in ARRAY_TYPES}
    return replace(msgspec.convert(values, record_class), **numbers)  # type: ignore[type-var]


def bound_records(records: Iterable[Record], run_name: str) -> Iterator[Record]:
    """Yield records of one run, whose name for errors is `run_name`.

    The size is bounded because callers keep a whole run in memory, and a small file can contain large compressed data.

    Raises:
        RunLogError: the records exceed `MAX_RUN_SIZE`.
    """
    size = 0
    for record in records:
        columns = RECORD_COLUMNS[type(record)].items()
        size += sum(len(getattr(record, name) or ()) for name, column in columns if column.sql == "BLOB")
        if size > MAX_RUN_SIZE:
            raise RunLogError(
                f"{run_name} has more than {MAX_RUN_SIZE:,} characters, token ids and log-probs",
                hint="The run cannot be used. If it is yours, read its document in parts.",
            )
        yield record


_RUN_REFERENCE: Final = "TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE"
_ROW_ID: Final = "INTEGER PRIMARY KEY"


def _make_table_statement(name: str, record_class: type, **columns: str) -> str:
    """Return the statement that creates the table of a record class; `columns` overrides or adds column types."""
    types = {field: column.sql for field, column in RECORD_COLUMNS[record_class].items()} | columns
    # SQLite reads a row from its first column on, so the large columns are last.
    definitions = sorted(
        (f"{field} {sql}" for field, sql in types.items()), key=lambda definition: definition.endswith("BLOB")
    )
    return f"CREATE TABLE {name} ({', '.join(definitions)}) STRICT"


_SCHEMA: Final = (
    _make_table_statement("runs", RunRecord, run_id="TEXT PRIMARY KEY"),
    _make_table_statement("conversations", Conversation, id=_ROW_ID, run_id=_RUN_REFERENCE),
    _make_table_statement("events", LoggedEvent, id=_ROW_ID, run_id=_RUN_REFERENCE),
    _make_table_statement(
        "rewards",
        Reward,
        id=_ROW_ID,
        run_id=_RUN_REFERENCE,
        conversation="INTEGER REFERENCES conversations (id) ON DELETE CASCADE",
    ),
    "CREATE TABLE imported (run_id TEXT PRIMARY KEY REFERENCES runs (run_id) ON DELETE CASCADE) STRICT",
    "CREATE TABLE templates (hash TEXT PRIMARY KEY, content TEXT NOT NULL) STRICT",
    "CREATE VIEW valid_rewards AS SELECT rewards.* FROM rewards JOIN runs USING (run_id) "
    "WHERE conversation IS NOT NULL OR time >= coalesce(attempt, 0)",
    "CREATE INDEX conversations_of_run ON conversations (run_id)",
    "CREATE UNIQUE INDEX conversations_that_count ON conversations (run_id, branch, role, slot, attempt) "
    "WHERE superseded = 0",
    "CREATE INDEX events_of_run ON events (run_id)",
    "CREATE INDEX rewards_of_run ON rewards (run_id)",
    "CREATE INDEX rewards_of_conversation ON rewards (conversation)",
)


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a log, and create its file and tables if they do not exist.

    Args:
        path: the file.
        read_only: whether to open the file for reading only.

    Raises:
        OSError, sqlite3.Error: the file is not a log of this version, cannot be opened, or stays locked.
    """
    connection = (open_database_to_read if read_only else open_database)(path, _SCHEMA)
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal" and not read_only:
            raise sqlite3.OperationalError("the file system does not support write-ahead logging")
    except BaseException:
        connection.close()
        raise
    return connection


SMALL_COLUMNS: Final = ", ".join(name for name in RECORD_COLUMNS[Conversation] if name not in ARRAY_TYPES)
"""The columns of conversations without token ids and log-probs."""


def insert_row(
    connection: sqlite3.Connection, table: str, values: Mapping[str, Any], *, update: Iterable[str] | None = None
) -> int:
    """Add a row, and return its id. If its key exists, replace the columns in `update`; fail if `update` is None."""
    assignments = ", ".join(f"{column} = excluded.{column}" for column in update or ())
    action = f"UPDATE SET {assignments}" if assignments else "NOTHING"
    conflict_clause = "" if update is None else f"ON CONFLICT DO {action}"
    placeholders = ", ".join("?" * len(values))
    statement = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({placeholders}) {conflict_clause}"  # noqa: S608  our own names
    return connection.execute(statement, tuple(values.values())).lastrowid or 0


def begin_attempt(connection: sqlite3.Connection, run_id: str, start_time: float) -> None:
    """Begin another attempt of a run, if the run exists: remove its end. Its own rewards so far no longer count.

    The attempt begins after these rewards even if the clock was set back.
    """
    rewards = "SELECT max(time) FROM rewards WHERE run_id = ? AND conversation IS NULL"
    (newest,) = connection.execute(rewards, (run_id,)).fetchone()
    attempt = start_time if newest is None else max(start_time, math.nextafter(newest, math.inf))
    update = "UPDATE runs SET attempt = ?, ended = NULL, stop_reason = NULL, answer = NULL WHERE run_id = ?"
    connection.execute(update, (attempt, run_id))


def insert_template(connection: sqlite3.Connection, fingerprint: str, wording: Mapping[str, str]) -> None:
    """Add the wording of prompts, if the log does not have it yet."""
    insert_row(connection, "templates", {"hash": fingerprint, "content": json.dumps(dict(wording))}, update=())


def insert_reward(connection: sqlite3.Connection, reward: Reward) -> None:
    """Add a reward; its `conversation` is a row id or None.

    A reward of the run is valid for the present attempt even if the clock was set back.
    """
    if reward.conversation is None:
        (attempt,) = connection.execute("SELECT attempt FROM runs WHERE run_id = ?", (reward.run_id,)).fetchone()
        reward = replace(reward, time=max(reward.time, attempt or 0.0))
    insert_row(connection, "rewards", pack_row(replace(reward, id=None)))


def supersede_slot(connection: sqlite3.Connection, conversation: Mapping[str, Any]) -> None:
    """Mark other calls in the slot of a conversation's row as superseded, and all calls that depend on them."""
    query = (
        "SELECT DISTINCT call_id FROM conversations WHERE run_id = :run_id AND branch = :branch "
        "AND role = :role AND slot = :slot AND superseded = 0 AND call_id <> :call_id"
    )
    call_ids = {row[0] for row in connection.execute(query, conversation)}
    if not call_ids:
        return
    run_id = conversation["run_id"]
    query = "SELECT call_id, parents FROM conversations WHERE run_id = ? AND superseded = 0 ORDER BY id"
    for call_id, parents in connection.execute(query, (run_id,)):  # parents come before the calls that depend on them
        if not call_ids.isdisjoint(json.loads(parents)):
            call_ids.add(call_id)
    update = "UPDATE conversations SET superseded = 1 WHERE run_id = ? AND call_id IN (SELECT value FROM json_each(?))"
    connection.execute(update, (run_id, json.dumps(list(call_ids))))
