"""One invocation of a reader's graph: its limits, its log, its parallel branches, and the data that its steps share.

The nodes of the graph get an `Execution` as LangGraph's runtime context. Strategies do not see it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from memagent_graph.concurrency.background import Cancellation, PerLoop
from memagent_graph.documents import DocumentRef
from memagent_graph.documents.chunking import Chunker
from memagent_graph.errors import RunLogError
from memagent_graph.events import StopReason
from memagent_graph.reading.state import Counters, ReaderContext
from memagent_graph.run_log.log import RunLog, make_log_error
from memagent_graph.run_log.records import Conversation
from memagent_graph.trace import Call, Span

_MAX_TURNS: Final = 8
"""Maximum number of reads that have a turn at once. With 1, the event loop would be idle during a checkpoint write."""
_MAX_TURN_SECONDS: Final = 0.05
"""Maximum seconds of a turn, because a read may wait for something, such as its caller, without ending its turn."""


class ProcessorTurn:
    """One read's turn on the processor, so that many reads in one event loop do not delay each other.

    Without turns, the event loop would alternate between all reads whose replies arrive together. All of them would
    send their next requests late and together, and the server would be idle meanwhile. With turns, a read that gets a
    completion waits for its turn, then runs until it sends its next request. With 128 concurrent reads, this gives
    about a sixth more chunks per second.

    A read takes a turn for every reply. Ending a turn that the read does not hold does nothing.
    """

    def __init__(self) -> None:
        self._held_slots: asyncio.Semaphore | None = None
        self._timeout: asyncio.TimerHandle | None = None

    async def begin(self) -> None:
        """Wait for a turn, in order of arrival."""
        self.end()
        slots = _slots.get()
        await slots.acquire()
        self.end()  # parallel steps share the turn of a read: another step may have taken one meanwhile
        self._held_slots = slots
        self._timeout = asyncio.get_running_loop().call_later(_MAX_TURN_SECONDS, self.end)

    def end(self) -> None:
        """End the turn, so that the next read can run."""
        if self._held_slots is None or self._timeout is None:
            return
        self._timeout.cancel()
        self._held_slots.release()
        self._held_slots = self._timeout = None


_slots: Final = PerLoop(lambda: asyncio.Semaphore(_MAX_TURNS))


class Branches:
    """Runs the branches of a superstep, and keeps the work of those that run when one fails.

    LangGraph cancels all tasks of a superstep when the first one fails. So a failed branch waits until the running
    branches have finished, and no other branch begins.
    """

    def __init__(self) -> None:
        self._running_count = 0
        self._slots: asyncio.Semaphore | None = None
        self._idle = asyncio.Event()
        self._failure: Exception | None = None

    @asynccontextmanager
    async def run_branch(self, concurrency: int) -> AsyncIterator[ProcessorTurn]:
        """Run one branch, with a turn of its own, when fewer than `concurrency` others are running.

        Raises:
            Exception: the error of this branch, or of another branch that failed before this one began.
        """
        self._slots = self._slots or asyncio.Semaphore(concurrency)
        async with self._slots:
            if self._failure is None:
                self._running_count += 1
                self._idle.clear()
                turn = ProcessorTurn()
                try:
                    yield turn
                    return
                except Exception as error:  # noqa: BLE001  any error waits for the others
                    self._failure = self._failure or error
                finally:
                    turn.end()
                    self._running_count -= 1
                    if not self._running_count:
                        self._idle.set()
        await self._idle.wait()
        raise self._failure


@dataclass
class Recording:
    """Writes the log entries of one invocation of the graph.

    A read continues if its log fails. The recording ends at the first failure, so a trajectory in the log may stop
    early, but has no gaps. An event in the result reports it.
    """

    log: RunLog
    has_checkpoints: bool = True
    """Whether steps have checkpoints. If so, a step is committed only after its conversation is in the log, so a
    resumed run has no gap. Without checkpoints, a step is written while the next step waits for the policy."""
    failure: str | None = None
    """The reason why the recording ended early; None if it did not."""
    is_reported: bool = False
    """Whether the run's result has an event for the failure."""
    _pending_entries: list[Future[Any]] = field(default_factory=list)
    _deferred_entries: list[Future[Any]] = field(default_factory=list)
    _call_ids: dict[tuple[str, str, int], str] = field(default_factory=dict)
    """The recorded calls by branch, role and slot."""
    _has_begun: bool = False
    _has_ended: bool = False

    def begin(self, step: StepExecution, *, replaces_run: bool = False) -> None:
        """Log the start of the run, once per call of the graph.

        Args:
            step: the first step.
            replaces_run: whether the run replaces an existing run with its id, instead of continuing it.
        """
        if not self._has_begun:
            self._has_begun = True
            state, context = step.state, step.context
            run_values = state["run_id"], state["question"], state["document"], context.log_settings
            strategy = context.strategy, context.strategy_fingerprint
            options: Any = {"prompts": context.prompts, "trace": step.trace, "replaces_run": replaces_run}
            self._submit(lambda: self.log.begin(*run_values, *strategy, **options))

    def record(self, conversation: Conversation, prompt_texts: Sequence[str]) -> None:
        """Log a conversation. A strategy that uses a slot for two calls ends the recording."""
        slot = conversation.branch, conversation.role, conversation.slot
        if self._call_ids.setdefault(slot, conversation.call_id) == conversation.call_id:
            self._submit(lambda: self.log.record(conversation, prompt_texts))
        else:
            message = f"the strategy calls the role {conversation.role!r} twice with slot {conversation.slot}"
            self._fail(RunLogError(message, hint="Pass another slot to each call of the role."))

    def end(self, run_id: str, stop_reason: str, answer: str | None) -> None:
        """Log the end of the run."""
        self._submit(lambda: self.log.end(run_id, stop_reason, answer))
        self._has_ended = True

    async def settle(self, *, failed: bool = False) -> None:
        """Wait at the end of a step until the entries that must precede its checkpoint are in the file.

        Once a step has failed or the run has ended, all entries must be.
        """
        if failed:
            self._has_ended = True
            self._call_ids.clear()  # the step may run again in this invocation
        due_entries, self._deferred_entries = self._deferred_entries, self._pending_entries
        self._pending_entries = []
        if self.has_checkpoints or self._has_ended:
            due_entries, self._deferred_entries = due_entries + self._deferred_entries, []
        if due_entries and not due_entries[-1].done():
            last_entry = asyncio.wrap_future(due_entries[-1])  # the log finishes its futures in order
            # Retrieve the exception even if this step is cancelled, so that asyncio does not warn.
            last_entry.add_done_callback(asyncio.Future.exception)
            await asyncio.wait([last_entry])
        for future in due_entries:
            if (error := future.exception()) is not None:  # such as a value that JSON or SQLite cannot store
                self._fail(error)

    def _submit(self, entry: Callable[[], Future[Any]]) -> None:
        if self.failure is None:
            try:
                self._pending_entries.append(entry())
            except Exception as error:  # noqa: BLE001  a redaction hook can raise anything
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        reason = error if isinstance(error, RunLogError) else make_log_error(self.log.path, error)
        self.failure = self.failure or reason.message


