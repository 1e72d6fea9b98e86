"""The records of a run log, filters of runs, and the trace of a run's records. All times are seconds since 1970.

The fields of `RunRecord`, `Conversation`, `LoggedEvent` and `Reward` are the columns of the log's tables and of
exports; `tables` stores them by type. A new field needs no other change in this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from memagent_graph.documents import DocumentRef
from memagent_graph.events import EventKind, ReadEvent
from memagent_graph.grouping import group_values
from memagent_graph.policy import Completion, FinishReason, Origin, TokenUsage
from memagent_graph.reasoning import extract_reply
from memagent_graph.trace import Call, Span, Trace, Writes

LongText: TypeAlias = str | None
"""A text that is stored compressed, with lone surrogates; None if it was redacted or does not exist."""
TokenIds: TypeAlias = Sequence[int] | None
"""Token ids, 0 to 2^32 - 1, arrays in what is read from a log; None if the policy did not return them, or they were
redacted."""
LogProbs: TypeAlias = Sequence[float] | None
"""Log-probs, stored as 32-bit floats; None as for `TokenIds`."""
Time: TypeAlias = Annotated[float, Meta(ge=0, le=253_402_000_000)]
"""Seconds since 1970, up to the year 9999, the maximum of `datetime`."""


def describe_edit(author: str | None) -> str:
    """Return the detail of the event for an edited memory."""
    return f"{author or 'a person'} replaced the memory"


class Outcome(StrEnum):
    """The use of a completion."""

    ACCEPTED = "accepted"
    """The completion became the memory or the answer."""
    KEPT_PREVIOUS = "kept_previous"
    """The previous memory was kept."""
    DISCARDED = "discarded"
    """The completion was discarded, and another attempt of the call follows."""


class TextKind(StrEnum):
    """The kinds of text for a redaction hook."""

    QUESTION = "question"
    DOCUMENT_NAME = "document_name"
    PROMPT = "prompt"
    """A rendered message. It is not stored as text, but its token ids are."""
    COMPLETION = "completion"
    MEMORY = "memory"
    ANSWER = "answer"


Redaction: TypeAlias = Callable[[TextKind, str], str | None]
"""Masks texts before they are written. Returns the text to keep, or None to drop it.

