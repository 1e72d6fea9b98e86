"""What can happen in a read, in words that logs, results and checkpoints share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class StopReason(StrEnum):
    """Why a read ended. All but the first three end in a state that can be resumed."""

    ANSWERED = "answered"
    """The whole document was read and the policy answered."""
    ENOUGH = "enough"
    """There was enough to answer from before the document's end, and the policy answered."""
    NO_ANSWER = "no_answer"
    """The policy wrote nothing, or refused, when asked for the answer."""
    MAX_CHUNKS = "max_chunks"
    MAX_TOKENS = "max_tokens_total"
    MAX_SECONDS = "max_seconds"

    @property
    def resumable(self) -> bool:
        """Whether `resume` can read on from here."""
        return self not in {StopReason.ANSWERED, StopReason.ENOUGH, StopReason.NO_ANSWER}


class UpdateRule(StrEnum):
    """What to do with a memory update that is not a plain success."""

    ACCEPT = "accept"
    """Take the text as the new memory, cut to the memory budget."""
    KEEP_PREVIOUS = "keep_previous"
    """Continue with the memory as it was before the chunk."""
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
    MALFORMED = "malformed"
    """The reply does not have the form that its role asks for."""
    REPEATED = "repeated"
    """The policy asked for what had been asked before."""
    NOT_RECALLED = "not_recalled"
    """Nothing was looked up, though the policy had asked for it."""
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
    PINNED = "pinned"
    """The policy's new memory lacked a line that a person had pinned, and it was put back."""
    LOGGING_STOPPED = "logging_stopped"
    """The run log could not be written; the read continued without it."""


@dataclass(frozen=True, slots=True)
class ReadEvent:
    """Something that happened at a chunk; `chunk_index` is None at the answer."""

    kind: EventKind
    chunk_index: int | None
    detail: str
    rule: UpdateRule | None = None
    """The rule that was followed, for events that have one."""


def count_events(events: Sequence[ReadEvent]) -> dict[EventKind, int]:
    """How often each kind of event occurs, most frequent first."""
    return dict(Counter(event.kind for event in events).most_common())
