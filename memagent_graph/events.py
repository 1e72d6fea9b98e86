"""Stop reasons, rules and events of a read, as they appear in logs, results and checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class StopReason(StrEnum):
    """The reason why a read ended. With the first four reasons it is finished; otherwise it can be resumed."""

    ANSWERED = "answered"
    """The whole document was read and the policy answered."""
    ENOUGH = "enough"
    """The policy answered before the document's end, because it had enough information."""
    NO_ANSWER = "no_answer"
    """The policy wrote nothing or refused when the answer was requested."""
    INVALID_ANSWER = "invalid_answer"
    """No reply had the form of `response_format`. The last reply is the answer."""
    MAX_CHUNKS = "max_chunks"
    MAX_TOKENS = "max_tokens_total"
    MAX_SECONDS = "max_seconds"

    @property
    def resumable(self) -> bool:
        """Whether `resume` can continue the read."""
        return self not in {StopReason.ANSWERED, StopReason.ENOUGH, StopReason.NO_ANSWER, StopReason.INVALID_ANSWER}


class UpdateRule(StrEnum):
    """The treatment of a memory update that is cut off, empty, refused or invented."""

    ACCEPT = "accept"
    """Use the text as the new memory, cut to the memory budget."""
    KEEP_PREVIOUS = "keep_previous"
    """Continue with the memory as it was before the chunk."""
    RETRY = "retry"
    """Ask again, up to `UpdateRules.retries` times, then keep the previous memory."""


class EventKind(StrEnum):
    """The kind of an event in a read that a user should know about."""

    DOCUMENT_INCOMPLETE = "document_incomplete"
    """The document has parts that are not in its text, such as pages that are images."""
    TRUNCATED = "truncated"
    """The policy's output was cut off at its maximum length."""
    OVERLONG = "overlong"
    """The policy wrote more than the memory budget."""
    EMPTY = "empty"
    """The policy wrote nothing outside its reasoning."""
    REFUSED = "refused"
    """The policy, or a filter in front of it, refused."""
    INVENTED = "invented"
    """The policy wrote a word that is not in its prompt. Only some rules check this."""
    MALFORMED = "malformed"
    """The reply does not have the form that its role requires."""
    REPEATED = "repeated"
    """The policy requested the same look-up again."""
    NOT_RECALLED = "not_recalled"
    """The policy requested a look-up that was not done."""
    RESAMPLED = "resampled"
    """The completion was discarded and requested again."""
    REQUEST_RETRIED = "request_retried"
    """The request was sent again after a network or server error."""
    PROMPT_CUT = "prompt_cut"
    """The server cut the prompt, so a part of it did not reach the model."""
    UNUSUAL_FINISH = "unusual_finish"
    """The policy stopped for an unknown reason. Its output was used as if it were complete."""
    SAMPLING_CHANGED = "sampling_changed"
    """The server does not accept a field of the request, so the completion was sampled without it."""
    LOGPROBS_DROPPED = "logprobs_dropped"
    """Requested token ids or log-probs are missing, or their numbers differ. The run cannot be used for training."""
    SHORTENED_CHUNK = "shortened_chunk"
    """Escaping made the chunk longer than its budget, so a shorter chunk was read."""
    SPLIT_CHARACTER = "split_character"
    """The chunk ends inside a character that is too long, or that does not end with a token."""
    UNBOXED_ANSWER = "unboxed_answer"
    """The answer did not have the required form, so the whole completion is the answer."""
    INVALID_ANSWER = "invalid_answer"
    """The answer does not have the form of `response_format`. It was requested again if attempts were left."""
    SCHEMA_REFUSED = "schema_refused"
    """The server did not accept the JSON schema, so the answer was written without guided decoding."""
    MEMORY_EDITED = "memory_edited"
    """A person replaced the memory."""
    NOT_PLANNED = "not_planned"
    """A report used its own question for its documents, because the policy did not write questions."""
    EXTRACTIVE = "extractive"
    """A report's sections are the answers of its cells, because the policy has no prompt for writing them."""
    NOT_JUDGED = "not_judged"
    """Contradictions in a report were not judged, because the policy has no prompt for judging them."""
    LOGGING_STOPPED = "logging_stopped"
    """The run log could not be written, and the read continued without it."""


@dataclass(frozen=True, slots=True)
class ReadEvent:
    """An event at a chunk, or at the answer (`chunk_index` is None)."""

    kind: EventKind
    chunk_index: int | None
    detail: str
    rule: UpdateRule | None = None
    """The rule that was applied, for events that have one."""


def count_events(events: Sequence[ReadEvent]) -> dict[EventKind, int]:
    """Return the number of events by kind, the most frequent kind first."""
    return dict(Counter(event.kind for event in events).most_common())
