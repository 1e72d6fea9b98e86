"""`ReadManager`: reads that outlive the connections that requested them.

A read belongs to a key. The same request with the same key gets the same read, if it is running or has recently
finished; a read that a killed process left, that failed or that was cancelled continues at the chunk it had reached. No
read is done twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Final

import msgspec

from memagent_graph.documents import DocumentRef
from memagent_graph.errors import MemAgentError
from memagent_graph.plain_text import make_one_line
from memagent_graph.policies.openai_compatible import OpenAICompatiblePolicy
from memagent_graph.policy import SamplingParams
from memagent_graph.reader import MemAgent
from memagent_graph.reading.state import Limits
from memagent_graph.results import ReadResult
from memagent_graph.trace import MemoryUpdate
from memagent_serve.api_errors import APIError, make_too_busy_error, to_api_error
from memagent_serve.keys import Owner
from memagent_serve.ledger import Entry, Ledger, ReadState
from memagent_serve.metrics import Metrics
from memagent_serve.serve_settings import ServeSettings

logger = logging.getLogger(__name__)

_MAX_READERS: Final = 64
_DEFAULT_READ_SECONDS: Final = 10.0
_MAX_WAIT_SECONDS: Final = 60
"""The longest time in `Retry-After`, in seconds. The official clients ignore longer times."""


class StartKind(StrEnum):
    """How a request got its read; the value of a header and of a metric's label."""

    STARTED = "started"
    JOINED = "joined"
    """It was running."""
    RESUMED = "resumed"
    """It continued where it had stopped."""
    REPEATED = "repeated"
    """It had ended recently."""


