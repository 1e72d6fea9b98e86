"""Runs as one Parquet file: a row per conversation, with its run's columns repeated (compression makes that cheap).

`datasets.load_dataset("parquet", data_files=...)` reads it; so do pandas, Polars and DuckDB.

column                  type                what it is
run_id                  string
run_began, run_ended    double              seconds since 1970; `run_ended` is null while it runs, or after a crash
question                string
document                string (JSON)       the document's reference: key, name, size, media_type, sections
document_key, _name     string              two of its values; half surrogate pairs of a name as question marks
settings                string (JSON)       what the run's reader was built from
stop_reason, answer     string
run_trace               string (JSON)       ids of the LangSmith run and the OpenTelemetry span it ran under
run_events              string (JSON)       list of events of no conversation: edited memories
run_rewards             list<struct>        name, value, source, time, note; oldest first
strategy, _fingerprint  string              the way of reading
conversation            int64               its row in the original log: what `RunLog.reward` takes
position ... events     see `Conversation`  the attributes of `Conversation` under their names; `sampling`, `trace` and
                                            `events` are JSON
reads                   list<struct>        the chunks in its prompt; the first one's values also in columns
parents                 list<string>        the steps whose output was in its prompt
prompt_token_ids        list<uint32>        null if the policy did not return them
completion_token_ids    list<uint32>        likewise
logprobs                list<float>         one per completion token; likewise
rewards                 list<struct>        the conversation's own, as `run_rewards`
escaped                 list<string>        see below

A run without conversations has one row, in which `conversation` and all columns after it are null. The wording of
prompts by fingerprint, of which there are few for any number of runs, is JSON in the file's key-value metadata
(`memagent.templates`), next to `memagent.format` and `memagent.format_version`.

Half surrogate pairs are not UTF-8. If `text` or `memory` contains one, which happens only in texts that a person or a
program made, the column's name is in `escaped` and its text is written as in a JSON string.
"""

from __future__ import annotations

import importlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from memagent_graph.errors import MissingExtraError, RunLogError
from memagent_graph.run_log.exchange.logged_run import (
    FORMAT_NAME,
    FORMAT_VERSION,
    OLDER_VERSION,
    LoggedRun,
    check_format,
    first_span,
    read_conversation,
)
from memagent_graph.run_log.records import Conversation, LoggedEvent, Reward, RunRecord
from memagent_graph.run_log.rows import SPAN

_RUN_COLUMNS: Final = {
    "run_id": "string",
    "run_began": "double",
    "run_ended": "double",
    "question": "string",
    "document": "string",
    "document_key": "string",
    "document_name": "string",
    "settings": "string",
    "stop_reason": "string",
    "answer": "string",
    "run_trace": "string",
    "run_events": "string",
    "run_rewards": "rewards",
    "strategy": "string",
    "strategy_fingerprint": "string",
}
_TYPES: Final = {"str": "string", "int": "int64", "int | None": "int64", "float": "double", "bool": "bool"}
_PLAIN_COLUMNS: Final = {
    each.name: _TYPES[str(each.type)]
    for each in fields(Conversation)
    if str(each.type) in _TYPES and each.name not in {"run_id", "id"}
}
"""Columns with an unchanged attribute of `Conversation`."""
_NUMBER_LISTS: Final = {"prompt_token_ids": "I", "completion_token_ids": "I", "logprobs": "f"}
_COLUMNS: Final = {
    **_RUN_COLUMNS,
    "conversation": "int64",
    "kind": "string",
    "outcome": "string",
    **_PLAIN_COLUMNS,
    "writes": "string",
    "parents": "names",
    "reads": "spans",
    **dict.fromkeys(("start_char", "end_char", "start_byte", "end_byte", "chunk_tokens"), "int64"),
    "sampling": "string",
    "trace": "string",
    "events": "string",
    "text": "string",
    "memory": "string",
    "prompt_token_ids": "ids",
    "completion_token_ids": "ids",
    "logprobs": "logprobs",
    "rewards": "rewards",
    "escaped": "names",
}
_NEW: Final = frozenset(
    {"strategy", "strategy_fingerprint", "seq", "node", "branch", "role", "slot", "writes", "parents", "reads"}
)
"""Columns that format 1 does not have."""
_REWARD: Final = ("name", "value", "source", "time", "note")
_METADATA: Final = "memagent."
_ROW_GROUP_ROWS: Final = 4096
_ROW_GROUP_NUMBERS: Final = 1 << 21
"""About how many ids and log-probs are in a row group: 8 MB before compression."""
_LEVEL: Final = 6
_PAGE_BYTES: Final = 8 << 20
"""Ids are written without a dictionary, in large pages, so that zstd finds what prompts share."""
_ROWS_AT_ONCE: Final = 64
"""Rows that are unpacked at a time when a file is read."""


