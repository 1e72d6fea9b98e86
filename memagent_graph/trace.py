"""The trace of a run: its calls as a directed acyclic graph, from a log or from a running read.

A call has the chunks in its prompt, and its parents: the calls whose output is in the prompt. The trace gives the
memory after a call, the path to an answer, timelines, evidence and rewards of calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain

from memagent_graph.calls import Call, Writes
from memagent_graph.events import ReadEvent


@dataclass(frozen=True, slots=True)
class MemoryUpdate:
    """The change of a branch's memory by a chunk or a merge, and its cost."""

    chunk_index: int | None
    """The index of the chunk; None if no chunk was read, as in a merge of branches."""
    start_char: int
    end_char: int
    start_byte: int
    end_byte: int
    """The same in UTF-8 bytes of the document, as for `DocumentStore.read`."""
    chunk_tokens: int
    memory: str
    changed: bool
    """Whether the memory differs from the previous one."""
    progress: float | None
    """The fraction of the document read so far, 0 to 1; None for a stream with an unknown end."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    events: tuple[ReadEvent, ...] = ()
    branch: str = ""
    """Its branch, if several run in parallel; "" is the trunk."""
    call_id: str = field(default="", compare=False)
    """The id of the last of its calls in the trace."""
    sources: tuple[str, ...] = field(default=(), compare=False)
    """The last calls of the updates whose memory it started from, several for a merge."""

    @property
    def chunk_number(self) -> int | None:
        """The chunk's number for people, who count from 1."""
        return None if self.chunk_index is None else self.chunk_index + 1


