"""Calls the policy in a role until a reply is accepted or the attempts are used up; counts and logs the attempts.

In every strategy, each call of the policy goes through a `PolicyRequest`. Only this module has sampling, the
rules for bad replies (cut off, empty, refused), retries, counters and logging.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from memagent_graph.errors import PromptCutError
from memagent_graph.events import EventKind, ReadEvent, UpdateRule
from memagent_graph.policy import Completion, FinishReason, Message, Messages, SamplingParams, TokenUsage
from memagent_graph.reading.execution import StepExecution
from memagent_graph.reading.prompt_cuts import PromptCutDetector
from memagent_graph.reading.state import Counters, add_cost
from memagent_graph.reasoning import extract_reply
from memagent_graph.response_format import ResponseFormat
from memagent_graph.roles import ParsedReply, ParseFailure, Role
from memagent_graph.run_log import Conversation, Outcome
from memagent_graph.trace import Call, Writes
from memagent_graph.words import find_invented_word


@dataclass(frozen=True, slots=True)
class Reply:
    """The policy's reply in a role."""

    text: str
    """The new memory, the answer completion without reasoning, or the text of the decision."""
    value: Any
    """The result of the role's parser, or the answer. None if the reply was not accepted."""
    completion_text: str
    """The newest completion, unchanged."""
    call: Call
    """The record of the call."""
    format_error: str | None = None
    """The reason why a structured answer does not match its schema; None if it matches or is not structured."""

    @property
    def call_id(self) -> str:
        """The call's id in the trace. Later calls have it in their `parents`."""
        return self.call.id


