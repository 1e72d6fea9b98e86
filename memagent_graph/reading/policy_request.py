"""Calls the policy in a role until a reply is accepted or the attempts are used up; counts and logs the calls.

Every call of the policy in a read goes through a `PolicyRequest`, in every strategy. Only this module has sampling, the
rules for bad replies (cut off, empty, refused), retries, counting and logging.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from memagent_graph.calls import Call, Writes
from memagent_graph.errors import PromptCutError
from memagent_graph.events import EventKind, ReadEvent, UpdateRule
from memagent_graph.policy import Completion, FinishReason, Message, Messages, SamplingParams, TokenUsage
from memagent_graph.reading.execution import StepExecution
from memagent_graph.reading.prompt_counts import PromptCounts
from memagent_graph.reading.state import Counters, add_cost
from memagent_graph.reasoning import extract_reply
from memagent_graph.roles import ParsedReply, ParseFailure, Role
from memagent_graph.run_log import Conversation, Outcome
from memagent_graph.words import find_invented_word


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's reply in a role."""

    text: str
    """The new memory, the answer completion without reasoning, or the text of the decision."""
    value: Any
    """The result of the role's parser, or the answer. None if the reply was not accepted."""
    raw: str
    """The newest completion, unchanged."""
    call: Call
    """The record of the call."""
    invalid: str | None = None
    """The problem with the form of a structured answer; None if there is none."""

    @property
    def call_id(self) -> str:
        """The call's id in the trace. Later calls have it in their `parents`."""
        return self.call.id


