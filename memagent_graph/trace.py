"""The calls of the policy in a run, and the trace that they form, from a log or from a running read.

A call is one record: the request, the completion, and the result. Graph steps, run state, trace and log use the same
record. Only the log has the text and the token ids of the completion; state and trace leave them out. A new field of
`Completion` appears in all of them.

The trace is a directed acyclic graph. A call has the chunks in its prompt, and its parents: the calls whose output is
in the prompt. From the trace follow the memory after a call, the path to an answer, timelines, evidence and rewards of
calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, pairwise
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


@dataclass(frozen=True, slots=True)
class MemoryUpdate:
    """The change of a branch's memory by a chunk or a merge, and its cost."""

    chunk_index: int | None
    """The index of the chunk; None if no chunk was read, as in a merge of branches."""
    start_char: int
    end_char: int
    start_byte: int
    end_byte: int
    """The end in UTF-8 bytes of the document, as for `DocumentStore.read`."""
    chunk_tokens: int
    memory: str
    changed: bool
    """Whether the memory differs from the previous memory."""
    progress: float | None
    """The fraction of the document that was read so far, 0 to 1; None if the document's length is unknown."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    events: tuple[ReadEvent, ...] = ()
    branch: str = ""
    """The branch, if several run in parallel; "" is the trunk."""
    call_id: str = field(default="", compare=False)
    """The id of the update's last call in the trace."""
    sources: tuple[str, ...] = field(default=(), compare=False)
    """The ids of the last calls of the updates whose memory it started from; several for a merge."""

    @property
    def chunk_number(self) -> int | None:
        """The chunk's number, counted from 1, for people."""
        return None if self.chunk_index is None else self.chunk_index + 1