class PolicyRequest:
    """One request to the policy, with all its attempts.

    Args:
        step: the step that asks. The cost of the request is added to the step's cost.
        role: the role.
        call: the record of the call, without its reply.
        fields: the fields of the role's template.
        previous_memory: the memory that is kept if no reply is accepted.
        question: the text of {prompt}; None for the run's question.
        continues_branch: whether the only parent is the branch's newest call.
    """

    def __init__(
        self,
        step: StepExecution,
        role: Role,
        call: Call,
        fields: Mapping[str, str],
        previous_memory: str,
        question: str | None,
        *,
        continues_branch: bool,
    ) -> None:
        self._step, self._context = step, step.context
        self._role, self._call = role, call
        self._previous_memory, self._continues_branch = previous_memory, continues_branch
        prompt = question or step.state["question"]
        if question is None and role.writes is not Writes.ANSWER:
            prompt = self._context.format_question(prompt)
        fields = {"schema": self._context.schema, **fields}
        self._messages: Messages = self._context.prompts.messages(role.name, prompt, **fields)
        self._chunk_index = step.chunk_index = call.reads[0].index if call.reads else None
        self._max_tokens = role.count_reply_tokens(step.context.budget)
        self._attempt_count = self._logged_event_count = 0
        self._start_time = time.perf_counter()
        self._format_error: str | None = None
        self._events: list[ReadEvent] = []
        self._cost = Counters()
        if any(span.shortened for span in call.reads):
            self._add_event(EventKind.SHORTENED_CHUNK, "escaping made the chunk longer than its budget")
        if any(span.splits for span in call.reads):
            self._add_event(EventKind.SPLIT_CHARACTER, "a character is longer than a chunk, or no token ends it")
        self._events += call.events

    async def request_reply(self) -> Reply:
        """Send requests until the rules accept a reply or the attempts are used up, and return the last reply."""
        if self._role.writes is Writes.ANSWER:
            text, value = await self._request_answer()
        else:
            text, value = await self._request_update()
        cost, step = self._cost, self._step
        step.cost = add_cost(step.cost, cost)
        call = replace(
            self._call,
            text=text,
            usage=TokenUsage(cost["prompt_tokens"], cost["completion_tokens"], cost["cached_tokens"]),
            seconds=time.perf_counter() - self._start_time,
            events=tuple(self._events),
        )
        step.calls.append(call)
        if call.reads or call.writes is not Writes.DECISION:
            step.tips[call.branch] = call.id
        return Reply(text, value, call.completion.text, call, self._format_error)

    def _add_event(self, kind: EventKind, detail: str, rule: UpdateRule | None = None) -> None:
        """Add an event for the user."""
        self._events.append(ReadEvent(kind, self._chunk_index, detail, rule))

    async def _request_update(self) -> tuple[str, Any]:
        """Return the text of the new memory or decision, and its parsed value, by the rules for the reply."""
        context = self._context
        for remaining in range(context.rules.retries, -1, -1):
            completion = await self._request_completion()
            text = extract_reply(completion.text).strip()
            parsed: ParsedReply | ParseFailure | None = self._validate(completion, text)
            if isinstance(parsed, ParseFailure):
                failure, rule = parsed, context.rules.rule_for(parsed.kind)
                if rule is UpdateRule.RETRY and remaining:
                    self._add_event(failure.kind, failure.detail, rule)
                    self._add_event(EventKind.RESAMPLED, f"{remaining} more tries")
                    self._log_attempt(Outcome.DISCARDED)
                    continue
                parsed = self._role.parse(self._truncate(text), context.prompts) if rule is UpdateRule.ACCEPT else None
                if not isinstance(parsed, ParsedReply) or parsed.text is None:
                    parsed, rule = None, UpdateRule.KEEP_PREVIOUS
                self._add_event(failure.kind, failure.detail, rule)
            if parsed is None or parsed.text is None:
                memory = self._previous_memory if self._role.writes is Writes.MEMORY else None
                # If the only parent is the branch's newest call, the log has the memory there.
                self._log_attempt(Outcome.KEPT_PREVIOUS, None if self._continues_branch else memory)
                return memory or "", parsed.value if parsed else None
            self._log_attempt(Outcome.ACCEPTED, parsed.text)
            return parsed.text, parsed.value
        raise AssertionError("the last attempt always returns")

    async def _request_answer(self) -> tuple[str, str | None]:
        """Return the answer completion without its reasoning, and the answer in it.

        Both are empty if the policy writes nothing or refuses in all attempts. A structured answer is JSON.
        """
        extract, response_format = self._context.prompts.extract_answer, self._context.response_format
        for remaining in range(self._context.rules.retries, -1, -1):
            completion = await self._request_completion()
            text = extract_reply(completion.text).strip()
            if completion.finish_reason is FinishReason.REFUSED:
                self._add_event(EventKind.REFUSED, "the policy refused to answer")
                self._log_attempt(Outcome.ACCEPTED)
                return "", extract("")
            if completion.finish_reason is FinishReason.LENGTH:
                self._add_event(EventKind.TRUNCATED, f"the answer was cut at {self._max_tokens} tokens")
            if text:
                extracted = self._parse_structured(response_format, text) if response_format else extract(text)
                if extracted is None:
                    self._add_event(EventKind.UNBOXED_ANSWER, "the completion has no \\boxed{...}; it was taken whole")
                    extracted = text
                self._log_attempt(Outcome.ACCEPTED)
                return text, extracted
            self._add_event(EventKind.EMPTY, "the policy wrote no answer")
            if remaining:
                self._add_event(EventKind.RESAMPLED, f"{remaining} more tries")
            self._log_attempt(Outcome.DISCARDED if remaining else Outcome.ACCEPTED)
        return "", extract("")

    def _parse_structured(self, response_format: ResponseFormat, text: str) -> str:
        """Return the JSON in an answer; if it does not match the schema, add an event and return the whole text."""
        answer_or_error = response_format.parse(text)
        if not isinstance(answer_or_error, str):
            return answer_or_error.text
        self._format_error = answer_or_error
        self._add_event(EventKind.INVALID_ANSWER, answer_or_error)
        return text

    async def _request_completion(self) -> Completion:
        """Request one completion, and count it."""
        context, turn = self._context, self._step.processor_turn
        response_format = context.response_format if self._role.writes is Writes.ANSWER else None
        schema = response_format.server_schema_json if response_format else None
        session = self._step.state["document"]["key"]
        self._sampling = _make_attempt_sampling(
            context.sampling, self._max_tokens, self._attempt_count, schema, session
        )
        turn.end()
        self._attempt_start, timer_start = time.time(), time.perf_counter()
        completion = await context.policy.complete(self._messages, self._sampling)
        self._attempt_seconds = time.perf_counter() - timer_start
        self._usage = usage = completion.count_tokens(self._messages, context.tokenizer.count)
        await turn.begin()
        ids, logprobs = completion.token_ids, completion.logprobs
        missing_field = "token ids" if ids is None else "log-probs" if logprobs is None else ""
        if ids is not None and logprobs is not None and len(ids) != len(logprobs):
            # Ids and log-probs cannot be matched then, and must not be used for training.
            self._add_event(
                EventKind.LOGPROBS_DROPPED, f"the server sent {len(logprobs)} log-probs for {len(ids)} tokens"
            )
            completion = replace(completion, logprobs=None)
        elif missing_field and context.sampling.logprobs and EventKind.LOGPROBS_DROPPED not in dict(completion.notes):
            self._add_event(EventKind.LOGPROBS_DROPPED, f"the server sent no {missing_field}")
        self._add_usage(usage)
        self._attempt_count += 1
        for kind, detail in completion.notes:
            self._add_event(kind, detail)
        if completion.usage and context.prompt_cut_detector:
            await self._require_whole_prompt(context.prompt_cut_detector, completion.usage.prompt_tokens)
        if completion.retries:
            self._add_event(EventKind.REQUEST_RETRIED, f"the request was sent {completion.retries + 1} times")
        self._call = replace(self._call, completion=completion)
        return completion

    def _add_usage(self, usage: TokenUsage) -> None:
        """Count the tokens and operations of a request."""
        context = self._context
        flops = 0.0
        if context.shape is not None:
            flops = context.shape.forward_flops(usage.prompt_tokens, usage.completion_tokens)
        cost: Any = {**asdict(usage), "turns": 1, "flops": flops}
        self._cost = add_cost(self._cost, cost)
        self._step.execution.token_count += usage.prompt_tokens + usage.completion_tokens

    async def _count_at_server(self, text: str) -> int:
        """Return the server's token count of a text that is sent alone; 0 if the server does not report one."""
        prompt = [Message(role="user", content=text)]
        completion = await self._context.policy.complete(prompt, SamplingParams(max_tokens=16))
        self._add_usage(completion.usage or TokenUsage(0, 0))
        return completion.usage.prompt_tokens if completion.usage else 0

    async def _require_whole_prompt(self, detector: PromptCutDetector, server_count: int) -> None:
        """Report a prompt that the server cut, or stop the read."""
        reads, count_at_server = self._call.reads, self._count_at_server
        missing_tokens = await detector.count_missing_tokens(self._messages, reads, server_count, count_at_server)
        if not missing_tokens:
            return
        counts_text = f"it counts {server_count:,} tokens, and about {missing_tokens:,} more were sent"
        detail = f"the server cut the prompt: {counts_text}"
        if self._context.on_incomplete == "stop":
            raise PromptCutError(
                detail,
                hint="Raise the server's window (Ollama: OLLAMA_CONTEXT_LENGTH), or set --context-window to the window "
                "that `memagent doctor` shows.",
            )
        self._add_event(EventKind.PROMPT_CUT, detail)

    def _validate(self, completion: Completion, text: str) -> ParsedReply | ParseFailure:
        """Return the parsed reply, or the first problem with it."""
        output = "memory" if self._role.writes is Writes.MEMORY else self._role.name
        if completion.finish_reason is FinishReason.REFUSED:
            verb = "update the memory" if output == "memory" else f"write the {output}"
            return ParseFailure(EventKind.REFUSED, f"the policy refused to {verb}")
        if not text:
            return ParseFailure(EventKind.EMPTY, f"the policy wrote no {output}")
        if self._context.rules.rule_for(EventKind.INVENTED) is not UpdateRule.ACCEPT and output == "memory":
            invented_word = find_invented_word(self._truncate(text), [message["content"] for message in self._messages])
            if invented_word is not None:
                return ParseFailure(
                    EventKind.INVENTED, f"the memory has {invented_word[:40]!r}, which stands nowhere in the prompt"
                )
        if completion.finish_reason is FinishReason.LENGTH:
            return ParseFailure(EventKind.TRUNCATED, f"the {output} was cut off at {self._max_tokens} tokens")
        reply_tokens = completion.usage.completion_tokens if completion.usage else None
        is_escaped_in_prompts = self._context.prompts.neutralise(text) != text
        may_exceed = reply_tokens is None or reply_tokens > self._max_tokens or is_escaped_in_prompts
        if may_exceed and (excess_tokens := self._context.count_shown_tokens(text) - self._max_tokens) > 0:
            detail = f"{self._max_tokens + excess_tokens} tokens, {excess_tokens} beyond its budget"
            return ParseFailure(EventKind.OVERLONG, f"the {output} has {detail}")
        return self._role.parse(text, self._context.prompts)

    def _truncate(self, text: str) -> str:
        return self._context.truncate(text, self._max_tokens)

    def _log_attempt(self, outcome: Outcome, memory: str | None = None) -> None:
        """Log the newest attempt, with the events since the previous one."""
        context, call, state, recording = self._context, self._call, self._step.state, self._step.execution.recording
        if recording is None or recording.failure is not None:
            return
        recording.begin(self._step)
        completion, usage = call.completion, self._usage
        events = self._events[self._logged_event_count :]
        self._logged_event_count = len(self._events)
        is_reply_unchanged = outcome is not Outcome.KEPT_PREVIOUS and memory == completion.text.strip()
        recording.record(
            Conversation(
                run_id=state["run_id"],
                node=call.node,
                branch=call.branch,
                role=call.role,
                slot=call.slot,
                writes=call.writes,
                position=state.get("chunks_read", 0) if self._chunk_index is None else self._chunk_index,
                call_id=call.id,
                attempt=self._attempt_count - 1,
                outcome=outcome,
                began=self._attempt_start,
                seconds=self._attempt_seconds,
                policy=completion.model,
                **completion.origin,
                tokenizer=context.tokenizer.fingerprint,
                template=context.prompts.fingerprint,
                sampling=_describe_sampling(self._sampling),
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                finish_reason=completion.finish_reason.value,
                text=completion.text,
                memory=None if is_reply_unchanged else memory,
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
def _make_attempt_sampling(
    sampling: SamplingParams, max_tokens: int, attempt: int, json_schema: str | None, session: str
) -> SamplingParams:
    """Return the sampling of an attempt. The seed changes, because the same seed would give the same reply."""
    seed = None if sampling.seed is None else sampling.seed + attempt
    return replace(sampling, max_tokens=max_tokens, seed=seed, json_schema=json_schema, session=session)


@lru_cache
def _describe_sampling(sampling: SamplingParams) -> dict[str, object]:
    """Return the sampling for the log, without the session. The log has only whether there was a schema."""
    values = asdict(sampling)
    del values["session"]
    schema = values.pop("json_schema")
    return values if schema is None else {**values, "json_schema": True}
