"""What can happen in a read; logs, results and checkpoints use the same words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class StopReason(StrEnum):
    """Why a read ended. All but the first four end in a state that can be resumed."""

    ANSWERED = "answered"
    """The whole document was read and the policy answered."""
    ENOUGH = "enough"
    """The policy answered before the document's end, because there was enough to answer from."""
    NO_ANSWER = "no_answer"
    """The policy wrote nothing or refused when it was asked for the answer."""
    INVALID_ANSWER = "invalid_answer"
    """The policy answered, but never in the form that `response_format` asks for; its last reply is the answer."""
    MAX_CHUNKS = "max_chunks"
    MAX_TOKENS = "max_tokens_total"
    MAX_SECONDS = "max_seconds"

    @property
    def resumable(self) -> bool:
        """Whether `resume` can continue from here."""
        return self not in {StopReason.ANSWERED, StopReason.ENOUGH, StopReason.NO_ANSWER, StopReason.INVALID_ANSWER}


class UpdateRule(StrEnum):
    """What to do with a memory update that is cut off, empty, refused or invented."""

    ACCEPT = "accept"
    """Use the text as the new memory, cut to the memory budget."""
    KEEP_PREVIOUS = "keep_previous"
    """Continue with the memory as it was before the chunk."""
    RETRY = "retry"
    """Ask again, up to `UpdateRules.retries` times, then keep the previous memory."""


class EventKind(StrEnum):
    """What can happen in a read that a user should know about."""

    DOCUMENT_INCOMPLETE = "document_incomplete"
    """The document holds something that is not in its text: pages that are images, parts that no converter reads."""
    TRUNCATED = "truncated"
    """The policy's output was cut off at its bound."""
    OVERLONG = "overlong"
    """The policy wrote more than the memory budget."""
    EMPTY = "empty"
    """The policy wrote nothing outside its reasoning."""
    REFUSED = "refused"
    """The policy, or a filter in front of it, refused."""
    INVENTED = "invented"
    """The policy wrote a word that is not in its prompt, and a rule checks that."""
    MALFORMED = "malformed"
    """The reply does not have the form that its role asks for."""
    REPEATED = "repeated"
    """The policy asked the same as before."""
    NOT_RECALLED = "not_recalled"
    """Nothing was looked up although the policy asked for it."""
    RESAMPLED = "resampled"
    """The completion was discarded and requested again."""
    REQUEST_RETRIED = "request_retried"
    """The request was sent again after a network or server error."""
    PROMPT_CUT = "prompt_cut"
    """The server cut the prompt, so that a part of it, often of the document, never reached the model."""
    UNUSUAL_FINISH = "unusual_finish"
    """The policy stopped for a reason that is not known; what it wrote was used as if it were whole."""
    SAMPLING_CHANGED = "sampling_changed"
    """The server does not take a field of the request, so the completion was sampled in another way."""
    LOGPROBS_DROPPED = "logprobs_dropped"
    """Token ids or log-probs did not come though they were asked for, or not as many of one as of the other, so that
    none counts. The run cannot be trained on."""
    SHORTENED_CHUNK = "shortened_chunk"
    """Escaping made the chunk longer than its budget, so a shorter chunk was read."""
    SPLIT_CHARACTER = "split_character"
    """The chunk ends inside a character, because that has more tokens than a chunk may, or because no token ends it."""
    UNBOXED_ANSWER = "unboxed_answer"
    """The answer did not have the required form; the whole completion is the answer."""
    INVALID_ANSWER = "invalid_answer"
    """The answer does not have the form that `response_format` asks for; it was requested again if tries were left."""
    SCHEMA_REFUSED = "schema_refused"
    """The server did not accept the JSON schema, so the answer was written without guided decoding."""
    MEMORY_EDITED = "memory_edited"
    """A person replaced the memory."""
    NOT_PLANNED = "not_planned"
    """A report's documents were asked the report's own question, because the policy wrote none, or cannot."""
    EXTRACTIVE = "extractive"
    """A report's sections are the answers of its cells, because the policy has no prompt for writing them."""
    NOT_JUDGED = "not_judged"
    """Contradictions in a report were not judged, because the policy has no prompt for that."""
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
    """Return how often each kind of event occurs, the most frequent first."""
    return dict(Counter(event.kind for event in events).most_common())
