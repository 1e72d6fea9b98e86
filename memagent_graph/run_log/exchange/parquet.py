"""Runs as a Parquet file: a row per conversation, with repeated columns of the run (compression makes that cheap).

`datasets.load_dataset("parquet", data_files=...)` reads it; so do pandas, Polars and DuckDB.

docs/reference/tables.md lists the columns; `scripts/write_tables.py` writes it.

A run without conversations has one row, in which `conversation` and all columns after it are null. The templates of
prompts, by fingerprint, are JSON in the file's key-value metadata (`memagent.templates`), because many runs share few
templates. `memagent.format` in the same metadata contains a checksum of the columns.

Lone surrogates cannot be encoded as UTF-8. If `text` or `memory` contains one, the name of the column is in `escaped`
and the text is written as in a JSON string.
"""

from __future__ import annotations

import json
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from memagent_graph.errors import RunLogError
from memagent_graph.grouping import group_values
from memagent_graph.policy import ARRAY_TYPES
from memagent_graph.run_log.records import Conversation, LoggedEvent, LoggedRun, Reward, RunRecord
from memagent_graph.run_log.tables import MAX_RUN_SIZE, MAX_TEXT_BYTES, RECORD_COLUMNS, Column, bound_records
from memagent_graph.storage.parquet_rows import iter_rows, load_pyarrow, open_parquet, require_readable_row_groups
from memagent_graph.trace import Span

_CONVERSATION_COLUMNS: Final = {
    "conversation" if name == "id" else name: (name, column) for name, column in RECORD_COLUMNS[Conversation].items()
}
_RUN_COLUMNS: Final = {
    f"run_{name}" if name != "run_id" and name in _CONVERSATION_COLUMNS else name: (name, column)
    for name, column in RECORD_COLUMNS[RunRecord].items()
}
"""The attribute of the record and its type, by column."""
_REWARDS_COLUMN: Final = Column("", "rewards")
COLUMNS: Final = {
    **{name: column for name, (_, column) in _RUN_COLUMNS.items()},
    "run_events": RECORD_COLUMNS[Conversation]["events"],
    "run_rewards": _REWARDS_COLUMN,
    **{name: _CONVERSATION_COLUMNS[name][1] for name in ("conversation", *_CONVERSATION_COLUMNS)},
    "rewards": _REWARDS_COLUMN,
    "escaped": Column("", "names"),
}
"""All columns of the file, in order."""
_LONG_TEXTS: Final = tuple(field.name for field in fields(Conversation) if field.type == "LongText")
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_LIST_COLUMNS: Final = [name for name, column in COLUMNS.items() if column.arrow in {"names", "spans", "rewards"}]
_REWARD_COLUMNS: Final = {
    name: column for name, column in RECORD_COLUMNS[Reward].items() if name not in {"id", "run_id", "conversation"}
}
_METADATA_PREFIX: Final = "memagent."
_FORMAT: Final = "memagent-runs"
_VERSION: Final = f"{_FORMAT} {zlib.crc32(repr([(name, COLUMNS[name].arrow) for name in COLUMNS]).encode()):08x}"
_ROW_GROUP_ROWS: Final = 4096
_ROW_GROUP_SIZE: Final = 1 << 23
"""The approximate number of ids, log-probs and characters of texts in a row group."""
_COMPRESSION_LEVEL: Final = 6
_PAGE_BYTES: Final = 8 << 20
"""The size of a page. Ids are written without a dictionary in large pages, so that zstd finds common prefixes."""
_MAX_RUN_BYTES: Final = 4 * MAX_RUN_SIZE
_OBJECT_BYTES: Final = 256
"""The approximate memory of a list's item that is not a number."""