class Trace:
    """A run's calls, each after its parents, and the updates of the memory that they made.

    Args:
        calls: the calls so far, in order. `add` adds the next one.
        document_bytes: the document's length; None if it is not known yet.
    """

    def __init__(self, calls: Iterable[Call] = (), document_bytes: int | None = None) -> None:
        self.document_bytes = document_bytes
        self.calls: list[Call] = []
        self.calls_by_id: dict[str, Call] = {}
        self.updates: list[MemoryUpdate] = []
        """What each chunk and each merge did to memory, in order. A chunk's calls on one branch are one update."""
        self._sources: dict[str, tuple[str, ...]] = {}
        """By call: the last calls of the updates that its memory is based on."""
        self._sources_after: dict[str, tuple[str, ...]] = {}
        """By call: `_sources` of the calls that follow it."""
        self.update_indices: dict[str, int] = {}
        """By call: the index of its update. An answer belongs to none, and a call that neither read a chunk nor
        wrote a memory."""
        self._newest_update: dict[str, int] = {}
        """By branch: the index of its newest update."""
        self._bytes_read = 0
        self._max_progress = 0.0
        """The progress so far. It never falls, even if a later pass begins at the first chunk again."""
        for call in calls:
            self.add(call)

    @property
    def answers(self) -> list[Call]:
        """The calls that answered, in order."""
        return [call for call in self.calls if call.writes is Writes.ANSWER]

    @property
    def tokens_shown(self) -> int:
        """The number of tokens of the document that the policy was shown. Each part counts once."""
        return sum(span.tokens for span in {span for call in self.calls for span in call.reads})

    @property
    def newest_excerpt_call(self) -> Call | None:
        """The newest call that was shown an excerpt, if the run reads no chunks; otherwise None."""
        if any(update.chunk_index is not None for update in self.updates):
            return None
        return next((call for call in reversed(self.calls) if call.reads), None)

    @property
    def final_memory(self) -> str:
        """The memory that the newest answer is based on, or the newest memory; "" before the first."""
        if answers := self.answers:
            return self.memory_before(answers[-1].id)
        return self.updates[-1].memory if self.updates else ""

    @property
    def final_sources(self) -> tuple[int, ...]:
        """The indices of the updates whose joined memories are the final memory."""
        if answers := self.answers:
            return self._find_updates(self._sources[answers[-1].id])
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

    def continued_indices(self, update: MemoryUpdate) -> tuple[int, ...]:
        """Return the sources whose memories an update continues: the newest of its branch, or all for a merge.

        Empty if a branch begins to read: it starts its own memory, and the source is only shown to it.
        """
        indices = self.source_indices(update)
        own_branch = [index for index in indices if self.updates[index].branch == update.branch]
        begins = update.branch and update.chunk_index is not None
        return (max(own_branch),) if own_branch else () if begins else indices

    def memory_before(self, call_id: str) -> str:
        """Return the memory that a call started from; several memories of a merge are joined."""
        return self._join_memories(self._sources.get(call_id, ()), self.calls_by_id[call_id].branch)

    def memory_after(self, call_id: str) -> str:
        """Return the memory after a call, on its branch."""
        call = self.calls_by_id[call_id]
        return (call.text or "") if call.writes is Writes.MEMORY else self.memory_before(call_id)

    @property
    def critical_path_length(self) -> int:
        """The smallest number of calls in sequence, with everything else in parallel.

        A call waits for its parents, for the one before it on its branch, and for the newest call of the trunk, because
        a decision, although in no prompt, must come first.
        """
        ends: dict[str, int] = {}
        newest: dict[str, int] = {}
        for call in self.calls:
            before = [ends.get(parent, 0) for parent in call.parents]
            ends[call.id] = 1 + max((*before, newest.get(call.branch, 0), newest.get("", 0)))
            newest[call.branch] = ends[call.id]
        return max(ends.values(), default=0)

    def add(self, call: Call) -> None:
        """Add the next call, which may start or change an update."""
        self.calls.append(call)
        self.calls_by_id[call.id] = call
        after = [self._sources_after.get(parent, ()) for parent in call.parents]
        before = after[0] if len(after) == 1 else tuple(dict.fromkeys(chain.from_iterable(after)))
        self._sources[call.id] = before
        self._sources_after[call.id] = before
        if call.writes is Writes.ANSWER or not (call.reads or call.writes is Writes.MEMORY):
            return
        index = self._newest_update.get(call.branch)
        if index is not None and call.reads and self.updates[index].chunk_index == call.chunk_index:
            # For earlier calls of the same chunk, the memory is the one from before the chunk.
            self._sources[call.id] = self.updates[index].sources
            self.updates[index] = self._continue_update(self.updates[index], call)
        else:
            index = len(self.updates)
            self.updates.append(self._start_update(call, before))
        self._newest_update[call.branch] = index
        self.update_indices[call.id] = index
        self._sources_after[call.id] = (call.id,)

    def _find_updates(self, sources: Iterable[str]) -> tuple[int, ...]:
        """Return the indices of the updates that calls belong to, without repetition."""
        return tuple(dict.fromkeys(self.update_indices[source] for source in sources))

    def _join_memories(self, sources: Iterable[str], branch: str) -> str:
        """Return the memory of a branch after updates: its own newest one, or all of theirs joined."""
        indices = self._find_updates(sources)
        if len(indices) == 1:
            return self.updates[indices[0]].memory
        own_branch = [index for index in indices if self.updates[index].branch == branch]
        return "\n".join(
            filter(None, (self.updates[index].memory for index in ([max(own_branch)] if own_branch else indices)))
        )

    def _start_update(self, call: Call, before: tuple[str, ...]) -> MemoryUpdate:
        """Return the update that begins with a call."""
        self._bytes_read += sum(span.end_byte - span.start_byte for span in call.reads)
        previous = self._join_memories(before, call.branch)
        memory = (call.text or "") if call.writes is Writes.MEMORY else previous
        return MemoryUpdate(
            chunk_index=call.chunk_index,
            **call.extent,
            memory=memory,
            changed=memory != previous,
            progress=self._compute_progress(call),
            prompt_tokens=call.usage.prompt_tokens,
            completion_tokens=call.usage.completion_tokens,
            seconds=call.seconds,
            events=call.events,
            branch=call.branch,
            call_id=call.id,
            sources=before,
        )

    def _continue_update(self, update: MemoryUpdate, call: Call) -> MemoryUpdate:
        memory = (call.text or "") if call.writes is Writes.MEMORY else update.memory
        return replace(
            update,
            memory=memory,
            changed=memory != self._join_memories(update.sources, call.branch),
            prompt_tokens=update.prompt_tokens + call.usage.prompt_tokens,
            completion_tokens=update.completion_tokens + call.usage.completion_tokens,
            seconds=update.seconds + call.seconds,
            events=(*update.events, *call.events),
            call_id=call.id,
        )

    def _compute_progress(self, call: Call) -> float | None:
        if not self.document_bytes:
            return None
        read = self._bytes_read if call.branch or not call.reads else max(span.end_byte for span in call.reads)
        self._max_progress = max(self._max_progress, min(1.0, read / self.document_bytes))
        return self._max_progress
