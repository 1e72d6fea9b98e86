"""The trace of a run: its calls as a directed acyclic graph, from a log or from a running read.

A step is a call of the policy. It has the chunks in its prompt, and its parents: the steps whose output is in the
prompt. The trace gives the memory after a step, the path to an answer, timelines, evidence and rewards of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    step: str = field(default="", compare=False)
    """The last of its steps in the trace."""
    sources: tuple[str, ...] | None = field(default=None, compare=False)
    """The steps of the updates whose memory it started from, several for a merge; None means the update before it."""

    @property
    def chunk_number(self) -> int | None:
        """The chunk's number for people, who count from 1."""
        return None if self.chunk_index is None else self.chunk_index + 1


@dataclass(frozen=True)
class Trace:
    """A run's steps, each after its parents.

    Args:
        steps: in order.
        document_bytes: the document's length; None if it is not known yet.
    """

    steps: tuple[Call, ...] = ()
    document_bytes: int | None = None

    @classmethod
    def of(cls, replayed: Replayed) -> Trace:
        """Return the trace of steps that have been replayed."""
        trace = cls(tuple(replayed.steps), replayed.document_bytes)
        trace.__dict__["_replayed"] = replayed
        return trace

    @cached_property
    def by_id(self) -> Mapping[str, Call]:
        """The steps by their ids."""
        return {step.id: step for step in self.steps}

    @cached_property
    def answers(self) -> tuple[Call, ...]:
        """The steps that answered, in order."""
        return tuple(step for step in self.steps if step.writes is Writes.ANSWER)

    @cached_property
    def updates(self) -> tuple[MemoryUpdate, ...]:
        """What each chunk and each merge did to memory, in order. A chunk's steps on one branch are one update."""
        return tuple(self._replayed.updates)

    @property
    def tokens_shown(self) -> int:
        """The number of tokens of the document that the steps were shown. Each part counts once."""
        return sum(span.tokens for span in {span for step in self.steps for span in step.reads})

    @property
    def excerpt(self) -> Call | None:
        """The newest step that was shown an excerpt, if the run reads no chunks; otherwise None."""
        if any(update.chunk_index is not None for update in self.updates):
            return None
        return next((step for step in reversed(self.steps) if step.reads), None)

    @property
    def final_memory(self) -> str:
        """The memory that the newest answer is based on, or the newest memory; "" before the first."""
        if self.answers:
            return self.memory_before(self.answers[-1].id)
        return self.updates[-1].memory if self.updates else ""

    @cached_property
    def final_sources(self) -> tuple[int, ...]:
        """The indices in `updates` of those whose memories, joined, are the final memory."""
        if self.answers:
            return self._replayed.update_indices(self._replayed.sources[self.answers[-1].id])
        return (len(self.updates) - 1,) if self.updates else ()

    @cached_property
    def final_path(self) -> tuple[MemoryUpdate, ...]:
        """The updates that led to the final memory, in order, including all branches that were merged into it."""
        indices = set(self.final_sources)
        path = []
        for index in range(len(self.updates) - 1, -1, -1):
            if index in indices:
                indices.update(self.sources(self.updates[index]))
                path.append(self.updates[index])
        return tuple(reversed(path))

    def update_index(self, step_id: str) -> int:
        """Return the index in `updates` of the update that a step belongs to.

        Raises:
            KeyError: it belongs to none, because it answered, or neither read a chunk nor wrote a memory.
        """
        return self._replayed.update_index[step_id]

    def sources(self, update: MemoryUpdate) -> tuple[int, ...]:
        """Return the indices in `updates` of those whose memories, joined, an update started from."""
        return self._replayed.update_indices(update.sources or ())

    def continued(self, update: MemoryUpdate) -> tuple[int, ...]:
        """Return the `sources` whose memories an update continues: the newest of its branch, or all for a merge.

        Empty if a branch begins to read: it starts its own memory, and the source is only shown to it.
        """
        indices = self.sources(update)
        own_branch = [index for index in indices if self.updates[index].branch == update.branch]
        begins = update.branch and update.chunk_index is not None
        return (max(own_branch),) if own_branch else () if begins else indices

    def memory_before(self, step_id: str) -> str:
        """Return the memory that a step started from; several memories of a merge are joined."""
        replayed = self._replayed
        return replayed.memory_of(replayed.sources.get(step_id, ()), self.by_id[step_id].branch)

    def memory_after(self, step_id: str) -> str:
        """Return the memory after a step, on its branch."""
        step = self.by_id[step_id]
        return (step.text or "") if step.writes is Writes.MEMORY else self.memory_before(step_id)

    @cached_property
    def turns(self) -> int:
        """The critical path: the smallest number of steps in sequence, with everything else in parallel.

        A step waits for its parents, for the one before it on its branch, and for the trunk's newest: a decision is in
        no prompt, but nothing starts before it.
        """
        ends: dict[str, int] = {}
        newest: dict[str, int] = {}
        for step in self.steps:
            before = [ends.get(parent, 0) for parent in step.parents]
            ends[step.id] = 1 + max((*before, newest.get(step.branch, 0), newest.get("", 0)))
            newest[step.branch] = ends[step.id]
        return max(ends.values(), default=0)

    @cached_property
    def _replayed(self) -> Replayed:
        replayed = Replayed(self.document_bytes)
        for step in self.steps:
            replayed.add(step)
        return replayed