class Trace:
    """A run's calls, each after its parents, and the memory updates that they made.

    Args:
        calls: the calls so far, in order. `add` adds the next call.
        document_bytes: the document's length; None if it is not known yet.
    """

    def __init__(self, calls: Iterable[Call] = (), document_bytes: int | None = None) -> None:
        self.document_bytes = document_bytes
        self.calls: list[Call] = []
        self.calls_by_id: dict[str, Call] = {}
        self.updates: list[MemoryUpdate] = []
        """The memory update of each chunk and each merge, in order. A chunk's calls on one branch are one update."""
        self._sources: dict[str, tuple[str, ...]] = {}
        """For each call: the last calls of the updates that its memory is based on."""
        self.update_indices: dict[str, int] = {}
        """For each call: the index of its update. Answers, and calls that neither read a chunk nor wrote a memory,
        belong to no update."""
        self._newest_update: dict[str, int] = {}
        """For each branch: the index of its newest update."""
        self._bytes_read = 0
        for call in calls:
            self.add(call)

    @property
    def answers(self) -> list[Call]:
        """The calls that answered, in order."""
        return [call for call in self.calls if call.writes is Writes.ANSWER]

    @property
    def tokens_shown(self) -> int:
        """The number of tokens of the document that the policy saw. Each part counts once."""
        return sum(span.tokens for span in {span for call in self.calls for span in call.reads})

    @property
    def newest_excerpt_call(self) -> Call | None:
        """The newest call with an excerpt in its prompt, if the run reads no chunks; otherwise None."""
        if any(update.chunk_index is not None for update in self.updates):
            return None
        return next((call for call in reversed(self.calls) if call.reads), None)

    @property
    def final_memory(self) -> str:
        """The memory that the newest answer is based on, or else the newest memory; "" before the first."""
        return self._join_memories(self.final_sources)

    @property
    def final_sources(self) -> tuple[int, ...]:
        """The indices of the updates whose joined memories are the final memory."""
        if answers := self.answers:
            return self._find_continued(self._sources[answers[-1].id], answers[-1].branch)
        return (len(self.updates) - 1,) if self.updates else ()

    @property
    def final_path(self) -> list[MemoryUpdate]:
        """The updates that led to the final memory, in order, including all branches that were merged into it."""
        indices = set(self.final_sources)
        for index in range(len(self.updates) - 1, -1, -1):
            if index in indices:
                indices.update(self.source_indices(self.updates[index]))
        return [self.updates[index] for index in sorted(indices)]

    def source_indices(self, update: MemoryUpdate) -> tuple[int, ...]:
        """Return the indices of the updates whose joined memories an update started from."""
        return self._find_updates(update.sources)

    def reads_one_passage(self, update: MemoryUpdate) -> bool:
        """Return whether an update read chunks that follow each other. Passages of a look-up do not count."""
        reads = self.calls_by_id[update.call_id].reads
        chunks = reads[:1] + tuple(span for span in reads[1:] if span.start_byte >= reads[0].end_byte)
        follow_each_other = all(span.end_byte == next_span.start_byte for span, next_span in pairwise(chunks))
        return update.chunk_index is not None and follow_each_other

    def continued_indices(self, update: MemoryUpdate) -> tuple[int, ...]:
        """Return the sources whose memories an update continues: the newest of its branch, or all for a merge.

        Empty if a branch begins to read, because it starts its own memory, and sees the source only in its prompt.
        """
        indices = self._find_continued(update.sources, update.branch)
        begins_branch = update.branch and update.chunk_index is not None
        return tuple(index for index in indices if not begins_branch or self.updates[index].branch == update.branch)

    def memory_before(self, call_id: str) -> str:
        """Return the memory that a call started from; several memories of a merge are joined."""
        return self._join_memories(self._find_continued(self._sources[call_id], self.calls_by_id[call_id].branch))

    def memory_after(self, call_id: str) -> str:
        """Return the memory after a call, on its branch."""
        call = self.calls_by_id[call_id]
        return (call.text or "") if call.writes is Writes.MEMORY else self.memory_before(call_id)

    @property
    def critical_path_length(self) -> int:
        """The length of the longest sequence of calls that must run one after the other.

        A call waits for its parents, for the previous call of its branch, and for the newest call of the trunk, because
        a decision must come first although it is in no prompt.
        """
        depths: dict[str, int] = {}
        depth_by_branch: dict[str, int] = {}
        for call in self.calls:
            parent_depths = [depths.get(parent, 0) for parent in call.parents]
            depths[call.id] = 1 + max((*parent_depths, depth_by_branch.get(call.branch, 0), depth_by_branch.get("", 0)))
            depth_by_branch[call.branch] = depths[call.id]
        return max(depths.values(), default=0)

    def add(self, call: Call) -> None:
        """Add the next call, which may start or change an update."""
        self.calls.append(call)
        self.calls_by_id[call.id] = call
        parent_sources = (
            (parent,) if parent in self.update_indices else self._sources.get(parent, ()) for parent in call.parents
        )
        self._sources[call.id] = tuple(dict.fromkeys(chain.from_iterable(parent_sources)))
        if call.writes is Writes.ANSWER or not (call.reads or call.writes is Writes.MEMORY):
            return
        index = self._newest_update.get(call.branch)
        if index is None or not call.reads or self.updates[index].chunk_index != call.chunk_index:
            index = self._newest_update[call.branch] = len(self.updates)
            self.updates.append(self._start_update(call))
        else:
            update = self.updates[index]
            # Like the earlier calls of its chunk, the call is based on the memory before the chunk.
            self._sources[call.id] = update.sources
            memory = (call.text or "") if call.writes is Writes.MEMORY else update.memory
            self.updates[index] = replace(
                update,
                memory=memory,
                changed=memory != self.memory_before(call.id),
                prompt_tokens=update.prompt_tokens + call.usage.prompt_tokens,
                completion_tokens=update.completion_tokens + call.usage.completion_tokens,
                seconds=update.seconds + call.seconds,
                events=(*update.events, *call.events),
                call_id=call.id,
            )
        self.update_indices[call.id] = index

    def add_change(self, change: Mapping[str, Any]) -> list[MemoryUpdate]:
        """Add the calls of a change of a graph's state, and return their updates.

        The update of a chunk is returned when all of the chunk is read.
        """
        calls, is_complete = unpack_calls(change.get("steps", ()), change), bool(change.get("chunks_read"))
        for call in calls:
            self.add(call)
        indices = dict.fromkeys(
            self.update_indices[call.id]
            for call in calls
            if (is_complete if call.reads else call.writes is Writes.MEMORY) and call.writes is not Writes.ANSWER
        )
        return [self.updates[index] for index in indices]

    def _join_memories(self, indices: Iterable[int]) -> str:
        return "\n".join(filter(None, (self.updates[index].memory for index in indices)))

    def _find_updates(self, sources: Iterable[str]) -> tuple[int, ...]:
        """Return the indices of the updates that calls belong to, without duplicates."""
        return tuple(dict.fromkeys(self.update_indices[source] for source in sources))

    def _find_continued(self, sources: Iterable[str], branch: str) -> tuple[int, ...]:
        """Return the index of a branch's own newest update among the updates of calls, or the indices of all."""
        indices = self._find_updates(sources)
        own_branch = [index for index in indices if self.updates[index].branch == branch]
        return (max(own_branch),) if own_branch else indices

    def _start_update(self, call: Call) -> MemoryUpdate:
        """Return the update that begins with a call."""
        memory = self.memory_after(call.id)
        self._bytes_read += sum(span.end_byte - span.start_byte for span in call.reads)
        return MemoryUpdate(
            chunk_index=call.chunk_index,
            **call.extent_values,
            memory=memory,
            changed=memory != self.memory_before(call.id),
            progress=self._compute_progress(call),
            prompt_tokens=call.usage.prompt_tokens,
            completion_tokens=call.usage.completion_tokens,
            seconds=call.seconds,
            events=call.events,
            branch=call.branch,
            call_id=call.id,
            sources=self._sources[call.id],
        )

    def _compute_progress(self, call: Call) -> float | None:
        """Return the progress, which never decreases, even if a later pass begins at the first chunk again."""
        if not self.document_bytes:
            return None
        bytes_read = self._bytes_read if call.branch or not call.reads else max(span.end_byte for span in call.reads)
        previous_progress = (self.updates[-1].progress if self.updates else None) or 0.0
        return max(previous_progress, min(1.0, bytes_read / self.document_bytes))