class ParquetWriter:
    """Writes runs to a file, one after the other.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._pa = pyarrow("Parquet export")
        self._schema = _schema(self._pa)
        self._writer = self._pa.parquet.ParquetWriter(
            file,
            self._schema,
            compression="zstd",
            compression_level=_LEVEL,
            data_page_size=_PAGE_BYTES,
            use_dictionary=[name for name in _COLUMNS if name not in _NUMBER_LISTS],
            column_encoding={"logprobs.list.element": "BYTE_STREAM_SPLIT"},
        )
        self._templates: dict[str, Mapping[str, str]] = {}
        self._begin_group()

    def write(self, run: LoggedRun) -> None:
        """Add a run."""
        self._templates.update(run.templates or {})
        rewards = run.rewards_by_conversation()
        run_values = _run_values(run, rewards.get(None, []))
        empty = True
        for conversation in run.conversations:
            empty = False
            self._add({**run_values, **_conversation_values(conversation, rewards.get(conversation.id, []))})
        if empty:
            self._add(run_values)

    def close(self) -> None:
        """Write the rest and the file's end; the file stays open."""
        facts = {"format": FORMAT_NAME, "format_version": str(FORMAT_VERSION), "templates": json.dumps(self._templates)}
        try:
            self._end_group()
            self._writer.add_key_value_metadata({_METADATA + name: value for name, value in facts.items()})
        finally:
            self._writer.close()

    def _add(self, values: Mapping[str, Any]) -> None:
        for name, column in self._group.items():
            column.append(values.get(name))
        self._rows += 1
        if self._rows == _ROW_GROUP_ROWS or sum(map(len, self._numbers.values())) >= _ROW_GROUP_NUMBERS:
            self._end_group()

    def _begin_group(self) -> None:
        self._rows = 0
        self._numbers = {name: _Numbers(_NUMBER_LISTS[name]) for name in _NUMBER_LISTS}
        self._group: dict[str, Any] = {name: self._numbers.get(name, []) for name in _COLUMNS}

    def _end_group(self) -> None:
        if not self._rows:
            return
        arrays = [
            column.arrow(self._pa)
            if isinstance(column, _Numbers)
            else self._pa.array(column, self._schema.field(name).type)
            for name, column in self._group.items()
        ]
        self._writer.write_batch(self._pa.record_batch(arrays, schema=self._schema))
        self._begin_group()


class _Numbers:
    """A column of lists of numbers, four bytes each."""

    def __init__(self, kind: str) -> None:
        self._values: array[Any] = array(kind)
        self._ends = array("i", [0])
        self._missing: list[bool] = []

    def __len__(self) -> int:
        return len(self._values)

    def append(self, numbers: Sequence[float] | None) -> None:
        """Add a list, or its absence."""
        self._values.extend(numbers or ())
        self._ends.append(len(self._values))
        self._missing.append(numbers is None)

    def arrow(self, pa: Any) -> Any:
        """The column as an Arrow array, on the same memory."""
        kind = pa.uint32() if self._values.typecode == "I" else pa.float32()
        values = pa.Array.from_buffers(kind, len(self._values), [None, pa.py_buffer(self._values)])
        ends = pa.Array.from_buffers(pa.int32(), len(self._ends), [None, pa.py_buffer(self._ends)])
        return pa.ListArray.from_arrays(ends, values, mask=pa.array(self._missing, pa.bool_()))


def read(source: Path, file: IO[bytes]) -> Iterator[LoggedRun]:
    """The runs of a file, in order.

    Raises:
        RunLogError: it is not a Parquet file or not an export, is of a newer version, or is damaged.
        MissingExtraError: pyarrow is not installed.
    """
    pa = pyarrow("Parquet import")
    try:
        yield from _read(pa, source, file)
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise RunLogError(
            f"{source} cannot be imported: {error}", hint="It is not a Parquet file, or it is damaged; export it again."
        ) from error


def _read(pa: Any, source: Path, file: IO[bytes]) -> Iterator[LoggedRun]:
    parquet = pa.parquet.ParquetFile(file)
    metadata = {name.decode(): value for name, value in (parquet.metadata.metadata or {}).items()}
    version = metadata.get(_METADATA + "format_version", b"")
    check_format(source, metadata.get(_METADATA + "format", b"").decode(), int(version) if version.isdigit() else None)
    columns = [name for name in _COLUMNS if not (int(version) == OLDER_VERSION and name in _NEW)]
    if missing := set(columns) - set(parquet.schema_arrow.names):
        raise RunLogError(f"{source} lacks the columns {', '.join(sorted(missing))}", hint="Export it again.")
    templates = msgspec.convert(json.loads(metadata.get(_METADATA + "templates", b"{}")), dict[str, dict[str, str]])
    held: list[dict[str, Any]] = []
    for batch in parquet.iter_batches(batch_size=_ROWS_AT_ONCE):
        for row in batch.select(columns).cast(_schema(pa, columns)).to_pylist():
            if held and held[-1]["run_id"] != row["run_id"]:
                yield _run(int(version), held, templates)
                held = []
            for name, kind in _NUMBER_LISTS.items():
                row[name] = None if row[name] is None else array(kind, row[name])  # a list takes eight times as much
            held.append(row)
    if held:
        yield _run(int(version), held, templates)