def write(file: IO[bytes], runs: Iterable[LoggedRun]) -> None:
    """Write runs to a file, which stays open. One group of rows is in memory.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    pa = load_pyarrow("export", "Parquet export")
    schema = _make_schema(pa)
    templates: dict[str, Mapping[str, str]] = {}
    with pa.parquet.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=_COMPRESSION_LEVEL,
        data_page_size=_PAGE_BYTES,
        use_dictionary=[name for name in COLUMNS if name not in ARRAY_TYPES],
        column_encoding={"logprobs.list.element": "BYTE_STREAM_SPLIT"},
    ) as writer:
        for rows in _group_rows(runs, templates):
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
        metadata = {"format": _VERSION, "templates": json.dumps(templates)}
        writer.add_key_value_metadata({_METADATA_PREFIX + name: value for name, value in metadata.items()})


def _group_rows(
    runs: Iterable[LoggedRun], templates: dict[str, Mapping[str, str]]
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the rows of runs in groups, and add the wording of their prompts to `templates`."""
    rows: list[Mapping[str, Any]] = []
    size = 0
    for run in runs:
        templates.update(run.templates)
        for row in _make_rows(run):
            rows.append(row)
            size += sum(len(row.get(name) or ()) for name in (*_LONG_TEXTS, *ARRAY_TYPES))
            if size >= _ROW_GROUP_SIZE or len(rows) == _ROW_GROUP_ROWS:
                yield rows
                rows, size = [], 0
    if rows:
        yield rows


def _make_rows(run: LoggedRun) -> Iterator[dict[str, Any]]:
    rewards = group_values((reward.conversation, reward) for reward in run.rewards)
    run_values = {
        **_export_record(run.record, _RUN_COLUMNS),
        "run_events": COLUMNS["run_events"].export(tuple(run.events)),
        "run_rewards": list(map(asdict, rewards.get(None, []))),
    }
    for conversation in run.conversations:
        yield {**run_values, **_pack_conversation(conversation, rewards.get(conversation.id, []))}
    if not run.conversations:
        yield run_values


def read(source: Path, file: IO[bytes]) -> Iterator[LoggedRun]:
    """Yield the runs of a file, in order. Their conversations are lists.

    Raises:
        RunLogError: the file is not a Parquet file, not an export, of another version, or damaged.
        MissingExtraError: pyarrow is not installed.
    """
    pa = load_pyarrow("export", "Parquet import")
    try:
        yield from _read(pa, source, file)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunLogError(
            f"{source} cannot be imported: {error}",
            hint="Pass a run log, or a file written by `memagent export`.",
        ) from error


def _read(pa: Any, source: Path, file: IO[bytes]) -> Iterator[LoggedRun]:
    parquet_file = open_parquet(file, "export", "Parquet import")
    metadata = {name.decode(): value for name, value in (parquet_file.metadata.metadata or {}).items()}
    version = metadata.get(_METADATA_PREFIX + "format", b"").decode()
    if not version.startswith(_FORMAT):
        raise RunLogError(f"{source} is not an export of runs", hint="Pass a file written by `memagent export`.")
    if version != _VERSION:
        raise RunLogError(
            f"{source} was exported by another version of this package",
            hint="Export the runs again with this version.",
        )
    if missing := COLUMNS.keys() - set(parquet_file.schema_arrow.names):
        raise RunLogError(f"{source} lacks the columns {', '.join(sorted(missing))}", hint="Export the runs again.")
    require_readable_row_groups(parquet_file)
    _require_grouped_rows(parquet_file, source)
    templates = msgspec.convert(
        json.loads(metadata.get(_METADATA_PREFIX + "templates", b"{}")), dict[str, dict[str, str]]
    )
    rows: list[dict[str, Any]] = []
    size = 0
    for table in iter_rows(parquet_file, list(COLUMNS)):
        batch = table.select(list(COLUMNS)).cast(_make_schema(pa))
        size += batch.nbytes + _OBJECT_BYTES * sum(len(batch[name].flatten()) for name in _LIST_COLUMNS)
        if size > _MAX_RUN_BYTES:
            raise RunLogError(
                f"a run in {source} has more than {_MAX_RUN_BYTES:,} bytes",
                hint="Export the log again without this run.",
            )
        for row in batch.to_pylist():
            if rows and rows[-1]["run_id"] != row["run_id"]:
                yield _build_run(rows, templates, source)
                rows = []
                size = batch.nbytes
            for name, type_code in ARRAY_TYPES.items():
                # A list needs eight times as much memory.
                row[name] = None if row[name] is None else array(type_code, row[name])
            rows.append(row)
    if rows:
        yield _build_run(rows, templates, source)


