"""The graph's tracked state and the context its nodes run in.

State is stored at every step, so it holds no text of the document and no growing list: a reference, a cursor, the
current memory, counters, and a record of the newest step. The list of all memories is the checkpoint history itself.
Everything that cannot or should not be stored (client, tokenizer, store) lives in `ReaderContext`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired

from typing_extensions import TypedDict

from memagent_graph.budget import Budget
from memagent_graph.concurrency.fair_turns import Turn
from memagent_graph.documents import DocumentRef, DocumentStore
from memagent_graph.documents.chunking import Boundary, Chunker, Cursor
from memagent_graph.policies.flops import ModelShape
from memagent_graph.policy import Policy, SamplingParams
from memagent_graph.prompts import Prompts
from memagent_graph.results import EventKind, StopReason, UpdateRule
from memagent_graph.run_log import RunLog
from memagent_graph.run_log.recording import Recording
from memagent_graph.tokenizers import Tokenizer


class ChunkSpan(TypedDict):
    """The chunk that the next update will read; its text is fetched anew from the store."""

    index: int
    start_char: int
    end_char: int
    start_byte: int
    end_byte: int
    tokens: int
    shortened: bool


class EventRecord(TypedDict):
    """A `ReadEvent` as stored."""

    kind: str
    chunk_index: int | None
    detail: str
    rule: str | None


class StepRecord(TypedDict):
    """What the newest update or answer was like, and what it cost; also what progress streams carry."""

    type: str
    """"memory_update", "answer" or "stopped"."""
    chunk_index: int | None
    start_char: int
    end_char: int
    start_byte: int
    end_byte: int
    chunk_tokens: int
    changed: bool
    progress: float | None
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    finish_reason: str
    model: str
    events: list[EventRecord]


class Counters(TypedDict):
    """Running totals of a read."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    turns: int
    seconds: float
    flops: float
    document_tokens: int


NO_COST = Counters(
    prompt_tokens=0, completion_tokens=0, cached_tokens=0, turns=0, seconds=0.0, flops=0.0, document_tokens=0
)


class ReaderInput(TypedDict):
    """What a caller gives the graph. `document` may be any source that `Document.of` takes; it is stored first."""

    question: str
    document: Any
    run_id: NotRequired[str]


class ReaderOutput(TypedDict):
    """What a caller gets from the graph."""

    run_id: str
    answer: str | None
    raw_answer: str | None
    memory: str
    stop_reason: str | None
    chunks_read: int
    usage: Counters


class ReaderState(TypedDict):
    """What is checkpointed: a few kilobytes, whatever the document's length."""

    run_id: NotRequired[str]
    question: str
    document: DocumentRef
    settings: NotRequired[str]
    """Fingerprint of tokenizer, chunk size and prompts; a resume under other settings is refused."""
    cursor: NotRequired[Cursor]
    span: NotRequired[ChunkSpan | None]
    memory: NotRequired[str]
    step: NotRequired[StepRecord]
    usage: NotRequired[Counters]
    chunks_read: NotRequired[int]
    answer: NotRequired[str | None]
    raw_answer: NotRequired[str | None]
    stop_reason: NotRequired[str | None]