def _run(version: int, rows: Sequence[Mapping[str, Any]], templates: Mapping[str, Mapping[str, str]]) -> LoggedRun:
    first = rows[0]
    parsed = {name: json.loads(first[name]) for name in ("document", "settings", "run_trace", "run_events")}
    values = {**first, **parsed, "trace": parsed["run_trace"], "began": first["run_began"], "ended": first["run_ended"]}
    given = [(None, first["run_rewards"]), *((row["conversation"], row["rewards"] or ()) for row in rows)]
    rewards = [Reward(first["run_id"], **each, conversation=number) for number, some in given for each in some]
    return LoggedRun.read(
        version,
        msgspec.convert(values, RunRecord),
        [_conversation(version, row) for row in rows if row["conversation"] is not None],
        msgspec.convert(parsed["run_events"], list[LoggedEvent]),
        sorted(rewards, key=lambda reward: reward.time),
        templates,
    )


def _run_values(run: LoggedRun, rewards: Sequence[Reward]) -> dict[str, Any]:
    record = run.record
    return {
        **{name: getattr(record, name) for name in _RUN_COLUMNS if hasattr(record, name)},
        "run_began": record.began,
        "run_ended": record.ended,
        "document": json.dumps(record.document),
        "document_key": record.document["key"],
        "document_name": record.document["name"].encode("utf-8", "replace").decode(),
        "settings": json.dumps(record.settings),
        "run_trace": json.dumps(record.trace),
        "run_events": json.dumps(list(map(asdict, run.events))),
        "run_rewards": list(map(_reward_values, rewards)),
    }


def _conversation_values(conversation: Conversation, rewards: Sequence[Reward]) -> dict[str, Any]:
    texts = {"text": conversation.text, "memory": conversation.memory}
    escaped = [name for name, text in texts.items() if text is not None and not _is_utf8(text)]
    return {
        "conversation": conversation.id,
        **first_span(conversation),
        "outcome": conversation.outcome.value,
        "writes": conversation.writes.value,
        "parents": list(conversation.parents),
        "reads": list(map(asdict, conversation.reads)),
        **{name: getattr(conversation, name) for name in _PLAIN_COLUMNS},
        "sampling": json.dumps(conversation.sampling),
        "trace": json.dumps(conversation.trace),
        "events": json.dumps(list(map(asdict, conversation.events))),
        **{name: json.dumps(text)[1:-1] if name in escaped else text for name, text in texts.items()},
        "prompt_token_ids": conversation.prompt_token_ids,
        "completion_token_ids": conversation.token_ids,
        "logprobs": conversation.logprobs,
        "rewards": list(map(_reward_values, rewards)),
        "escaped": escaped,
    }


def _conversation(version: int, row: Mapping[str, Any]) -> Conversation:
    parsed = {name: json.loads(row[name]) for name in ("sampling", "trace", "events")}
    texts = {name: json.loads(f'"{row[name]}"') for name in row["escaped"] or ()}
    numbers = {"id": row["conversation"], "token_ids": row["completion_token_ids"]}
    return read_conversation(version, {**row, **parsed, **texts, **numbers})


def _reward_values(reward: Reward) -> dict[str, Any]:
    return {name: getattr(reward, name) for name in _REWARD}


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _schema(pa: Any, columns: Sequence[str] = tuple(_COLUMNS)) -> Any:
    span = [(name, pa.int64()) for name in SPAN]
    reward = [(name, pa.float64() if name in {"value", "time"} else pa.string()) for name in _REWARD]
    lists = {
        "ids": pa.list_(pa.uint32()),
        "logprobs": pa.list_(pa.float32()),
        "names": pa.list_(pa.string()),
        "spans": pa.list_(pa.struct(span)),
        "rewards": pa.list_(pa.struct(reward)),
    }
    return pa.schema(
        [(name, lists.get(kind) or pa.type_for_alias(kind)) for name, kind in _COLUMNS.items() if name in columns]
    )


def pyarrow(needed_for: str) -> Any:
    """The package with its part for Parquet.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise MissingExtraError("export", needed_for) from error
