"""A row of the table: one document and one question, with the answer, its evidence and its cost.

A row is JSON in the ledger and Arrow in the table's parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from memagent_corpus.typed_columns import TypedColumn, convert_values
from memagent_graph.events import EventKind, StopReason
from memagent_graph.provenance.evidence import Evidence
from memagent_graph.results import ReadResult
from memagent_graph.storage.parquet_rows import load_pyarrow

_ID_CHARACTERS: Final = 32
INVALID_ANSWER: Final = "InvalidAnswer"
"""The `error_kind` of a row whose answer does not fit the schema."""
VALUE_NOT_IN_COLUMN: Final = "value_not_in_column"
"""The kind of the event for a value that its typed column cannot store."""


class RowQuote(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """A passage of the document that supports a line of the final memory."""

    quote: str
    """The passage, exactly as in the document."""
    page: int | None
    """The page on which the passage begins, counted from 1; None if the document has no pages."""
    section: str | None
    """The heading or numbered clause above the passage. If there is none, the page or source, if known."""
    chunk: int
    start_char: int
    end_char: int
    line: str
    """The line of memory that the passage supports."""
    coverage: float
    """The fraction of the line's words that occur in its quotes, 0 to 1."""

    @classmethod
    def of(cls, evidence: Evidence) -> RowQuote:
        """Convert evidence of a read to a quote."""
        names = [name for name in cls.__struct_fields__ if name != "chunk"]
        return cls(chunk=evidence.chunk_index, **{name: getattr(evidence, name) for name in names})


class RowUsage(msgspec.Struct, frozen=True):
    """The cost of a row, summed over all processes that read for it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    calls: int = 0
    seconds: float = 0.0


class RowEvent(msgspec.Struct, frozen=True):
    """An event during the read; `chunk` is None for events of the answer."""

    kind: str
    chunk: int | None
    detail: str


class CorpusRow(msgspec.Struct, frozen=True, kw_only=True):
    """One document and one question.

    Either `stop_reason` or `error` is set. Both are set if the answer does not fit the schema.
    """

    id: str
    """A hash of document name, text, question and settings. It is also the id of the run."""
    document: str
    """The document's name: its path below the input's root, its id in a table, or the table's name and row number."""
    digest: str | None
    """The SHA-256 of the text; None if the text could not be read."""
    question: str
    answer: str | None = None
    value: Any = None
    """The answer as a typed value, JSON-serializable; None if there is no schema or the answer does not fit it."""
    memory: str | None = None
    evidence: tuple[RowQuote, ...] = ()
    usage: RowUsage = RowUsage()
    chunks: int = 0
    stop_reason: str | None = None
    events: tuple[RowEvent, ...] = ()
    error: str | None = None
    """The error message of a failed row."""
    error_kind: str | None = None
    """The name of the error's class; `InvalidAnswer` if the answer does not fit the schema."""
    model: str = ""
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The input columns that are copied to the row."""


def compute_row_id(document: str, digest: str, question: str, settings: str) -> str:
    """Return the id of a row and its run: a hash of document name, text digest, question and settings."""
    key = "\0".join((document, digest, question, settings))
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_CHARACTERS]


def make_corpus_row(
    result: ReadResult,
    document: str,
    question: str,
    metadata: Mapping[str, Any],
    columns: Sequence[TypedColumn] = (),
) -> CorpusRow:
    """Build the row of a finished read.

    Args:
        result: the result of the read.
        document: the document's name.
        question: the question.
        metadata: input columns to copy.
        columns: the typed columns of the table. The row has an event for each value that its column cannot store.

    Raises:
        ValueError: the answer's Pydantic model cannot be serialised to JSON.
    """
    usage, value = result.usage, result.json_value
    problems = convert_values(columns, value)[1]
    events = [RowEvent(event.kind.value, event.chunk_index, event.detail) for event in result.events]
    events += [RowEvent(VALUE_NOT_IN_COLUMN, None, message) for message in problems]
    error = _explain_missing_value(result)
    return CorpusRow(
        id=result.run_id,
        document=document,
        digest=get_digest(result.document["key"]),
        question=question,
        answer=result.answer,
        value=value,
        memory=result.memory,
        evidence=tuple(map(RowQuote.of, result.evidence)),
        usage=RowUsage(
            usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.turns, round(usage.seconds, 3)
        ),
        chunks=result.chunks_read,
        stop_reason=result.stop_reason.value,
        events=tuple(events),
        error=error,
        error_kind=INVALID_ANSWER if error else None,
        model=result.model,
        metadata=metadata,
    )


def _explain_missing_value(result: ReadResult) -> str | None:
    """Return why a structured answer has no value; None if it has one, or if a limit stopped the read."""
    if result.response_format is None:
        return None
    if result.stop_reason is StopReason.NO_ANSWER:
        return "the policy wrote no answer"
    if result.stop_reason is StopReason.INVALID_ANSWER:
        details = {event.kind: event.detail for event in result.events}
        return details.get(EventKind.INVALID_ANSWER) or "the answer does not fit the schema"
    return None


def get_digest(key: str) -> str:
    """Return the SHA-256 in a key of the document store."""
    return key.partition(":")[2]


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(CorpusRow)


def encode_row(row: CorpusRow) -> bytes:
    """Encode a row as JSON. Lone surrogates, which JSON cannot represent, become question marks."""
    try:
        return _ENCODER.encode(row)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(row), ensure_ascii=False).encode("utf-8", "replace")
        return _ENCODER.encode(json.loads(text))


def decode_row(data: bytes) -> CorpusRow:
    """Decode a row from JSON."""
    return _DECODER.decode(data)


def list_column_values(row: CorpusRow, columns: Sequence[TypedColumn] = ()) -> dict[str, Any]:
    """Return a row's values by column, as they are written to Parquet.

    Args:
        row: the row.
        columns: the typed columns, if the answers have a schema.
    """
    values: dict[str, Any] = msgspec.to_builtins(row)
    values |= convert_values(columns, values["value"])[0]
    values["value"] = None if row.value is None else json.dumps(values["value"], ensure_ascii=False)
    values["metadata"] = json.dumps(values["metadata"], ensure_ascii=False) if row.metadata else None
    return values


_ARROW_TYPES: Final = {
    "str": "string", "str | None": "string", "int": "int64", "int | None": "int64", "float": "float64",
    "Any": "string", "Mapping[str, Any]": "string",
}  # fmt: skip
"""The names of Arrow types by annotation."""


def make_arrow_schema(typed_columns: Sequence[TypedColumn], metadata: Mapping[str, str] | None = None) -> Any:
    """Return the Arrow schema of a part: the fields of `CorpusRow`, then the typed columns."""
    arrow = load_pyarrow("corpus", "reading and writing tables")
    types: dict[str, Any] = {annotation: arrow.type_for_alias(name) for annotation, name in _ARROW_TYPES.items()}

    def list_fields(struct: type[msgspec.Struct]) -> list[tuple[str, Any]]:
        return [(name, types[str(annotation)]) for name, annotation in struct.__annotations__.items()]

    types["RowUsage"] = arrow.struct(list_fields(RowUsage))
    types["tuple[RowQuote, ...]"] = arrow.list_(arrow.struct(list_fields(RowQuote)))
    types["tuple[RowEvent, ...]"] = arrow.list_(arrow.struct(list_fields(RowEvent)))
    columns = [(column.name, column.make_arrow_type(arrow)) for column in typed_columns]
    return arrow.schema(list_fields(CorpusRow) + columns, metadata=metadata)
