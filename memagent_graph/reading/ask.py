"""Calls the policy with one prompt in a role until a reply is accepted or the attempts are used up; counts and logs.

Every call of the policy in a read goes through `Ask`, for every strategy: sampling, the rules for replies that are
cut off, empty or refused, retries, counting and logging are only here.
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from memagent_graph.concurrency.fair_turns import Turn
from memagent_graph.events import EventKind, UpdateRule
from memagent_graph.policy import Completion, FinishReason, Messages, SamplingParams, TokenUsage, strip_reasoning
from memagent_graph.reading.state import (
    ChunkSpan,
    Counters,
    EventRecord,
    ReaderContext,
    ReaderState,
    StepRecord,
    add_cost,
    event_record,
    no_cost,
)
from memagent_graph.response_format import Fits
from memagent_graph.roles import Parsed, Role, Trouble
from memagent_graph.run_log import Conversation, LoggedEvent, Outcome
from memagent_graph.run_log.recording import new_step
from memagent_graph.trace import Span, Writes

_WORD = re.compile(r"\d+|[^\W\d_]+")
"""A number, or letters in a row: `4711kg` contains both alone, too."""


def word_from_nowhere(text: str, shown: Iterable[str]) -> str | None:
    """The first word or number of a text that was not shown; None if there is none.

    Letter case and Unicode variants of the same characters (NFKC) make no difference.
    """
    known = {word for each in shown for word in _words(each)}
    return next((word for word in _words(text) if word not in known), None)


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's reply in a role."""

    text: str
    """The memory after it, the answer completion without its reasoning, or the decision's text."""
    value: Any
    """What the role's parser returned; for an answer, the answer itself. None after trouble."""
    raw: str
    """The newest completion, unchanged."""
    step: str
    """Its id in the trace, which later steps name as their parent."""
    logprobs: Sequence[float] | None = None
    """Of the newest completion's tokens (natural log); None if the policy returned none."""
    invalid: str | None = None
    """Why an answer does not have the form that it should have; None if it does, or need not have one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a run a call of the policy is, and what its prompt is made of."""

    node: str
    branch: str
    slot: int
    parents: tuple[str, ...]
    """The steps whose output is in the prompt."""
    continues: bool
    """Whether the only parent is the step that wrote the previous memory."""
    reads: tuple[ChunkSpan, ...] = ()
    """The chunks in the prompt."""

    @property
    def chunk_index(self) -> int | None:
        """The number of the first chunk that it reads; None if it reads none."""
        return self.reads[0]["index"] if self.reads else None