@dataclass(frozen=True, kw_only=True)
class ReadRequest:
    """A request to read. Equal requests share one read."""

    owner: Owner
    document: DocumentRef
    question: str
    sampling: SamplingParams
    answer_tokens: int | None = None
    """A maximum for the answer that is lower than the budget's."""

    def compute_digest(self, settings: str, model: str) -> str:
        """Return a hash that identifies the request; `settings` is the fingerprint of the reader's settings."""
        values = [self.owner.name, self.document["key"], self.question, asdict(self.sampling), self.answer_tokens]
        return hashlib.sha256(json.dumps([*values, settings, model], sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_entry(cls, entry: Entry, owner: Owner) -> ReadRequest:
        """Return the request of a read in the ledger, with the limits that its owner has now."""
        return replace(msgspec.json.decode(entry.read_request, type=cls), owner=owner)


@dataclass(eq=False)
class ServedRead:
    """A read of this process. Its state and updates change while it is running; see `ReadManager.follow`."""

    run_id: str
    read_request: ReadRequest
    request_digest: str
    state: ReadState = ReadState.WAITING
    updates: list[MemoryUpdate] = field(default_factory=list)
    """The memory updates of this process, in order."""
    result: ReadResult | None = None
    error: Exception | None = None
    followers: int = 0
    state_if_cancelled: ReadState = ReadState.CANCELLED
    """The state that the read gets when its task is cancelled."""
    task: asyncio.Task[None] | None = None
    change_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next change, and then replaced by a new event."""

    def add_update(self, update: MemoryUpdate) -> None:
        """Add an update, and wake all followers."""
        self.updates.append(update)
        self.wake_followers()

    def wake_followers(self) -> None:
        """Wake all followers."""
        self.change_event.set()
        self.change_event = asyncio.Event()

    @property
    def newest_update(self) -> MemoryUpdate | None:
        """The newest update; None before the first one."""
        return self.updates[-1] if self.updates else None


def name_state(entry: Entry, read: ServedRead | None) -> str:
    """Return the state of a read for clients. A read that has not ended and is not running here was interrupted."""
    state = entry.state if read is None else read.state
    return state.value if read is not None or state.has_ended else "interrupted"


@dataclass(eq=False, repr=False)
class ReadManager:
    """Starts reads, finds them again, and lets any number of clients follow them."""

    reader: MemAgent
    """The reader. Without checkpoints, no read survives the process."""
    ledger: Ledger
    """The owners of reads."""
    settings: ServeSettings
    """The maximum numbers of reads, and the limits of each read."""
    metrics: Metrics

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.settings.max_reads)
        self._lock = asyncio.Lock()
        self._reads: dict[str, ServedRead] = {}
        self._readers: OrderedDict[tuple[str, SamplingParams, int | None], MemAgent] = OrderedDict()
        self._salts: defaultdict[str, str] = defaultdict(lambda: secrets.token_hex(32))
        """The cache salt of each key. It separates the key's entries in the server's prefix cache from others."""
        self._fingerprint: str | None = None
        self._mean_seconds = _DEFAULT_READ_SECONDS
        self._refusal_times: deque[float] = deque()
        """The times of the refusals in the last `Retry-After` period: about one for each client that waits."""
        self._retry_seconds = 0.0

    async def start(
        self, read_request: ReadRequest, *, read_again: bool = False, is_retry: bool = False
    ) -> tuple[ServedRead, StartKind]:
        """Start a read, or join an earlier read of the same request.

        Args:
            read_request: what to read.
            read_again: start a new read, even if the same request was read before.
            is_retry: join a running read of the same request even with `read_again`; the first try may have begun it.

        Returns:
            The read, and how it was started.

        Raises:
            APIError: 429; too many reads are running.
            MemAgentError: the policy cannot be reached, or the ledger cannot be written.
        """
        if self._fingerprint is None:
            self._fingerprint = (await self.reader.agraph()).reader_context.settings
        request_digest = read_request.compute_digest(self._fingerprint, self.reader.policy.name)
        async with self._lock:
            running_reads = [read for read in self._reads.values() if read.request_digest == request_digest]
            if running_reads and (is_retry or not read_again):
                self.metrics.reads.labels(StartKind.JOINED).inc()
                return running_reads[-1], StartKind.JOINED
            self.require_capacity(read_request.owner)
            entries = await asyncio.to_thread(self.ledger.find_by_request, read_request.owner.name, request_digest)
            last_entry = next((entry for entry in entries if not entry.edited), None) if not read_again else None
            if last_entry is not None and not self._is_outdated(last_entry):
                read = ServedRead(last_entry.run_id, read_request, request_digest)
                start_kind = StartKind.REPEATED if last_entry.state is ReadState.FINISHED else StartKind.RESUMED
            else:
                read = ServedRead(f"{request_digest[:24]}-{len(entries)}", read_request, request_digest)
                start_kind = StartKind.STARTED
                entry = Entry(
                    read.run_id,
                    read_request.owner.name,
                    request_digest,
                    read_request.question,
                    read_request.document["name"],
                    time.time(),
                    read_request=msgspec.json.encode(read_request).decode(),
                )
                await asyncio.to_thread(self.ledger.begin, entry)
            self._launch(read, start_kind)
        return read, start_kind

    async def resume(self, owner: Owner, entry: Entry) -> None:
        """Continue one read of a key where it stopped, independent of other requests; a running read is left alone.

        Raises:
            APIError: 429; too many reads are running.
        """
        async with self._lock:
            if entry.run_id in self._reads:
                return
            self.require_capacity(owner)
            request_digest = "" if entry.edited else entry.request
            read = ServedRead(entry.run_id, ReadRequest.from_entry(entry, owner), request_digest)
            self._launch(read, StartKind.RESUMED)

    def _launch(self, read: ServedRead, start_kind: StartKind) -> None:
        self.metrics.reads.labels(start_kind).inc()
        self._reads[read.run_id] = read
        read.task = asyncio.create_task(self._run(read, start_kind))

    def find(self, owner: Owner, run_id: str) -> ServedRead | None:
        """Return a waiting or running read; None if there is none, or it belongs to another key."""
        read = self._reads.get(run_id)
        return read if read is not None and read.read_request.owner.name == owner.name else None

    async def search(
        self, owner: Owner, text: str, *, newest: int, skip: int = 0
    ) -> tuple[list[tuple[Entry, ServedRead | None]], int]:
        """Return like `Ledger.search`, with each entry's read if it is waiting or running."""
        reads = self.list_running(owner)  # before the ledger, where an end is recorded first
        entries, total = await asyncio.to_thread(self.ledger.search, owner.name, text, newest=newest, skip=skip)
        reads_by_id = {read.run_id: read for read in (*reads, *self.list_running(owner))}
        return [(entry, reads_by_id.get(entry.run_id)) for entry in entries], total

    def list_documents(self) -> list[DocumentRef]:
        """Return the documents of waiting and running reads."""
        return [read.read_request.document for read in list(self._reads.values())]

    def __len__(self) -> int:
        """Return the number of waiting and running reads."""
        return len(self._reads)

    def list_running(self, owner: Owner) -> list[ServedRead]:
        """Return the reads of a key that are waiting or running."""
        return [read for read in self._reads.values() if read.read_request.owner.name == owner.name]

    async def follow(self, read: ServedRead) -> AsyncGenerator[ServedRead | ReadResult, None]:
        """Yield a read, now and at each change, and its result at the end.

        A slow follower misses changes in between, and nothing waits for it.

        Raises:
            Exception: the error of the read; an `APIError`, 409, if the read was cancelled.
        """
        read.followers += 1
        try:
            while read.result is None and read.error is None:
                change_event = read.change_event
                yield read
                await change_event.wait()
            if read.error is not None:
                raise read.error
            if read.result is not None:
                yield read.result
        finally:
            read.followers -= 1
            if self.settings.cancel_on_close and not read.followers and not read.state.has_ended:
                await self.cancel(read)

    async def cancel(self, read: ServedRead, state: ReadState = ReadState.CANCELLED) -> None:
        """End a read as cancelled or paused. Its progress is kept, and the same request continues it."""
        if read.task is not None and not read.task.done():
            if not read.task.cancelling():  # a second cancellation would interrupt the writes of the first one
                read.state_if_cancelled = state
                read.task.cancel()
            await asyncio.wait([read.task])

    async def aclose(self) -> None:
        """End all reads, and close the reader."""
        for read in list(self._reads.values()):
            await self.cancel(read)
        await self.reader.aclose()
        self._readers.clear()

    def _is_outdated(self, entry: Entry) -> bool:
        return entry.state is ReadState.FINISHED and time.time() - (entry.ended or 0.0) > self.settings.keep_seconds

    def require_capacity(self, owner: Owner, question: str | None = None) -> None:
        """Refuse a read of a key if too many are running, unless it may join one with the same question.

        Raises:
            APIError: 429.
        """
        settings = self.settings
        if question is not None and any(read.read_request.question == question for read in self.list_running(owner)):
            return
        if len(self._reads) >= settings.max_reads + settings.max_waiting:
            raise self._make_refusal(f"{len(self._reads)} reads are running or waiting, and no more are accepted")
        if len(self.list_running(owner)) >= (limit := settings.max_reads_per_key):
            raise self._make_refusal(f"{limit} reads of this key are running or waiting, and it may have no more")

    def _make_refusal(self, message: str) -> Exception:
        """Return a refusal whose Retry-After spreads the refused clients over the time that their reads will take."""
        self.metrics.reads.labels("refused").inc()
        now = time.monotonic()
        self._refusal_times.append(now)
        while self._refusal_times[0] < now - self._retry_seconds:
            self._refusal_times.popleft()
        rounds = (len(self._reads) + len(self._refusal_times)) / self.settings.max_reads
        # Half of the time until the last read has ended, because some clients may not try again.
        seconds = self._retry_seconds = min(_MAX_WAIT_SECONDS, round(self._mean_seconds * max(1.0, rounds / 2)))
        return make_too_busy_error(f"{message}; send the request again later", seconds)

    async def _run(self, read: ServedRead, start_kind: StartKind) -> None:
        """Read to the end, with or without followers."""
        read_request, owner = read.read_request, read.read_request.owner
        state: ReadState = ReadState.CANCELLED
        error: Exception | None = None
        started_at = time.monotonic()
        try:
            async with self._slots:
                read.state = ReadState.RUNNING
                read.wake_followers()
                if start_kind is not StartKind.REPEATED:  # the read has ended, and `keep_seconds` count from then
                    await asyncio.to_thread(self.ledger.mark, read.run_id, ReadState.RUNNING)
                started_at = time.monotonic()
                reader = await self.get_reader(read_request)
                result = await reader.aresume_or_read(
                    read.run_id,
                    read_request.document,
                    read_request.question,
                    may_resume=start_kind is not StartKind.STARTED,
                    on_update=read.add_update,
                    limits=self.settings.limits.tighten(Limits(None, owner.max_tokens, owner.max_seconds)),
                )
            state = ReadState.STOPPED if result.stop_reason.resumable else ReadState.FINISHED
            if start_kind is not StartKind.REPEATED:
                self.metrics.count_tokens(result.usage)
                await asyncio.to_thread(self.ledger.mark, read.run_id, state)
            read.result = result
        except asyncio.CancelledError:
            state = read.state_if_cancelled
            error = APIError(
                409,
                f"the read {read.run_id} was {state.value}; send the same request again, and it continues",
                code="read_cancelled",
                headers={"X-Should-Retry": "false"},  # the official clients send a request again after 409
            )
            raise
        except Exception as failure:  # noqa: BLE001  the followers raise it; nothing else awaits this task
            state, error = ReadState.FAILED, failure
            logger.warning("read %s failed: %s", read.run_id, make_one_line(str(failure)))
        finally:
            if error is not None and start_kind is not StartKind.REPEATED:
                await asyncio.shield(asyncio.to_thread(self._record_failure, read.run_id, state, error))
            read.error, read.state = error, state
            self._reads.pop(read.run_id, None)
            self.metrics.ended_reads.labels(state.value).inc()
            elapsed_seconds = time.monotonic() - started_at
            self._mean_seconds += 0.2 * (elapsed_seconds - self._mean_seconds)
            read.wake_followers()

    def _record_failure(self, run_id: str, state: ReadState, error: Exception) -> None:
        try:
            self.ledger.mark(run_id, state, to_api_error(error).message)
        except MemAgentError as failure:
            logger.warning("%s", failure)

    async def get_reader(self, read_request: ReadRequest) -> MemAgent:
        """Return a reader with the request's sampling, on the shared connections of policy and checkpoints."""
        salt = self._salts[read_request.owner.name] if len(self.settings.keys) > 1 else ""
        key = (salt, read_request.sampling, read_request.answer_tokens)
        if key not in self._readers:
            policy = self.reader.policy
            if salt and isinstance(policy, OpenAICompatiblePolicy):
                policy = policy.with_fields({"cache_salt": salt})
            self._readers[key] = self.reader.copy(
                policy=policy,
                sampling=replace(read_request.sampling, logprobs=(await self.reader.aprepare()).sampling.logprobs),
                checkpoints=await self.reader.acheckpointer(),
                answer_tokens=read_request.answer_tokens or self.reader.settings.answer_tokens,
            )
            while len(self._readers) > _MAX_READERS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(key)
        return self._readers[key]