class PolicyRequest:
    """One request to the policy, with all its attempts.

    Args:
        step: the step that asks. The cost of the request is added to its own.
        role: the role.
        call: the record of the call before its reply.
        fields: the fields of the role's template.
        previous: the memory that is kept if no reply is accepted.
        question: the text of {prompt}; None for the run's question.
        continues: whether the only parent is the call that wrote the previous memory.
    """

    def __init__(
        self,
        step: StepExecution,
        role: Role,
        call: Call,
        fields: Mapping[str, str],
        previous: str,
        question: str | None,
        *,
        continues: bool,
    ) -> None:
        self._step, self._context = step, step.context
        self._role, self._call = role, call
        self._previous, self._continues = previous, continues
        prompt = question or step.state["question"]
        if self._context.structure is not None:
            fields = {"schema": self._context.schema, **fields}
            if question is None and role.writes is not Writes.ANSWER:
                prompt = self._context.question_shown(prompt)
        self._messages: Messages = self._context.prompts.messages(role.name, prompt, **fields)
        self._chunk = step.chunk = call.reads[0].index if call.reads else None
        self._bound = role.tokens(step.context.budget)
        self._attempts = self._logged_events = 0
        self._attempt = 0.0, 0.0, TokenUsage(0, 0)
        self._begin = time.perf_counter()
        self._invalid: str | None = None
        self._events: list[ReadEvent] = []
        self._cost = Counters()
        if any(span.shortened for span in call.reads):
            self._note(EventKind.SHORTENED_CHUNK, "escaping made the chunk longer than its budget")
        if any(span.splits for span in call.reads):
            self._note(EventKind.SPLIT_CHARACTER, "a character is longer than a chunk, or no token ends it")
        self._events += call.events

    async def reply(self) -> Reply:
        """Ask until a reply is accepted by the rules."""
        if self._role.writes is Writes.ANSWER:
            text, value = await self._answer()
        else:
            text, value = await self._apply_rules()
        cost, step = self._cost, self._step
        step.cost = add_cost(step.cost, cost)
        call = replace(
            self._call,
            text=text,
            usage=TokenUsage(cost["prompt_tokens"], cost["completion_tokens"], cost["cached_tokens"]),
            seconds=time.perf_counter() - self._begin,
            events=tuple(self._events),
        )
        step.calls.append(call)
        if call.reads or call.writes is not Writes.DECISION:
            step.tips[call.branch] = call.id
        return Reply(text, value, call.completion.text, call, self._invalid)

    def _note(self, kind: EventKind, detail: str, rule: UpdateRule | None = None) -> None:
        """Add an event for the user."""
        self._events.append(ReadEvent(kind, self._chunk, detail, rule))

    async def _apply_rules(self) -> tuple[str, Any]:
        """Return the new memory or the decision, by the rules for the policy's reply."""
        rules = self._context.rules
        for remaining in range(rules.retries, -1, -1):
            completion = await self._complete()
            text = extract_reply(completion.text).strip()
            parsed: ParsedReply | ParseFailure | None = self._check(completion, text)
            if isinstance(parsed, ParseFailure):
                failure, rule = parsed, rules.rule_for(parsed.kind)
                if rule is UpdateRule.RETRY and remaining:
                    self._note(failure.kind, failure.detail, rule)
                    self._note(EventKind.RESAMPLED, f"{remaining} more tries")
                    self._log(completion, Outcome.DISCARDED)
                    continue
                parsed = self._parse(self._truncate(text)) if rule is UpdateRule.ACCEPT else None
                if not isinstance(parsed, ParsedReply) or parsed.text is None:
                    parsed, rule = None, UpdateRule.KEEP_PREVIOUS
                self._note(failure.kind, failure.detail, rule)
            if parsed is None or parsed.text is None:
                self._log(completion, Outcome.KEPT_PREVIOUS, self._logged_previous)
                kept = self._previous if self._role.writes is Writes.MEMORY else ""
                return kept, parsed.value if parsed else None
            self._log(completion, Outcome.ACCEPTED, parsed.text)
            return parsed.text, parsed.value
        raise AssertionError("the last try always returns")

    @property
    def _logged_previous(self) -> str | None:
        """The memory that is kept, for the log; None if the only parent has the same memory."""
        return None if self._continues or self._role.writes is not Writes.MEMORY else self._previous

    async def _answer(self) -> tuple[str, str | None]:
        """Return the answer completion without its reasoning, and the answer in it.

        Both are empty if the policy writes nothing or refuses in all attempts. A structured answer is JSON.
        """
        extract = self._context.prompts.extract_answer
        for remaining in range(self._context.rules.retries, -1, -1):
            completion = await self._complete()
            text = extract_reply(completion.text).strip()
            if completion.finish_reason is FinishReason.REFUSED:
                self._note(EventKind.REFUSED, "the policy refused to answer")
                self._log(completion, Outcome.ACCEPTED)
                return "", extract("")
            if completion.finish_reason is FinishReason.LENGTH:
                self._note(EventKind.TRUNCATED, f"the answer was cut at {self._bound} tokens")
            if text:
                extracted = self._parse_structured_answer(text) if self._context.structure else extract(text)
                if extracted is None:
                    self._note(EventKind.UNBOXED_ANSWER, "the completion has no \\boxed{...}; it was taken whole")
                    extracted = text
                self._log(completion, Outcome.ACCEPTED)
                return text, extracted
            self._note(EventKind.EMPTY, "the policy wrote no answer")
            if remaining:
                self._note(EventKind.RESAMPLED, f"{remaining} more tries")
            self._log(completion, Outcome.DISCARDED if remaining else Outcome.ACCEPTED)
        return "", extract("")

    def _parse_structured_answer(self, text: str) -> str:
        """Return the JSON in an answer, or the whole text and an event if it does not have the form."""
        from memagent_graph.response_format import StructuredAnswer  # noqa: PLC0415  only structured reads need it

        assert self._context.structure is not None  # noqa: S101
        match = self._context.structure.format.parse(text)
        if isinstance(match, StructuredAnswer):
            return match.text
        self._invalid = match
        self._note(EventKind.INVALID_ANSWER, match)
        return text

    async def _complete(self) -> Completion:
        """Request one completion, and count it."""
        context, turn = self._context, self._step.turn
        turn.end()
        begin = time.time()
        completion = await context.policy.complete(self._messages, self._choose_sampling(self._attempts))
        seconds, usage = time.time() - begin, completion.count_tokens(self._messages, context.tokenizer.count)
        self._attempt = begin, seconds, usage
        await turn.begin()
        ids, logprobs = completion.token_ids, completion.logprobs
        missing = "token ids" if ids is None else "log-probs" if logprobs is None else ""
        if ids is not None and logprobs is not None and len(ids) != len(logprobs):
            # Ids and log-probs cannot be matched then, and must not be used for training.
            self._note(EventKind.LOGPROBS_DROPPED, f"{len(logprobs)} log-probs came with {len(ids)} tokens")
            completion = replace(completion, logprobs=None)
        elif missing and context.sampling.logprobs and EventKind.LOGPROBS_DROPPED not in dict(completion.notes):
            self._note(EventKind.LOGPROBS_DROPPED, f"no {missing} came")
        self._spend(usage)
        self._attempts += 1
        for kind, detail in completion.notes:
            self._note(kind, detail)
        if completion.usage and context.prompt_counts:
            await self._require_whole_prompt(context.prompt_counts, completion.usage.prompt_tokens)
        if completion.retries:
            self._note(EventKind.REQUEST_RETRIED, f"the request was sent {completion.retries + 1} times")
        self._call = replace(self._call, completion=completion)
        return completion

    def _spend(self, usage: TokenUsage) -> None:
        """Count the tokens and operations of a request."""
        context = self._context
        flops = 0.0
        if context.shape is not None:
            flops = context.shape.forward_flops(usage.prompt_tokens, usage.completion_tokens)
        cost: Any = {**asdict(usage), "turns": 1, "flops": flops}
        self._cost = add_cost(self._cost, cost)
        self._step.execution.tokens += usage.prompt_tokens + usage.completion_tokens

    async def _count_at_server(self, text: str) -> int:
        """Send a text alone and return the server's count of its tokens; 0 if the server does not report it."""
        prompt = [Message(role="user", content=text)]
        completion = await self._context.policy.complete(prompt, SamplingParams(max_tokens=16))
        self._spend(completion.usage or TokenUsage(0, 0))
        return completion.usage.prompt_tokens if completion.usage else 0

    async def _require_whole_prompt(self, counts: PromptCounts, counted: int) -> None:
        """Report a prompt that the server cut, or stop the read."""
        missing = await counts.missing_tokens(self._messages, self._call.reads, counted, self._count_at_server)
        if not missing:
            return
        detail = f"the server cut the prompt: it counts {counted:,} tokens, and about {missing:,} more were sent"
        if self._context.on_incomplete == "stop":
            raise PromptCutError(
                detail,
                hint="Raise the server's window (Ollama: OLLAMA_CONTEXT_LENGTH), or set --context-window to the window "
                "that `memagent doctor` shows.",
            )
        self._note(EventKind.PROMPT_CUT, detail)

    def _choose_sampling(self, attempt: int) -> SamplingParams:
        """Return the sampling of an attempt. The seed changes, because the same seed would give the same reply."""
        structure = self._context.structure if self._role.writes is Writes.ANSWER else None
        schema, session = structure.format.server_schema if structure else None, self._step.state["document"]["key"]
        return _request_sampling(self._context.sampling, self._bound, attempt, schema, session)

    def _check(self, completion: Completion, text: str) -> ParsedReply | ParseFailure:
        """Return the parsed reply, or the first problem with it."""
        what = "memory" if self._role.writes is Writes.MEMORY else self._role.name
        if completion.finish_reason is FinishReason.REFUSED:
            verb = "update the memory" if what == "memory" else f"write the {what}"
            return ParseFailure(EventKind.REFUSED, f"the policy refused to {verb}")
        if not text:
            return ParseFailure(EventKind.EMPTY, f"the policy wrote no {what}")
        if self._context.rules.rule_for(EventKind.INVENTED) is not UpdateRule.ACCEPT and what == "memory":
            word = find_invented_word(self._truncate(text), [message["content"] for message in self._messages])
            if word is not None:
                return ParseFailure(
                    EventKind.INVENTED, f"the memory has {word[:40]!r}, which stands nowhere in the prompt"
                )
        if completion.finish_reason is FinishReason.LENGTH:
            return ParseFailure(EventKind.TRUNCATED, f"the {what} was cut off at {self._bound} tokens")
        written = completion.usage.completion_tokens if completion.usage else None
        is_longer_in_prompts = self._context.prompts.neutralise(text) != text
        may_exceed = written is None or written > self._bound or is_longer_in_prompts
        if may_exceed and (excess := self._context.shown_tokens(text) - self._bound) > 0:
            tokens = self._bound + excess
            return ParseFailure(EventKind.OVERLONG, f"the {what} has {tokens} tokens, {excess} beyond its budget")
        return self._parse(text)

    def _parse(self, text: str) -> ParsedReply | ParseFailure:
        return self._role.parse(text, self._context.prompts)

    def _truncate(self, text: str) -> str:
        return self._context.beginning(text, self._bound)

    def _log(self, completion: Completion, outcome: Outcome, memory: str | None = None) -> None:
        """Log the newest attempt, with the events since the previous one."""
        context, call, state, recording = self._context, self._call, self._step.state, self._step.execution.recording
        if recording is None or recording.failure is not None:
            return
        recording.begin(self._step)
        began, seconds, usage = self._attempt
        events = self._events[self._logged_events :]
        self._logged_events = len(self._events)
        is_the_reply = outcome is not Outcome.KEPT_PREVIOUS and memory == completion.text.strip()
        recording.record(
            Conversation(
                run_id=state["run_id"],
                node=call.node,
                branch=call.branch,
                role=call.role,
                slot=call.slot,
                writes=call.writes,
                position=state.get("chunks_read", 0) if self._chunk is None else self._chunk,
                call_id=call.id,
                attempt=self._attempts - 1,
                outcome=outcome,
                began=began,
                seconds=seconds,
                policy=completion.model,
                **completion.origin,
                tokenizer=context.tokenizer.fingerprint,
                template=context.prompts.fingerprint,
                sampling=_describe_sampling(self._choose_sampling(self._attempts - 1)),
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                finish_reason=completion.finish_reason.value,
                text=completion.text,
                memory=None if is_the_reply else memory,
                prompt_token_ids=completion.prompt_token_ids,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                parents=call.parents,
                reads=call.reads,
                events=tuple(events),
                trace=self._step.trace,
            ),
            [message["content"] for message in self._messages],
        )


@lru_cache
def _request_sampling(
    sampling: SamplingParams, max_tokens: int, attempt: int, json_schema: str | None, session: str
) -> SamplingParams:
    seed = None if sampling.seed is None else sampling.seed + attempt
    return replace(sampling, max_tokens=max_tokens, seed=seed, json_schema=json_schema, session=session)


@lru_cache
def _describe_sampling(sampling: SamplingParams) -> dict[str, object]:
    """Return the sampling for the log, without the session. The log has only whether there was a schema."""
    values = asdict(sampling)
    del values["session"]
    schema = values.pop("json_schema")
    return values if schema is None else {**values, "json_schema": True}