class Ask:
    """One request to the policy, with all its attempts.

    Args:
        state: the state of the step that asks.
        context: policy, prompts, budgets and rules.
        role: the role.
        messages: the prompt.
        place: its place in the run.
        previous: the memory that is kept if no reply is accepted.
        turn: the read's turn on the event loop.
        trace: the ids of the trace around the step.
    """

    def __init__(
        self,
        state: ReaderState,
        context: ReaderContext,
        role: Role,
        messages: Messages,
        place: Place,
        *,
        previous: str,
        turn: Turn,
        trace: Mapping[str, str],
    ) -> None:
        self._state, self._context, self._role, self._messages = state, context, role, messages
        self._place, self._previous, self._turn, self._trace = place, previous, turn, trace
        self._bound = role.tokens(context.budget)
        self._attempts = self._logged_events = 0
        self._asked = (0.0, 0.0)
        self._begin = time.perf_counter()
        self._raw = self._model = self._finish_reason = ""
        self._logprobs: Sequence[float] | None = None
        self._invalid: str | None = None
        self.id = new_step()
        self.events: list[EventRecord] = []
        self.cost: Counters = no_cost()
        if any(span["shortened"] for span in place.reads):
            self.note(EventKind.SHORTENED_CHUNK, "escaping made the chunk longer than its budget")

    def note(self, kind: EventKind, detail: str, rule: UpdateRule | None = None) -> None:
        """Report something that a user should know about."""
        self.events.append(event_record(kind, self._place.chunk_index, detail, rule))

    async def reply(self) -> Reply:
        """Ask until a reply is accepted by the rules."""
        if self._role.writes is Writes.ANSWER:
            text, value = await self._answer()
        else:
            text, value = await self._written()
        return Reply(text, value, self._raw, self.id, self._logprobs, self._invalid)

    def record(self, text: str) -> StepRecord:
        """The step in its stored form, after the reply."""
        return StepRecord(
            type="memory_update" if self._role.writes is Writes.MEMORY else self._role.writes.value,
            id=self.id,
            node=self._place.node,
            branch=self._place.branch,
            role=self._role.name,
            slot=self._place.slot,
            parents=list(self._place.parents),
            reads=list(self._place.reads),
            text=text,
            changed=self._role.writes is Writes.MEMORY and text != self._previous,
            prompt_tokens=self.cost["prompt_tokens"],
            completion_tokens=self.cost["completion_tokens"],
            seconds=time.perf_counter() - self._begin,
            finish_reason=self._finish_reason,
            model=self._model,
            events=self.events,
        )

    async def _written(self) -> tuple[str, Any]:
        """The new memory or the decision, by the rules for the policy's reply."""
        rules = self._context.rules
        for remaining in range(rules.retries, -1, -1):
            completion = await self._complete()
            text = strip_reasoning(completion.text).strip()
            found = self._read(completion, text)
            if isinstance(found, Parsed):
                if found.text is None:
                    self._log(completion, Outcome.KEPT_PREVIOUS, self._kept)
                    return self._previous, found.value
                self._log(completion, Outcome.ACCEPTED, found.text)
                return found.text, found.value
            rule = rules.rule_for(found.kind)
            if rule is UpdateRule.RETRY and remaining:
                self.note(found.kind, found.detail, rule)
                self.note(EventKind.RESAMPLED, f"{remaining} more tries")
                self._log(completion, Outcome.DISCARDED)
                continue
            parsed = self._parsed(self._cut(text)) if rule is UpdateRule.ACCEPT else None
            if isinstance(parsed, Parsed) and parsed.text is not None:
                self.note(found.kind, found.detail, rule)
                self._log(completion, Outcome.ACCEPTED, parsed.text)
                return parsed.text, parsed.value
            self.note(found.kind, found.detail, UpdateRule.KEEP_PREVIOUS)
            self._log(completion, Outcome.KEPT_PREVIOUS, self._kept)
            return self._previous if self._role.writes is Writes.MEMORY else "", None
        raise AssertionError("the last try always returns")

    @property
    def _kept(self) -> str | None:
        """The memory that is kept, if it is not that of its only parent."""
        return None if self._place.continues or self._role.writes is not Writes.MEMORY else self._previous

    async def _answer(self) -> tuple[str, str | None]:
        """The answer completion without its reasoning, and the answer in it.

        Both are empty when the policy keeps writing nothing, or refuses. A structured answer is the JSON in it.
        """
        extract = self._context.prompts.extract_answer
        for remaining in range(self._context.rules.retries, -1, -1):
            completion = await self._complete()
            text = strip_reasoning(completion.text).strip()
            if completion.finish_reason is FinishReason.REFUSED:
                self.note(EventKind.REFUSED, "the policy refused to answer")
                self._log(completion, Outcome.ACCEPTED)
                return "", extract("")
            if completion.finish_reason is FinishReason.LENGTH:
                self.note(EventKind.TRUNCATED, f"the answer was cut at {self._bound} tokens")
            if text:
                extracted = self._in_form(text) if self._context.structure else extract(text)
                if extracted is None:
                    self.note(EventKind.UNBOXED_ANSWER, "the completion has no \\boxed{...}; it was taken whole")
                    extracted = text
                self._log(completion, Outcome.ACCEPTED)
                return text, extracted
            self.note(EventKind.EMPTY, "the policy wrote no answer")
            if remaining:
                self.note(EventKind.RESAMPLED, f"{remaining} more tries")
            self._log(completion, Outcome.DISCARDED if remaining else Outcome.ACCEPTED)
        return "", extract("")

    def _in_form(self, text: str) -> str:
        """The JSON in an answer; the whole text, with a note, if it does not have the form."""
        assert self._context.structure is not None  # noqa: S101
        found = self._context.structure.format.checked(text)
        if isinstance(found, Fits):
            return found.text
        self._invalid = found.reason
        self.note(EventKind.INVALID_ANSWER, found.reason)
        return text

    async def _complete(self) -> Completion:
        context = self._context
        self._turn.end()
        begin = time.time()
        completion = await context.policy.complete(self._messages, self._sampling(self._attempts))
        self._asked = begin, time.time() - begin
        await self._turn.begin()
        ids, logprobs = completion.token_ids, completion.logprobs
        if ids is not None and logprobs is not None and len(ids) != len(logprobs):
            # Which of them belongs to which token is then anybody's guess, and training would take it for the truth.
            self.note(EventKind.LOGPROBS_DROPPED, f"{len(logprobs)} log-probs came with {len(ids)} tokens")
            completion = replace(completion, logprobs=None)
        usage = self._usage(completion)
        flops = 0.0
        if context.shape is not None:
            flops = context.shape.forward_flops(usage.prompt_tokens, usage.completion_tokens)
        cost = Counters(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            turns=1,
            seconds=0.0,
            flops=flops,
            document_tokens=0,
        )
        self.cost = add_cost(self.cost, cost) if self._attempts else cost
        context.meter.tokens += usage.prompt_tokens + usage.completion_tokens
        self._attempts += 1
        if completion.schema_refused:
            self.note(EventKind.SCHEMA_REFUSED, "the server did not accept the JSON schema; decoding was not guided")
        if completion.retries:
            self.note(EventKind.REQUEST_RETRIED, f"the request was sent {completion.retries + 1} times")
        self._finish_reason, self._model, self._raw = completion.finish_reason.value, completion.model, completion.text
        self._logprobs = completion.logprobs
        return completion

    def _sampling(self, attempt: int) -> SamplingParams:
        """How an attempt is sampled: the seed changes, because the same seed would give the same reply."""
        sampling = _greedy(self._context.sampling) if self._role.greedy else self._context.sampling
        structure = self._context.structure if self._role.writes is Writes.ANSWER else None
        schema, session = structure.format.for_server if structure else None, self._state["document"]["key"]
        return _bounded(sampling, self._bound, attempt, schema, session)

    def _usage(self, completion: Completion) -> TokenUsage:
        """The server's count, or our own if it reports none."""
        if completion.usage is not None:
            return completion.usage
        count = self._context.tokenizer.count
        return TokenUsage(sum(count(message["content"]) for message in self._messages), count(completion.text))

    def _read(self, completion: Completion, text: str) -> Parsed | Trouble:
        """What a reply says, or the first thing that is wrong with it."""
        what = "memory" if self._role.writes is Writes.MEMORY else self._role.name
        if completion.finish_reason is FinishReason.REFUSED:
            verb = "update the memory" if what == "memory" else f"write the {what}"
            return Trouble(EventKind.REFUSED, f"the policy refused to {verb}")
        if not text:
            return Trouble(EventKind.EMPTY, f"the policy wrote no {what}")
        if self._context.rules.rule_for(EventKind.INVENTED) is not UpdateRule.ACCEPT and what == "memory":
            word = word_from_nowhere(self._cut(text), [message["content"] for message in self._messages])
            if word is not None:
                return Trouble(EventKind.INVENTED, f"the memory has {word[:40]!r}, which stands nowhere in the prompt")
        if completion.finish_reason is FinishReason.LENGTH:
            return Trouble(EventKind.TRUNCATED, f"the {what} was cut off at {self._bound} tokens")
        written = completion.usage.completion_tokens if completion.usage else None
        is_longer_in_prompts = self._context.prompts.neutralise(text) != text
        may_exceed = written is None or written > self._bound or is_longer_in_prompts
        if may_exceed and (excess := shown_tokens(self._context, text) - self._bound) > 0:
            tokens = self._bound + excess
            return Trouble(EventKind.OVERLONG, f"the {what} has {tokens} tokens, {excess} beyond its budget")
        return self._parsed(text)

    def _parsed(self, text: str) -> Parsed | Trouble:
        return self._role.parse(text, self._context.prompts)

    def _cut(self, text: str) -> str:
        return beginning(self._context, text, self._bound)

    def _log(self, completion: Completion, outcome: Outcome, memory: str | None = None) -> None:
        """Log the newest attempt, with the events since the previous one."""
        context = self._context
        recording = context.meter.recording
        if recording is None or recording.failure is not None:
            return
        run_id = self._state.get("run_id", "")
        recording.begin(run_id, self._state["question"], self._state["document"], context.prompts, self._trace)
        began, seconds = self._asked
        usage = self._usage(completion)
        events = self.events[self._logged_events :]
        self._logged_events = len(self.events)
        place, chunk = self._place, self._place.chunk_index
        position = chunk if chunk is not None else self._state.get("chunks_read", 0)
        is_the_reply = outcome is not Outcome.KEPT_PREVIOUS and memory == completion.text.strip()
        recording.record(
            Conversation(
                run_id=run_id,
                node=place.node,
                branch=place.branch,
                role=self._role.name,
                slot=place.slot,
                writes=self._role.writes,
                position=position,
                step=self.id,
                attempt=self._attempts - 1,
                outcome=outcome,
                began=began,
                seconds=seconds,
                policy=completion.model,
                policy_version=completion.policy_version,
                tokenizer=context.tokenizer.fingerprint,
                template=context.prompts.fingerprint,
                sampling=_as_logged(self._sampling(self._attempts - 1)),
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                finish_reason=completion.finish_reason.value,
                text=completion.text,
                memory=None if is_the_reply else memory,
                prompt_token_ids=completion.prompt_token_ids,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                parents=place.parents,
                reads=tuple(map(as_span, place.reads)),
                events=tuple(
                    LoggedEvent(began + seconds, event["kind"], event["detail"], chunk, event["rule"])
                    for event in events
                ),
                trace=self._trace,
            ),
            [message["content"] for message in self._messages],
        )