@dataclass(slots=True)
class Execution:
    """One invocation of the graph: its consumption so far, its running branches, and the data that its steps share."""

    reader_context: ReaderContext
    """Policy, tokenizer, store, prompts and budgets. They do not change."""
    recording: Recording | None = field(default=None, repr=False)
    """The run's recording, if runs are logged."""
    has_checkpoints: bool = False
    start_time: float = field(default_factory=time.monotonic)
    chunk_count: int = 0
    token_count: int = 0
    counted_until: float = 0.0
    """The event loop's time when the newest step ended: up to then, the seconds of the read are counted."""
    processor_turn: ProcessorTurn = field(default_factory=ProcessorTurn, repr=False)
    """The turn of this read's sequential steps."""
    branches: Branches = field(default_factory=Branches, repr=False)
    """Runs the parallel branches of the current superstep."""
    cancellation: Cancellation = field(default_factory=Cancellation, repr=False)
    """Cancels what the steps of a synchronous call wait for."""
    pending_chunk: int | None = None
    """The index of a chunk that an earlier call of the graph chose and did not read. This call reads it first."""
    chunk_texts: dict[Span, str] = field(default_factory=dict, repr=False)
    """The texts of chunks that were chosen and not yet read."""
    calls: list[Call] = field(default_factory=list, repr=False)
    """The policy calls so far, for strategies that look back."""
    _chunkers: dict[tuple[str, int], Chunker] = field(default_factory=dict, repr=False)
    """By document and chunk size."""

    def find_reached_limit(self) -> StopReason | None:
        """Return the first limit that is reached; None if there is none."""
        limits = self.reader_context.limits
        if limits.max_chunks is not None and self.chunk_count >= limits.max_chunks:
            return StopReason.MAX_CHUNKS
        if limits.max_tokens_total is not None and self.token_count >= limits.max_tokens_total:
            return StopReason.MAX_TOKENS
        if limits.max_seconds is not None and time.monotonic() - self.start_time >= limits.max_seconds:
            return StopReason.MAX_SECONDS
        return None

    def get_chunker(self, document: DocumentRef, chunk_tokens: int) -> Chunker:
        """Return a chunker for a document and a chunk size, cached."""
        key, context = (document["key"], chunk_tokens), self.reader_context
        if key not in self._chunkers:
            self._chunkers[key] = Chunker(context.store, document, context.tokenizer, chunk_tokens, context.boundary)
        return self._chunkers[key]


@dataclass(slots=True)
class StepExecution:
    """One execution of a step: its state and context, and the calls and costs that the node around it records."""

    state: Any
    context: ReaderContext
    """Policy, tokenizer, store, prompts and budgets."""
    execution: Execution
    """The call of the graph."""
    node: str = ""
    processor_turn: ProcessorTurn = field(default_factory=ProcessorTurn, repr=False)
    trace: Mapping[str, str] = field(default_factory=dict)
    """The ids of the caller's trace, for the log."""
    calls: list[Call] = field(default_factory=list)
    cost: Counters = field(default_factory=Counters)
    chunk_count: int = 0
    """The number of chunks that the step read."""
    tips: dict[str, str] = field(default_factory=dict)
    """The newest call of each branch."""
    chunk_index: int | None = None
    """The index of the chunk in the newest prompt, for errors."""
