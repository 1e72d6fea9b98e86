"""The storage of record fields, as columns of SQLite tables and Parquet files.

The annotation of a field determines its column; the dataclasses in `records` and `Span` are the only lists of columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar

import msgspec

from memagent_graph.errors import RunLogError
from memagent_graph.events import ReadEvent
from memagent_graph.policy import ARRAY_TYPES
from memagent_graph.run_log.packing import pack_numbers, pack_text, unpack_numbers, unpack_text
from memagent_graph.run_log.records import Conversation, LoggedEvent, Reward, RunRecord
from memagent_graph.trace import Span

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