def _require_grouped_rows(parquet: Any, source: Path) -> None:
    """Require that the rows of each run are together. Otherwise a part of a run would be imported as the run."""
    run_ids = chain.from_iterable(batch["run_id"].to_pylist() for batch in iter_rows(parquet, ["run_id"]))
    group_counts = Counter(run_id for run_id, _ in groupby(run_ids))
    for run_id, count in group_counts.items():
        if count > 1:
            raise RunLogError(
                f"the rows of run {run_id!r} in {source} are not together",
                hint="Import the original export. This file may have been sorted or shuffled.",
            )


def _build_run(
    rows: Sequence[Mapping[str, Any]], templates: Mapping[str, Mapping[str, str]], source: Path
) -> LoggedRun:
    first_row = rows[0]
    record = _restore_values(first_row, _RUN_COLUMNS)
    events = msgspec.convert(json.loads(first_row["run_events"]), list[LoggedEvent])
    unpacked = (_unpack_conversation(row) for row in rows if row["conversation"] is not None)
    conversations = list(bound_records(unpacked, f"run {first_row['run_id']} in {source}"))
    rewards = [Reward(first_row["run_id"], **values) for values in first_row["run_rewards"]]
    for row in rows:
        rewards += [
            Reward(row["run_id"], **values, conversation=row["conversation"]) for values in row["rewards"] or ()
        ]
    used_templates = {conversation.template for conversation in conversations}
    return LoggedRun(
        msgspec.convert(record, RunRecord),
        conversations,
        events,
        sorted(rewards, key=lambda reward: reward.time),
        {fingerprint: wording for fingerprint, wording in templates.items() if fingerprint in used_templates},
    )


def _pack_conversation(conversation: Conversation, rewards: Sequence[Reward]) -> dict[str, Any]:
    values = _export_record(conversation, _CONVERSATION_COLUMNS)
    escaped = [name for name in _LONG_TEXTS if _SURROGATES.search(values[name] or "")]
    values |= {name: json.dumps(values[name])[1:-1] for name in escaped}
    return {**values, "rewards": list(map(asdict, rewards)), "escaped": escaped}


def _unpack_conversation(row: Mapping[str, Any]) -> Conversation:
    values = _restore_values(row, _CONVERSATION_COLUMNS)
    values |= {name: json.loads(f'"{row[name]}"') for name in row["escaped"] or ()}
    if any(len(values[name] or "") > MAX_TEXT_BYTES for name in _LONG_TEXTS):
        raise ValueError(f"a text has more than {MAX_TEXT_BYTES:,} bytes")
    numbers = {name: values.pop(name) for name in ARRAY_TYPES}
    return replace(msgspec.convert(values, Conversation), **numbers)


def _export_record(record: Any, columns: Mapping[str, tuple[str, Column]]) -> dict[str, Any]:
    return {column_name: column.export(getattr(record, name)) for column_name, (name, column) in columns.items()}


def _restore_values(row: Mapping[str, Any], columns: Mapping[str, tuple[str, Column]]) -> dict[str, Any]:
    return {name: column.restore(row[column_name]) for column_name, (name, column) in columns.items()}


def _make_schema(pa: Any) -> Any:
    def make_list(columns: Mapping[str, Column]) -> Any:
        return pa.list_(pa.struct([(name, pa.type_for_alias(column.arrow)) for name, column in columns.items()]))

    lists = {
        "ids": pa.list_(pa.uint32()),
        "logprobs": pa.list_(pa.float32()),
        "names": pa.list_(pa.string()),
        "spans": make_list(RECORD_COLUMNS[Span]),
        "rewards": make_list(_REWARD_COLUMNS),
    }
    return pa.schema(
        [(name, lists.get(column.arrow) or pa.type_for_alias(column.arrow)) for name, column in COLUMNS.items()]
    )
