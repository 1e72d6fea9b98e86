"""A row of the table: one document and one question, with the answer, what it rests on, and what it cost."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from memagent_graph.corpus.typed_columns import TypedColumn, typed_values
from memagent_graph.errors import MemAgentError
from memagent_graph.events import EventKind, StopReason
from memagent_graph.provenance.evidence import Evidence
from memagent_graph.results import ReadResult

_ID_CHARACTERS: Final = 32
INVALID_ANSWER: Final = "InvalidAnswer"
NOT_HELD: Final = "value_not_in_column"
"""The event of a value that a typed column cannot hold."""


class Quote(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """A passage of the document that supports a line of the final memory."""

    quote: str
    """The document's text, unchanged."""
    page: int | None
    """The page on which it begins, counted from 1, if the document has pages."""
    section: str | None
    """The heading or numbered clause that it begins under; without one, its page or source, if there is one."""
    chunk: int
    start_char: int
    end_char: int
    line: str
    """The line of memory that it supports."""
    coverage: float
    """The share of the line's words, 0 to 1, that are in its quotes."""

    @classmethod
    def of(cls, evidence: Evidence) -> Quote:
        """A reader's evidence as a quote."""
        return cls(
            evidence.quote,
            evidence.page,
            evidence.section,
            evidence.chunk_index,
            evidence.start_char,
            evidence.end_char,
            evidence.line,
            evidence.coverage,
        )


class RowUsage(msgspec.Struct, frozen=True):
    """What a row cost, over all processes that took part."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    calls: int = 0
    seconds: float = 0.0


class RowEvent(msgspec.Struct, frozen=True):
    """Something that happened while the row was read; `chunk` is None at the answer."""

    kind: str
    chunk: int | None
    detail: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One document and one question.

    Exactly one of `stop_reason` and `error` is set; both are if the answer does not fit the schema that was asked for.
    """

    id: str
    """A hash of document, text, question and settings; the id of the run that read it."""
    document: str
    """The document's name: its path below the input's root, its id in a table, or the table's name and row number."""
    digest: str | None
    """The sha256 of its text; None if it has none."""
    question: str
    answer: str | None = None
    value: Any = None
    """The answer as a typed value, where one was asked for; JSON-ready. None if it does not fit."""
    memory: str | None = None
    evidence: tuple[Quote, ...] = ()
    usage: RowUsage = RowUsage()
    chunks: int = 0
    stop_reason: str | None = None
    events: tuple[RowEvent, ...] = ()
    error: str | None = None
    """What went wrong, if there is no answer because of that."""
    error_kind: str | None = None
    """The error's class; `InvalidAnswer` if the answer does not fit the schema."""
    model: str = ""
    metadata: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The columns of the input that were to be kept."""

    @property
    def failed(self) -> bool:
        """Whether there is no answer because something went wrong."""
        return self.error is not None


@dataclass(frozen=True, slots=True)
class Told:
    """Removes from messages what a table must not show: where the input's root is on this machine."""

    roots: Sequence[str] = ()

    def __call__(self, text: str) -> str:
        """The text with paths relative to the roots."""
        known = {variant for root in self.roots if root for variant in (root, os.path.abspath(root))}  # noqa: PTH100
        for root in sorted((each.rstrip("/\\") for each in known), key=len, reverse=True):
            text = re.sub(rf"(?<![\w/.-]){re.escape(root)}[/\\]", "", text)
            if len(root) > 1 and root.startswith("/"):
                text = re.sub(rf"(?<![\w/.-]){re.escape(root)}(?![\w-])", ".", text)
        return text


def row_id(document: str, digest: str, question: str, settings: str) -> str:
    """The id of a run: equal for the same document, text, question and settings, on every machine."""
    parts = "\0".join((document, digest, question, settings))
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_CHARACTERS]


def row_of(
    result: ReadResult,
    document: str,
    question: str,
    metadata: Mapping[str, Any],
    evidence: Sequence[Evidence],
    columns: Sequence[TypedColumn] = (),
) -> Row:
    """The row of a read that has ended.

    Args:
        result: what the read returned.
        document: the document's name.
        question: what was asked.
        metadata: columns of the input.
        evidence: the result's.
        columns: the typed columns of the table. An event says which of them cannot hold a value of the answer.

    Raises:
        ValueError: the answer's Pydantic model cannot be written as JSON.
    """
    usage, value = result.usage, result.json_value
    not_held = typed_values(columns, value).not_held
    events = [RowEvent(each.kind.value, each.chunk_index, each.detail) for each in result.events]
    events += [RowEvent(NOT_HELD, None, each) for each in not_held]
    error = _misfit(result)
    return Row(
        id=result.run_id,
        document=document,
        digest=digest_of(result.document["key"]),
        question=question,
        answer=result.answer,
        value=value,
        memory=result.memory,
        evidence=tuple(map(Quote.of, evidence)),
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


def _misfit(result: ReadResult) -> str | None:
    """Why a structured answer has no value; None if it has one, or if the read was stopped by a limit."""
    if result.response_format is None:
        return None
    if result.stop_reason is StopReason.NO_ANSWER:
        return "the policy wrote no answer"
    if result.stop_reason is StopReason.INVALID_ANSWER:
        kinds = {each.kind: each.detail for each in result.events}
        return kinds.get(EventKind.INVALID_ANSWER) or "the answer does not fit the schema"
    return None


def failed_row(
    identity: str, document: str, digest: str | None, question: str, error: Exception, told: Told,
    metadata: Mapping[str, Any],
) -> Row:  # fmt: skip
    """The row of a document or question that could not be read."""
    words = (
        f"{error.message.rstrip('.')}. {error.hint}" if isinstance(error, MemAgentError) and error.hint else str(error)
    )
    return Row(
        id=identity,
        document=document,
        digest=digest,
        question=question,
        error=told(words) or type(error).__name__,
        error_kind=type(error).__name__,
        metadata=metadata,
    )


def digest_of(key: str) -> str:
    """The sha256 in a key of the document store."""
    return key.partition(":")[2]


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Row)


def encoded(row: Row) -> bytes:
    """The row as JSON, for the ledger. Half surrogate pairs, which JSON cannot hold, become question marks."""
    try:
        return _ENCODER.encode(row)
    except UnicodeEncodeError:
        return _ENCODER.encode(_storable(msgspec.to_builtins(row)))


def decoded_row(data: bytes) -> Row:
    """The row from its JSON."""
    return _DECODER.decode(data)


def _storable(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_storable(key): _storable(each) for key, each in value.items()}
        case list() | tuple():
            return [_storable(each) for each in value]
        case _:
            return value