@dataclass(frozen=True, slots=True)
class UpdateRules:
    """The stated rule for each kind of update that is not a plain success.

    A truncated memory is accepted by default, as in the paper, where the output bound is the memory bound.
    """

    truncated: UpdateRule = UpdateRule.ACCEPT
    """Also for completions longer than the memory budget; accepting cuts them to it."""
    empty: UpdateRule = UpdateRule.KEEP_PREVIOUS
    refused: UpdateRule = UpdateRule.KEEP_PREVIOUS
    invented: UpdateRule | None = None
    """For a memory with a word that stands nowhere in the prompt, however it ends. `ACCEPT` does not look; None is the
    policy's own rule (`Profile.on_invented`). For policies that copy and never rephrase, in languages that put spaces
    between words: what they write from nowhere is an accident."""
    retries: int = 2
    """How often `UpdateRule.RETRY` asks again, and how often an empty answer is asked for again."""

    def rule_for(self, kind: EventKind) -> UpdateRule:
        """The rule for one kind of event."""
        if kind is EventKind.INVENTED:
            return self.invented or UpdateRule.ACCEPT
        if kind is EventKind.EMPTY:
            return self.empty
        return self.refused if kind is EventKind.REFUSED else self.truncated


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a read stops early, counted from the call that started or resumed it. None means no bound."""

    max_chunks: int | None = None
    max_tokens_total: int | None = None
    """Prompt and completion tokens together; checked before each chunk, so one chunk may go beyond."""
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_chunks", "max_tokens_total", "max_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")


@dataclass(slots=True)
class Meter:
    """What one call of the graph has used so far, for `Limits`, and what it keeps from step to step to be quick."""

    started: float = field(default_factory=time.monotonic)
    chunks: int = 0
    tokens: int = 0
    recording: Recording | None = field(default=None, repr=False)
    """The run's side of the log, where runs are logged."""
    turn: Turn = field(default_factory=Turn, repr=False)
    """This read's turn on the event loop; see `memagent_graph.concurrency.fair_turns`."""
    chunkers: dict[tuple[str, int], Chunker] = field(default_factory=dict, repr=False)
    """By document and chunk size."""
    chosen: tuple[ChunkSpan, str] | None = field(default=None, repr=False)
    """The chunk chosen last, with its text: what `update_memory` needs not fetch again."""

    def exceeded(self, limits: Limits) -> StopReason | None:
        """The first limit that is reached."""
        if limits.max_chunks is not None and self.chunks >= limits.max_chunks:
            return StopReason.MAX_CHUNKS
        if limits.max_tokens_total is not None and self.tokens >= limits.max_tokens_total:
            return StopReason.MAX_TOKENS
        if limits.max_seconds is not None and time.monotonic() - self.started >= limits.max_seconds:
            return StopReason.MAX_SECONDS
        return None


@dataclass(frozen=True)
class ReaderContext:
    """What the nodes work with. One per graph; each call of the graph works on a copy with a `meter` of its own."""

    policy: Policy
    tokenizer: Tokenizer
    store: DocumentStore
    prompts: Prompts
    budget: Budget = field(default_factory=Budget)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rules: UpdateRules = field(default_factory=UpdateRules)
    limits: Limits = field(default_factory=Limits)
    boundary: Boundary = "token"
    shape: ModelShape | None = None
    """The model's size, where it is known; for estimates of arithmetic."""
    replace_undecodable: bool = False
    run_log: RunLog | None = field(default=None, repr=False)
    log_settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What the log says of how the reader was made."""
    pass_by: Callable[[dict[str, Any]], None] | None = field(default=None, repr=False)
    """Set where a caller sees nothing of a read before its end. A step that follows itself may then do so within one
    superstep; it hands in here, one by one, the changes that the graph's own streams thus never show."""
    meter: Meter = field(default_factory=Meter)

    def for_one_call(self, *, checkpointed: bool) -> ReaderContext:
        """A copy with a meter, and a recording, of its own."""
        recording = None
        if self.run_log is not None:
            recording = Recording(self.run_log, self.log_settings, checkpointed=checkpointed)
        return replace(self, meter=Meter(recording=recording))

    @property
    def settings(self) -> str:
        """Fingerprint of what must not change within a run."""
        budget = self.budget
        return ":".join(
            (
                self.tokenizer.fingerprint,
                self.prompts.fingerprint,
                f"{budget.chunk_tokens}/{budget.memory_tokens}/{self.boundary}",
            )
        )


def event_record(kind: EventKind, chunk_index: int | None, detail: str, rule: UpdateRule | None = None) -> EventRecord:
    """An event as it is stored."""
    return EventRecord(kind=kind.value, chunk_index=chunk_index, detail=detail, rule=rule.value if rule else None)


def new_run_id() -> str:
    """A fresh run id: the time it began (UTC), so that ids sort by age, and a random part."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
