"""What a read gives back: the answer, how memory came to be, what happened on the way, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memagent_graph.documents import DocumentRef

if TYPE_CHECKING:
    from memagent_graph.provenance.evidence import Evidence
    from memagent_graph.timeline.view import RunView


class StopReason(StrEnum):
    """Why a read ended. All but the first two end in a state that can be resumed."""

    ANSWERED = "answered"
    """The whole document was read and the policy answered."""
    NO_ANSWER = "no_answer"
    """The whole document was read and the policy wrote nothing, or refused, when asked for the answer."""
    MAX_CHUNKS = "max_chunks"
    MAX_TOKENS = "max_tokens_total"
    MAX_SECONDS = "max_seconds"

    @property
    def resumable(self) -> bool:
        """Whether `resume` can read on from here."""
        return self not in {StopReason.ANSWERED, StopReason.NO_ANSWER}


class UpdateRule(StrEnum):
    """What to do with a memory update that is not a plain success."""

    ACCEPT = "accept"
    """Take the text as the new memory, cut to the memory budget."""
    KEEP_PREVIOUS = "keep_previous"
    """Go on with the memory as it was before the chunk."""
    RETRY = "retry"
    """Ask again, up to `UpdateRules.retries` times, then keep the previous memory."""


class EventKind(StrEnum):
    """What can happen on the way that a user should know of."""

    TRUNCATED = "truncated"
    """The policy was cut off by the output bound."""
    OVERLONG = "overlong"
    """The policy wrote more than the memory budget."""
    EMPTY = "empty"
    """The policy wrote nothing outside its reasoning."""
    REFUSED = "refused"
    """The policy, or a filter before it, declined."""
    INVENTED = "invented"
    """The policy wrote a word that stands nowhere in its prompt, where a rule asks for that."""
    RESAMPLED = "resampled"
    """The completion was thrown away and asked for again."""
    REQUEST_RETRIED = "request_retried"
    """The request was sent again after an error of the network or the server."""
    SHORTENED_CHUNK = "shortened_chunk"
    """Escaping made the chunk longer than its budget, so less was read at once."""
    UNBOXED_ANSWER = "unboxed_answer"
    """The answer did not have the form asked for; the whole completion was taken."""
    MEMORY_EDITED = "memory_edited"
    """A person replaced the memory."""
    LOGGING_STOPPED = "logging_stopped"
    """The run log could not be written; the read went on without it."""


@dataclass(frozen=True, slots=True)
class ReadEvent:
    """Something that happened at a chunk; `chunk_index` is None at the answer."""

    kind: EventKind
    chunk_index: int | None
    detail: str
    rule: UpdateRule | None = None
    """The rule that was followed, for events that have one."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a read cost so far. Tokens are those of all its conversations."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server took from its prefix cache."""
    turns: int = 0
    """Completions asked for, discarded ones included."""
    seconds: float = 0.0
    """Wall time spent reading, over all processes that took part."""
    flops: float | None = None
    """Estimated floating-point operations, where the model's size is known."""
    full_context_flops: float | None = None
    """The estimate for one call of the same model with the whole document in context."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class MemoryUpdate:
    """One chunk read: the memory that came of it, where the chunk lies in the document, and what it cost."""

    chunk_index: int
    start_char: int
    end_char: int
    start_byte: int
    end_byte: int
    """As the characters, in the document's UTF-8 bytes: what `DocumentStore.read` takes."""
    chunk_tokens: int
    memory: str
    changed: bool
    """Whether the memory differs from the one before."""
    progress: float | None
    """The share of the document read so far, 0 to 1; None for a stream whose end is not known."""
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    events: tuple[ReadEvent, ...] = ()


@dataclass(frozen=True)
class ReadResult:
    """The outcome of reading one document with one question."""

    run_id: str
    question: str
    document: DocumentRef
    model: str
    answer: str | None
    """The answer in the form asked for; None where the read stopped before it."""
    raw_answer: str | None
    """The whole answer completion."""
    memory: str
    """The memory after the last chunk read."""
    stop_reason: StopReason
    usage: Usage
    chunks_read: int
    updates: tuple[MemoryUpdate, ...] = field(default=(), repr=False)
    """Every memory update, in order."""
    answer_events: tuple[ReadEvent, ...] = ()
    store_root: Path | None = field(default=None, repr=False, compare=False)
    """The folder that keeps the document's text."""

    @cached_property
    def evidence(self) -> tuple[Evidence, ...]:
        """What in the document the final memory's lines rest on: chunk, character span, quote, and page where known.

        Computed when it is asked for, from words that line and chunk have in common; empty where the document's text
        is no longer stored.
        """
        from memagent_graph.provenance.evidence import trace  # noqa: PLC0415  it needs this module

        view = self.view()
        return trace(view.updates, view.chunk_text, view.sections).evidence

    def view(self) -> RunView:
        """The result as timelines take it; see `memagent_graph.timeline`."""
        from memagent_graph.documents.store import DocumentStore  # noqa: PLC0415
        from memagent_graph.timeline.sources import view_of_result  # noqa: PLC0415  it needs this module

        return view_of_result(self, DocumentStore(self.store_root) if self.store_root else None)

    def _repr_html_(self) -> str:
        """How notebooks show it."""
        from memagent_graph.timeline import build_timeline, render_notebook  # noqa: PLC0415  they need this module

        return render_notebook(build_timeline(self.view()))

    @property
    def events(self) -> tuple[ReadEvent, ...]:
        """Everything that happened on the way, in order."""
        return (*(event for update in self.updates for event in update.events), *self.answer_events)

    def to_dict(self, *, updates: bool = False) -> dict[str, Any]:
        """The result as JSON-ready values; `updates=True` adds the memory after every chunk."""
        values: dict[str, Any] = {
            "answer": self.answer,
            "raw_answer": self.raw_answer,
            "memory": self.memory,
            "stop_reason": self.stop_reason.value,
            "run_id": self.run_id,
            "question": self.question,
            "model": self.model,
            "document": dict(self.document),
            "chunks_read": self.chunks_read,
            "usage": {**asdict(self.usage), "total_tokens": self.usage.total_tokens},
            "events": [asdict(event) for event in self.events],
            "evidence": [asdict(each) for each in self.evidence],
        }
        if updates:
            values["updates"] = [asdict(update) for update in self.updates]
        return values


def count_events(events: Sequence[ReadEvent]) -> dict[EventKind, int]:
    """How often each kind of event occurs, most frequent first."""
    counts: dict[EventKind, int] = {}
    for event in events:
        counts[event.kind] = counts.get(event.kind, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
