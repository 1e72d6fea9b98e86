"""A call of the policy as one record: the request, the completion, and the result.

Graph steps, run state, trace and log use the same record. Only the log has the text and the token ids of the
completion; state and trace leave them out. A new field of `Completion` appears in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from memagent_graph.events import ReadEvent
from memagent_graph.policy import Completion, FinishReason, TokenUsage

if TYPE_CHECKING:
    from memagent_graph.documents.chunking import Chunk


class Writes(StrEnum):
    """What a role's reply is used for: what it writes."""

    MEMORY = "memory"
    """The new memory of the call's branch."""
    DECISION = "decision"
    """A decision about the next step. The memory does not change."""
    ANSWER = "answer"
    """An answer to the run's question."""


@dataclass(frozen=True, slots=True)
class Span:
    """The position of a chunk in the document: its index, and its start and end in characters and UTF-8 bytes."""

    index: int
    start_char: int
    end_char: int
    start_byte: int
    end_byte: int
    tokens: int
    shortened: bool = field(default=False, compare=False)
    """Whether the chunk was shortened, because escaping made it too long. Logs have an event instead."""
    splits: bool = field(default=False, compare=False)
    """Whether the chunk ends inside a character: one that is too long, or that does not end with a token. Logs have an
    event instead."""

    @classmethod
    def of(cls, chunk: Chunk, *, shortened: bool = False) -> Span:
        """Return the span of a chunk."""
        start, end = (chunk.start_char, chunk.end_char), (chunk.start_byte, chunk.end_byte)
        return cls(chunk.index, *start, *end, chunk.tokens, shortened, chunk.splits)

    @property
    def stored(self) -> dict[str, Any]:
        """The span as plain data, for the state of a graph. `Span(**stored)` is an equal span."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


_NO_SPAN: Final = Span(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the policy. Tokens, seconds and events are totals over all attempts."""

    id: str
    """The unique id of the call."""
    node: str
    """The node of the graph that made the call."""
    branch: str
    """The branch, if several run in parallel; "" is the trunk."""
    role: str
    """The role, such as "update" or "answer"."""
    slot: int
    """The index of the call among the calls of its role and branch: the chunk's index, plus the number of chunks that
    earlier passes of the branch read. It identifies equal calls of different runs. A negative slot means that the call
    read a chunk again within a pass, or an excerpt."""
    writes: Writes
    text: str | None = None
    """The result: the new memory, the answer without reasoning, or the decision. None if it was redacted, or, in a
    graph's state, if it equals `memory`."""
    reads: tuple[Span, ...] = ()
    """The chunks in the prompt."""
    parents: tuple[str, ...] = ()
    """The ids of the calls whose output is in the prompt."""
    completion: Completion = field(default=Completion("", FinishReason.OTHER, ""), compare=False)
    """The completion of the last attempt. In states and traces it has no text, token ids and log-probs."""
    usage: TokenUsage = field(default=TokenUsage(0, 0))
    seconds: float = 0.0
    events: tuple[ReadEvent, ...] = ()

    @property
    def chunk_index(self) -> int | None:
        """The index of the first chunk that the call read; None if it read no chunk, an excerpt, or a chunk again."""
        return self.reads[0].index if self.reads and self.slot >= 0 else None

    @property
    def extent_values(self) -> dict[str, int]:
        """The part of the document that the call read, from its first chunk to its last; zeros if it read none."""
        first_span = self.reads[0] if self.reads else _NO_SPAN
        last_span = max(self.reads, key=lambda span: span.end_byte, default=_NO_SPAN)
        return {
            "start_char": first_span.start_char,
            "end_char": last_span.end_char,
            "start_byte": first_span.start_byte,
            "end_byte": last_span.end_byte,
            "chunk_tokens": sum(span.tokens for span in self.reads),
        }


def pack_call(call: Call, memory: str | None = None) -> dict[str, Any]:
    """Return a call as plain data for the state of a graph. Its text is left out if it equals `memory`."""
    text = None if call.text == memory else call.text
    completion = replace(call.completion, text="", prompt_token_ids=None, token_ids=None, logprobs=None, notes=())
    values: dict[str, Any] = msgspec.to_builtins(replace(call, text=text, completion=completion))
    return values


def unpack_calls(records: Iterable[Mapping[str, Any]], state: Mapping[str, Any]) -> list[Call]:
    """Return the calls in `steps` of a state. `state` is the state after them, or the change that contains them."""
    calls = (msgspec.convert(record, Call) for record in records)
    return [call if call.text is not None else replace(call, text=state.get("memory", "")) for call in calls]