Token ids can be decoded to text. So if the hook changes a prompt or a completion, its ids and log-probs are dropped.
Then the run cannot be used for training.
"""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. `ended` and `stop_reason` are None while it runs, or after a crash."""

    run_id: str
    """The run's id."""
    began: Time
    """Seconds since 1970."""
    ended: Time | None
    """Seconds since 1970."""
    question: str
    document: DocumentRef
    settings: Mapping[str, Any]
    """The settings of the reader; empty if the reader was not created from settings."""
    stop_reason: str | None
    """A value of `StopReason`."""
    answer: str | None
    """The answer in the completion."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """The ids of the LangSmith run and the OpenTelemetry span around it, if there were any."""
    strategy: str = "overwrite"
    """The strategy's name."""
    strategy_fingerprint: str = ""
    """A hash of the strategy's options, roles, state and edges; empty if it is unknown."""
    attempt: Time | None = None
    """Seconds since 1970 when it was read again under its id, resumed or edited last; None if it was not. Rewards of
    the run from before are of another attempt, and do not count."""


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event of a run that belongs to none of its conversations: an edit of a memory."""

    time: Time
    kind: str
    """A value of `EventKind`."""
    detail: str
    position: int | None = None
    text: LongText = None
    """The new memory."""
    call_id: str | None = None
    """The id of the call whose memory was replaced."""


@dataclass(frozen=True, slots=True)
class Conversation(Origin):
    """One attempt of a call: exactly the prompt and the completion.

    `prompt_token_ids`, `token_ids` and `logprobs` are None if the policy did not return them, or a redaction hook
    changed the text. Texts are never derived from ids, nor ids from texts.
    """

    run_id: str
    position: int
    """The index of the first chunk in the prompt, or without a chunk the number of chunks that were read before."""
    node: str
    """The node of the graph that called the policy."""
    branch: str
    """The branch of the run; "" is the trunk."""
    role: str
    """The role."""
    slot: int
    """The index of the call among those of its role and branch. The calls of several runs are matched by it."""
    writes: Writes
    """Memory, decision or answer."""
    call_id: str
    """The id of the call. All attempts of a call have the same id."""
    attempt: int
    """The index of the attempt. All but the last attempt of a call are `DISCARDED`."""
    outcome: Outcome
    """The use of the completion."""
    began: Time
    """Seconds since 1970."""
    seconds: Time
    """Seconds from the request to the reply."""
    policy: str
    """The model's name."""
    tokenizer: str
    """The tokenizer's fingerprint."""
    template: str
    """The fingerprint of the prompts. `RunLog.templates` returns their wording."""
    sampling: Mapping[str, Any]
    """The requested sampling: temperature, top_p, seed, maximum tokens and others."""
    prompt_tokens: int
    """Number of prompt tokens, counted by the server or else by the tokenizer."""
    completion_tokens: int
    cached_tokens: int
    """Number of prompt tokens from the server's cache."""
    finish_reason: str
    """A value of `FinishReason`."""
    text: LongText
    """The whole completion, with reasoning."""
    memory: LongText = None
    """The memory after the call, if it is not the stripped text of the completion."""
    prompt_token_ids: TokenIds = field(default=None, repr=False)
    """Null if the policy did not return them."""
    token_ids: TokenIds = field(default=None, repr=False)
    """The token ids of the completion; null if the policy did not return them."""
    logprobs: LogProbs = field(default=None, repr=False)
    """The log-probs of the completion's tokens; null if the policy did not return them."""
    parents: tuple[str, ...] = ()
    """The ids of the calls whose output was in the prompt."""
    reads: tuple[Span, ...] = ()
    """The chunks that were in the prompt."""
    events: tuple[ReadEvent, ...] = ()
    """The events of the attempt, such as a memory that was cut off."""
    superseded: bool = False
    """Whether a resume or an edit replaced the conversation, so that the run's trajectory does not have it."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """The ids of the LangSmith run and the OpenTelemetry span around it, if there were any."""
    id: int | None = None
    """The row, once the conversation is stored. Rows are in the order in which conversations were logged."""

    @property
    def span(self) -> Span | None:
        """The first chunk in the prompt; None if there was none."""
        return self.reads[0] if self.reads else None

    @property
    def result(self) -> str | None:
        """The result of the call: the memory, decision or answer; None if it was redacted.

        The result of a conversation with the outcome `KEPT_PREVIOUS` or `DISCARDED` has no meaning.
        """
        if self.memory is not None:
            return self.memory
        return None if self.text is None else extract_reply(self.text).strip()

    @property
    def has_ids(self) -> bool:
        """Whether the conversation can be trained on: it has ids of prompt and completion, and log-probs."""
        return self.prompt_token_ids is not None and self.token_ids is not None and self.logprobs is not None


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward of a run, or of one of its conversations. There may be many, with different names, sources and times."""

    run_id: str
    name: str
    value: float
    source: str
    """The source: the name of a scorer, "person", ..."""
    time: Time
    conversation: int | None = None
    """The row of the conversation; None for a reward of the run."""
    note: str | None = None
    id: int | None = None


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run with all of its records. Rewards refer to conversations by the ids that they have here."""

    record: RunRecord
    conversations: Sequence[Conversation] = ()
    """In order of position and attempt."""
    events: Sequence[LoggedEvent] = ()
    """Events of no conversation."""
    rewards: Sequence[Reward] = ()
    """Oldest first."""
    templates: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The wording of its prompts, by fingerprint."""