def first_tokens(context: ReaderContext, text: str, tokens: int) -> str:
    """A text's first tokens, up to 3 fewer if the last one would end inside a character."""
    tokenizer = context.tokenizer
    ids = tokenizer.encode(text)
    if len(ids) <= tokens:
        return text
    lengths = (tokenizer.prefix_chars(text, ids, kept) for kept in range(tokens, 0, -1))
    return text[: next((length for length in lengths if length is not None), 0)].rstrip()


def shown_tokens(context: ReaderContext, text: str) -> int:
    """How many tokens a text has in a prompt, where some of it may be escaped."""
    return context.tokenizer.count(context.prompts.neutralise(text))


def beginning(context: ReaderContext, text: str, tokens: int) -> str:
    """A text's beginning that has at most that many tokens in a prompt."""
    cut = first_tokens(context, text, tokens)
    while cut and (excess := shown_tokens(context, cut) - tokens) > 0:
        cut = first_tokens(context, cut, max(0, context.tokenizer.count(cut) - excess))
    return cut


def as_span(span: ChunkSpan) -> Span:
    """A chunk's place, in the form of the trace."""
    return Span(
        span["index"], span["start_char"], span["end_char"], span["start_byte"], span["end_byte"], span["tokens"]
    )


@lru_cache
def _bounded(
    sampling: SamplingParams, max_tokens: int, attempt: int, json_schema: str | None, session: str
) -> SamplingParams:
    seed = None if sampling.seed is None else sampling.seed + attempt
    return replace(sampling, max_tokens=max_tokens, seed=seed, json_schema=json_schema, session=session)


@lru_cache
def _greedy(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, temperature=0.0, top_p=1.0, logprobs=True)


@lru_cache
def _as_logged(sampling: SamplingParams) -> dict[str, object]:
    """The values for the log, without the session; of a schema, which the settings have, whether there was one."""
    values = asdict(sampling)
    del values["session"]
    schema = values.pop("json_schema")
    return values if schema is None else {**values, "json_schema": True}
