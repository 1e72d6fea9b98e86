"""The completions asked for in one step: which of them counts, what they cost, and their entries in the run log."""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import lru_cache

from memagent_graph.policy import Completion, FinishReason, Messages, SamplingParams, TokenUsage, strip_reasoning
from memagent_graph.reading.state import ChunkSpan, Counters, EventRecord, ReaderContext, ReaderState, event_record
from memagent_graph.results import EventKind, UpdateRule
from memagent_graph.run_log import Conversation, ConversationKind, LoggedEvent, Outcome
from memagent_graph.run_log.recording import new_step

_WORD = re.compile(r"\d+|[^\W\d_]+")
"""A number, or letters in a row: of `4711kg`, either alone stands there, too."""


def word_from_nowhere(text: str, shown: Iterable[str]) -> str | None:
    """The first word or number of a text that is none of what was shown; None where there is none.

    Letters' case and Unicode's other forms of the same characters (NFKC) make no difference.
    """
    known = {word for each in shown for word in _words(each)}
    return next((word for word in _words(text) if word not in known), None)


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class Drafts:
    """One step's attempts at a memory, or at an answer.

    Args:
        state: the state the step began with.
        context: what it works with.
        span: the chunk that it reads; None for the answer.
    """

    def __init__(self, state: ReaderState, context: ReaderContext, span: ChunkSpan | None = None) -> None:
        self._state = state
        self._context = context
        self._span = span
        self._chunk_index = span["index"] if span else None
        self._bound = context.budget.memory_tokens if span else context.budget.answer_tokens
        self._step = new_step() if context.meter.recording else ""
        self._logged_events = 0
        self._asked = (0.0, 0.0)
        self.events: list[EventRecord] = []
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = self.turns = 0
        self.flops = 0.0
        self.finish_reason = ""
        self.model = ""
        self.raw_text = ""

    def note(self, kind: EventKind, detail: str, rule: UpdateRule | None = None) -> None:
        """Something happened that a user should know of."""
        self.events.append(event_record(kind, self._chunk_index, detail, rule))

    async def memory(self, messages: Messages, previous: str) -> str:
        """The new memory, by the rules for what the policy wrote."""
        rules = self._context.rules
        for remaining in range(rules.retries, -1, -1):
            completion = await self._ask(messages)
            text = strip_reasoning(completion.text).strip()
            trouble = self._trouble(completion, text, messages)
            if trouble is None:
                self._log(completion, messages, Outcome.ACCEPTED, text)
                return text
            kind, detail = trouble
            rule = rules.rule_for(kind)
            if rule is UpdateRule.RETRY and remaining:
                self.note(kind, detail, rule)
                self.note(EventKind.RESAMPLED, f"{remaining} more tries")
                self._log(completion, messages, Outcome.DISCARDED)
                continue
            if rule is UpdateRule.ACCEPT:
                self.note(kind, detail, rule)
                text = self._cut(text)
                self._log(completion, messages, Outcome.ACCEPTED, text)
                return text
            self.note(kind, detail, UpdateRule.KEEP_PREVIOUS)
            self._log(completion, messages, Outcome.KEPT_PREVIOUS)
            return previous
        raise AssertionError("the last try always returns")

    async def answer(self, messages: Messages) -> tuple[str, str | None]:
        """The answer completion without its reasoning, and the answer in it.

        Both are empty when the policy keeps writing nothing, or refuses.
        """
        for remaining in range(self._context.rules.retries, -1, -1):
            completion = await self._ask(messages)
            text = strip_reasoning(completion.text).strip()
            if completion.finish_reason is FinishReason.REFUSED:
                self.note(EventKind.REFUSED, "the policy refused to answer")
                self._log(completion, messages, Outcome.ACCEPTED)
                return "", self._context.prompts.extract_answer("")
            if completion.finish_reason is FinishReason.LENGTH:
                self.note(EventKind.TRUNCATED, f"the answer was cut at {self._bound} tokens")
            if text:
                extracted = self._context.prompts.extract_answer(text)
                if extracted is None:
                    self.note(EventKind.UNBOXED_ANSWER, "the completion has no \\boxed{...}; it was taken whole")
                    extracted = text
                self._log(completion, messages, Outcome.ACCEPTED)
                return text, extracted
            self.note(EventKind.EMPTY, "the policy wrote no answer")
            if remaining:
                self.note(EventKind.RESAMPLED, f"{remaining} more tries")
            self._log(completion, messages, Outcome.DISCARDED if remaining else Outcome.ACCEPTED)
        return "", self._context.prompts.extract_answer("")

    def add_to(self, total: Counters, seconds: float, document_tokens: int = 0) -> Counters:
        """The running totals with this step's cost added."""
        return Counters(
            prompt_tokens=total["prompt_tokens"] + self.prompt_tokens,
            completion_tokens=total["completion_tokens"] + self.completion_tokens,
            cached_tokens=total["cached_tokens"] + self.cached_tokens,
            turns=total["turns"] + self.turns,
            seconds=total["seconds"] + seconds,
            flops=total["flops"] + self.flops,
            document_tokens=total["document_tokens"] + document_tokens,
        )

    async def _ask(self, messages: Messages) -> Completion:
        context = self._context
        context.meter.turn.end()
        begin = time.time()
        completion = await context.policy.complete(messages, self._sampling(self.turns))
        self._asked = begin, time.time() - begin
        await context.meter.turn.begin()
        usage = self._usage(messages, completion)
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += usage.cached_tokens
        self.turns += 1
        context.meter.tokens += usage.prompt_tokens + usage.completion_tokens
        if context.shape is not None:
            self.flops += context.shape.forward_flops(usage.prompt_tokens, usage.completion_tokens)
        if completion.retries:
            self.note(EventKind.REQUEST_RETRIED, f"the request was sent {completion.retries + 1} times")
        self.finish_reason, self.model, self.raw_text = (
            completion.finish_reason.value,
            completion.model,
            completion.text,
        )
        return completion

    def _sampling(self, attempt: int) -> SamplingParams:
        """How an attempt is sampled: with the same seed, another would be the same."""
        return _bounded(self._context.sampling, self._bound, attempt)

    def _usage(self, messages: Messages, completion: Completion) -> TokenUsage:
        """The server's count, or ours where it reports none."""
        if completion.usage is not None:
            return completion.usage
        count = self._context.tokenizer.count
        return TokenUsage(sum(count(message["content"]) for message in messages), count(completion.text))

    def _log(self, completion: Completion, messages: Messages, outcome: Outcome, memory: str | None = None) -> None:
        """Hand the newest attempt in, with the events since the one before it."""
        context, span = self._context, self._span
        recording = context.meter.recording
        if recording is None or recording.failure is not None:
            return
        run_id = self._state.get("run_id", "")
        recording.begin(run_id, self._state["question"], self._state["document"], context.prompts)
        began, seconds = self._asked
        usage = self._usage(messages, completion)
        events = self.events[self._logged_events :]
        self._logged_events = len(self.events)
        recording.record(
            Conversation(
                run_id=run_id,
                position=span["index"] if span is not None else self._state.get("chunks_read", 0),
                kind=ConversationKind.UPDATE if span is not None else ConversationKind.ANSWER,
                step=self._step,
                attempt=self.turns - 1,
                outcome=outcome,
                began=began,
                seconds=seconds,
                policy=completion.model,
                policy_version=completion.policy_version,
                tokenizer=context.tokenizer.fingerprint,
                template=context.prompts.fingerprint,
                sampling=_as_logged(self._sampling(self.turns - 1)),
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                finish_reason=completion.finish_reason.value,
                text=completion.text,
                memory=memory if memory is not None and memory != completion.text.strip() else None,
                prompt_token_ids=completion.prompt_token_ids,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                start_char=span["start_char"] if span is not None else None,
                end_char=span["end_char"] if span is not None else None,
                start_byte=span["start_byte"] if span is not None else None,
                end_byte=span["end_byte"] if span is not None else None,
                chunk_tokens=span["tokens"] if span is not None else None,
                events=tuple(
                    LoggedEvent(began + seconds, event["kind"], event["detail"], self._chunk_index, event["rule"])
                    for event in events
                ),
                trace=recording.trace,
            ),
            [message["content"] for message in messages],
        )

    def _trouble(self, completion: Completion, text: str, messages: Messages) -> tuple[EventKind, str] | None:
        bound = self._bound
        if completion.finish_reason is FinishReason.REFUSED:
            return EventKind.REFUSED, "the policy refused to update the memory"
        if not text:
            return EventKind.EMPTY, "the policy wrote no memory"
        if self._context.rules.rule_for(EventKind.INVENTED) is not UpdateRule.ACCEPT:
            word = word_from_nowhere(self._cut(text), [message["content"] for message in messages])
            if word is not None:
                return EventKind.INVENTED, f"the memory has {word[:40]!r}, which stands nowhere in the prompt"
        if completion.finish_reason is FinishReason.LENGTH:
            return EventKind.TRUNCATED, f"the memory was cut off at {bound} tokens"
        written = completion.usage.completion_tokens if completion.usage else None
        if (written is None or written > bound) and (tokens := self._context.tokenizer.count(text)) > bound:
            return EventKind.OVERLONG, f"the memory has {tokens} tokens, {tokens - bound} beyond its budget"
        return None

    def _cut(self, text: str) -> str:
        tokenizer, bound = self._context.tokenizer, self._bound
        ids = tokenizer.encode(text)
        if len(ids) <= bound:
            return text
        lengths = (tokenizer.prefix_chars(text, ids, kept) for kept in range(bound, 0, -1))
        return text[: next((length for length in lengths if length is not None), 0)].rstrip()


@lru_cache
def _bounded(sampling: SamplingParams, max_tokens: int, attempt: int) -> SamplingParams:
    seed = None if sampling.seed is None else sampling.seed + attempt
    return replace(sampling, max_tokens=max_tokens, seed=seed)


@lru_cache
def _as_logged(sampling: SamplingParams) -> dict[str, object]:
    return asdict(sampling)