@dataclass(frozen=True, slots=True)
class RunFilter:
    """A filter of runs: a run must fulfil all conditions that are not None."""

    run_ids: Sequence[str] | None = None
    run_id_prefix: str | None = None
    """The beginning of the run's id."""
    question: str | None = None
    """A part of the question; upper and lower case are equal."""
    document: str | None = None
    """A part of the document's name; upper and lower case are equal."""
    policy: str | None = None
    """A part of the name of a policy that wrote one of its conversations; upper and lower case are equal."""
    stop_reason: str | None = None
    """A value of `StopReason`, or "unfinished"."""
    reward: str | None = None
    """The name of one of its rewards."""
    is_own: bool | None = None
    """Whether the run was read here; False for imported runs."""
    since: float | None = None
    """Begun at or after this time (seconds since 1970)."""
    until: float | None = None
    """Begun before this time."""
    newest: int | None = None
    """Maximum number of runs, the newest."""

    def build_sql(self) -> tuple[str, list[Any]]:
        """Return the end of a query of runs, from WHERE on, and its parameters."""
        optional_conditions = {
            "instr(run_id, ?) = 1": self.run_id_prefix,
            "instr(casefold(question), casefold(?)) > 0": self.question,
            "instr(casefold(json_extract(document, '$.name')), casefold(?)) > 0": self.document,
            "EXISTS (SELECT 1 FROM conversations c "
            "WHERE c.run_id = runs.run_id AND instr(casefold(c.policy), casefold(?)) > 0)": self.policy,
            "coalesce(stop_reason, 'unfinished') = ?": self.stop_reason,
            "EXISTS (SELECT 1 FROM valid_rewards w WHERE w.run_id = runs.run_id AND w.name = ?)": self.reward,
            "(run_id NOT IN (SELECT run_id FROM imported)) = ?": self.is_own,
            "began >= ?": self.since,
            "began < ?": self.until,
        }
        active = {condition: value for condition, value in optional_conditions.items() if value is not None}
        parameters = [*active.values(), *(self.run_ids or ()), -1 if self.newest is None else self.newest]
        conditions = [*active]
        if self.run_ids is not None:
            conditions.append(f"run_id IN ({', '.join('?' * len(self.run_ids))})")
        return f"WHERE {' AND '.join(conditions) or '1'} ORDER BY began DESC, run_id DESC LIMIT ?", parameters


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Totals of one run's conversations, and the run's rewards."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """The newest value of each of the run's own rewards, by name."""
    conversations: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    with_ids: int = 0
    """Number of conversations with token ids and log-probs."""


def build_trace(
    conversations: Iterable[Conversation], edits: Sequence[LoggedEvent] = (), *, document_bytes: int | None = None
) -> Trace:
    """Return the trace of conversations, without superseded ones.

    Args:
        conversations: the conversations of a run. A call with only discarded attempts is left out.
        edits: the edits of memories, from `RunLog.events`.
        document_bytes: the size of the document, for progress.
    """
    trajectory = [conversation for conversation in conversations if not conversation.superseded]
    trajectory.sort(key=lambda conversation: conversation.id or 0)
    attempts_by_call = group_values((conversation.call_id, conversation) for conversation in trajectory)
    edits_by_call = group_values((edit.call_id, edit) for edit in edits if edit.kind == EventKind.MEMORY_EDITED)
    calls: list[Call] = []
    memories: dict[str, str | None] = {}
    for call_id, attempts in attempts_by_call.items():
        last_attempt = attempts[-1]
        if last_attempt.outcome is Outcome.DISCARDED:
            continue
        call = _make_call(attempts)
        if last_attempt.outcome is Outcome.KEPT_PREVIOUS:
            memory = last_attempt.memory if last_attempt.memory is not None else _join_parent_memories(call, memories)
            call = replace(call, text=memory if call.writes is Writes.MEMORY else "")
        for edit in edits_by_call.get(call_id, ()):
            event = ReadEvent(EventKind.MEMORY_EDITED, edit.position, edit.detail)
            call = replace(call, writes=Writes.MEMORY, text=edit.text or "", events=(*call.events, event))
        calls.append(call)
        memories[call_id] = call.text if call.writes is Writes.MEMORY else _join_parent_memories(call, memories)
    return Trace(calls, document_bytes)


def _make_call(attempts: Sequence[Conversation]) -> Call:
    last_attempt = attempts[-1]
    return Call(
        id=last_attempt.call_id,
        node=last_attempt.node,
        branch=last_attempt.branch,
        role=last_attempt.role,
        slot=last_attempt.slot,
        writes=last_attempt.writes,
        text=last_attempt.text if last_attempt.writes is Writes.ANSWER else last_attempt.result,
        reads=last_attempt.reads,
        parents=last_attempt.parents,
        completion=Completion("", FinishReason(last_attempt.finish_reason), last_attempt.policy, **last_attempt.origin),
        usage=TokenUsage(
            sum(attempt.prompt_tokens for attempt in attempts),
            sum(attempt.completion_tokens for attempt in attempts),
            sum(attempt.cached_tokens for attempt in attempts),
        ),
        seconds=sum(attempt.seconds for attempt in attempts),
        events=tuple(event for attempt in attempts for event in attempt.events),
    )


def _join_parent_memories(call: Call, memories: dict[str, str | None]) -> str:
    """Return the memory before a call: the joined memories of its parents."""
    return "\n".join(filter(None, (memories.get(parent) for parent in call.parents)))
