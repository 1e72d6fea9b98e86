"""A call of the policy as one record: what was asked, what came back, and what was made of it.

Steps of a graph, the run's state, its trace and its log have the same record. State and trace keep it without the
completion's text and token ids, which only the log has; a field that `Completion` gets is in all of them.
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
    """What the reply to a role is."""

    MEMORY = "memory"
    """The memory of its branch."""
    DECISION = "decision"
    """What to do next; memory stays as it is."""
    ANSWER = "answer"
    """An answer to the run's question."""


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk of the document: its number and its place, in characters and in UTF-8 bytes."""

    index: int
    start_char: int
    end_char: int
    start_byte: int
    end_byte: int
    tokens: int
    shortened: bool = field(default=False, compare=False)
    """Whether it is shorter than other chunks, because escaping would make it too long. Logs have an event instead."""
    splits: bool = field(default=False, compare=False)
    """Whether it ends inside a character, which was too long or which no token ends. Logs have an event instead."""

    @classmethod
    def of(cls, chunk: Chunk, *, shortened: bool = False) -> Span:
        """Return a chunk's place."""
        start, end = (chunk.start_char, chunk.end_char), (chunk.start_byte, chunk.end_byte)
        return cls(chunk.index, *start, *end, chunk.tokens, shortened, chunk.splits)

    @property
    def stored(self) -> dict[str, Any]:
        """The span as plain data, for a graph's state; `Span(**stored)` is the span again."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


_NO_TOKENS: Final = TokenUsage(0, 0)
_NOTHING_CAME_BACK: Final = Completion("", FinishReason.OTHER, "")


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the policy. If it was attempted several times, tokens, seconds and events are those of all."""

    id: str
    """The unique id of this execution of a step."""
    node: str
    """The graph's node that asked."""
    branch: str
    """Its branch, if several run in parallel; "" is the trunk."""
    role: str
    """The role, such as "update" or "answer"."""
    slot: int
    """Its place among the calls of that role and branch (a chunk's number); runs are compared by it. Below 0, what
    the call reads belongs to no chunk: it was read before, or it is an excerpt."""
    writes: Writes
    text: str | None = None
    """What was made of it: the memory after it, the answer without reasoning, or the decision. None if it was
    redacted, or, in a graph's state, if it is the state's `memory`."""
    reads: tuple[Span, ...] = ()
    """The chunks in the prompt."""
    parents: tuple[str, ...] = ()
    """The calls whose output is in the prompt."""
    completion: Completion = field(default=_NOTHING_CAME_BACK, compare=False)
    """What came back, the newest of several attempts. In states and traces without text, token ids and log-probs."""
    usage: TokenUsage = _NO_TOKENS
    seconds: float = 0.0
    events: tuple[ReadEvent, ...] = ()
    changed: bool = field(default=False, compare=False)
    """Whether it changed its branch's memory."""

    @property
    def chunk_index(self) -> int | None:
        """The first chunk that it read; None if it read none, or what belongs to no chunk."""
        return self.reads[0].index if self.reads and self.slot >= 0 else None


def stored_call(call: Call, memory: str | None = None) -> dict[str, Any]:
    """Return a call as plain data for a graph's state, whose `memory` after the call need not be there twice."""
    text = None if call.text == memory else call.text
    values: dict[str, Any] = msgspec.to_builtins(replace(call, text=text, completion=call.completion.facts))
    return values


def load_calls(records: Iterable[Mapping[str, Any]], state: Mapping[str, Any]) -> list[Call]:
    """Return the calls among a state's `steps`; `state` is the one after them, or the change that has them."""
    calls = (msgspec.convert(record, Call) for record in records)
    return [call if call.text is not None else replace(call, text=state.get("memory", "")) for call in calls]