@dataclass
class Replayed:
    """Builds the updates from the steps, one step at a time."""

    document_bytes: int | None = None
    steps: list[Call] = field(default_factory=list)
    updates: list[MemoryUpdate] = field(default_factory=list)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By step: the last steps of the updates that its memory is based on."""
    update_index: dict[str, int] = field(default_factory=dict)
    """By step: the index of its update."""
    _after: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By step: `sources` of the steps that follow it."""
    _newest: dict[str, int] = field(default_factory=dict)
    """By branch: the index of its newest update."""
    _bytes_read: int = 0
    _furthest: float = 0.0
    """The progress so far. It never falls, even if a later pass begins at the first chunk again."""

    def update_indices(self, sources: Iterable[str]) -> tuple[int, ...]:
        """Return the indices of the updates that steps belong to, without repetition."""
        return tuple(dict.fromkeys(self.update_index[source] for source in sources))

    def memory_of(self, sources: Iterable[str], branch: str) -> str:
        """Return the memory of a branch after updates: its own newest one, or all of theirs joined."""
        indices = self.update_indices(sources)
        if len(indices) == 1:
            return self.updates[indices[0]].memory
        own_branch = [index for index in indices if self.updates[index].branch == branch]
        return "\n".join(
            filter(None, (self.updates[index].memory for index in ([max(own_branch)] if own_branch else indices)))
        )

    def add(self, step: Call) -> None:
        """Add the next step, which may start or change an update."""
        self.steps.append(step)
        after = [self._after.get(parent, ()) for parent in step.parents]
        before = after[0] if len(after) == 1 else tuple(dict.fromkeys(chain.from_iterable(after)))
        self.sources[step.id] = before
        self._after[step.id] = before
        if step.writes is Writes.ANSWER or not (step.reads or step.writes is Writes.MEMORY):
            return
        index = self._newest.get(step.branch)
        if index is not None and step.reads and self.updates[index].chunk_index == step.chunk_index:
            # For earlier steps of the same chunk, the memory is the one from before the chunk.
            before = self.updates[index].sources or ()
            self.sources[step.id] = before
            self.updates[index] = self._continue_update(self.updates[index], step)
        else:
            index = len(self.updates)
            self.updates.append(self._start_update(step, before))
        self._newest[step.branch] = index
        self.update_index[step.id] = index
        self._after[step.id] = (step.id,)

    def _start_update(self, step: Call, before: tuple[str, ...]) -> MemoryUpdate:
        """Return the update that begins with a step."""
        self._bytes_read += sum(span.end_byte - span.start_byte for span in step.reads)
        previous = self.memory_of(before, step.branch)
        memory = (step.text or "") if step.writes is Writes.MEMORY else previous
        return MemoryUpdate(
            chunk_index=step.chunk_index,
            **step.extent,
            memory=memory,
            changed=memory != previous,
            progress=self._progress(step),
            prompt_tokens=step.usage.prompt_tokens,
            completion_tokens=step.usage.completion_tokens,
            seconds=step.seconds,
            events=step.events,
            branch=step.branch,
            step=step.id,
            sources=before,
        )

    def _continue_update(self, update: MemoryUpdate, step: Call) -> MemoryUpdate:
        memory = (step.text or "") if step.writes is Writes.MEMORY else update.memory
        return replace(
            update,
            memory=memory,
            changed=memory != self.memory_of(update.sources or (), step.branch),
            prompt_tokens=update.prompt_tokens + step.usage.prompt_tokens,
            completion_tokens=update.completion_tokens + step.usage.completion_tokens,
            seconds=update.seconds + step.seconds,
            events=(*update.events, *step.events),
            step=step.id,
        )

    def _progress(self, step: Call) -> float | None:
        if not self.document_bytes:
            return None
        read = self._bytes_read if step.branch or not step.reads else max(span.end_byte for span in step.reads)
        self._furthest = max(self._furthest, min(1.0, read / self.document_bytes))
        return self._furthest
