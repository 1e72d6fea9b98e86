"""Decodes an OpenAI-compatible server's reply into a `Completion`.

Only the needed fields are decoded. A reply has hundreds of log-prob entries with token, bytes and alternatives, and one
number of an entry is used. The typed models of the `openai` client would take more processor time than the rest of a
step, and drop the token ids of vLLM. A reply in another variant of the API is decoded again, with looser rules.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from memagent_graph.events import EventKind
from memagent_graph.policies.api_variants import (
    extract_server_message,
    extract_text,
    has_refusal,
    make_finish_notes,
    parse_finish_reason,
    parse_token_usage,
)
from memagent_graph.policies.sending import BrokenOffError, MalformedReplyError
from memagent_graph.policy import Completion, FinishReason, Note, SamplingParams

_TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None
    """/chat/completions"""
    token_logprobs: list[float] | None = None
    """/completions"""

    def values(self) -> list[float] | None:
        if self.content is not None:
            return [token.logprob for token in self.content]
        return self.token_logprobs


class _Message(msgspec.Struct, gc=False):
    content: str | None = None
    refusal: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class _Choice(msgspec.Struct, gc=False):
    message: _Message | None = None
    """/chat/completions"""
    text: str | None = None
    """/completions"""
    delta: Any = None
    """/chat/completions, from servers that send every reply as a part of a stream"""
    index: Any = None
    finish_reason: Any = None
    other_finish_reason: Any = msgspec.field(name="finishReason", default=None)
    native_finish_reason: Any = None
    stop_reason: Any = None
    error: Any = None
    logprobs: _Logprobs | None = None
    token_ids: list[_TokenId] | None = None
    prompt_token_ids: list[_TokenId] | None = None
    """/completions has the prompt's ids here, /chat/completions next to the choices."""


class _Reply(msgspec.Struct, gc=False):
    choices: list[_Choice]
    id: Any = None
    model: Any = None
    usage: Any = None
    error: Any = None
    prompt_token_ids: list[_TokenId] | None = None


_decoder: Final = msgspec.json.Decoder(_Reply)
_NUMBERS: Final = ("logprobs", "token_ids", "prompt_token_ids")
_DAMAGED: Final[Note] = (EventKind.LOGPROBS_DROPPED, "the server's token ids or log-probs are not all numbers")


def decode_completion(content: bytes, *, model: str, sampling: SamplingParams, policy_version: str = "") -> Completion:
    """Return the completion in a reply's body.

    A reply without text is accepted only with a reason: the model refused, was cut off, called a tool, or wrote only
    reasoning. It becomes an empty completion, for which the reader has a rule. Invalid token ids and log-probs are left
    out, with a note if they were requested.

    Args:
        content: the body.
        model: the model's name, for a reply without one.
        sampling: the requested sampling.
        policy_version: the name of the server's weights.

    Raises:
        BrokenOffError: the server reports that it failed while it wrote.
        MalformedReplyError: the body is not a completion.
    """
    reply, is_damaged = _decode(content)
    if not reply.choices:
        if reply.error:
            raise BrokenOffError(extract_server_message(content), content)
        raise MalformedReplyError("it has no choices", content)
    choice = reply.choices[0]
    if len(reply.choices) > 1:
        choice = min(reply.choices, key=lambda option: option.index if isinstance(option.index, int) else 0)
    message = choice.message
    text = message.content if message else choice.text
    word = choice.finish_reason or choice.other_finish_reason or choice.stop_reason
    reason, usage = parse_finish_reason(word), parse_token_usage(reply.usage)
    native = parse_finish_reason(choice.native_finish_reason)  # STOP without one
    if reason is FinishReason.STOP and native is not FinishReason.OTHER:
        reason = native
    if reason is FinishReason.FAILED or choice.error or reply.error:
        raise BrokenOffError(str(choice.error or reply.error or word), content)
    if (
        text is None
        and reason is FinishReason.STOP
        and not (message and (message.refusal or message.reasoning or message.reasoning_content))
    ):
        raise MalformedReplyError("its text is null, without a reason", content)
    if message and message.refusal and not text:
        reason = FinishReason.REFUSED
    elif not word and usage and usage.completion_tokens >= sampling.max_tokens:
        reason = FinishReason.LENGTH
    notes = make_finish_notes(reason, word, text)
    return Completion(
        text=text or "",
        finish_reason=reason,
        model=reply.model if reply.model and isinstance(reply.model, str) else model,
        usage=usage,
        policy_version=policy_version,
        request_id=reply.id if isinstance(reply.id, str) else "",
        prompt_token_ids=reply.prompt_token_ids or choice.prompt_token_ids,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs.values() if choice.logprobs else None,
        notes=(*notes, _DAMAGED) if is_damaged and sampling.logprobs else notes,
    )


def _decode(content: bytes) -> tuple[_Reply, bool]:
    """Return the reply, and whether its token ids or log-probs are invalid.

    Raises:
        MalformedReplyError: the body is not a reply in any known variant of the API.
    """
    try:
        reply = _decoder.decode(content)
        if not reply.choices or not reply.choices[0].delta:
            return reply, False
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # it may be another variant of the API
    try:
        return _usual_form(content)
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedReplyError(str(error), content) from error


def _usual_form(content: bytes) -> tuple[_Reply, bool]:
    """Convert a reply in another variant of the API; also return whether its token ids or log-probs are invalid."""
    reply = _json(content.decode("utf-8-sig"))
    choices, is_damaged = [], False
    for choice in filter(None, reply.get("choices") or ()):
        numbers = {name: choice.get(name) or reply.get(name) for name in _NUMBERS}
        try:
            msgspec.convert(numbers, _Choice)
        except msgspec.ValidationError:
            numbers, is_damaged = dict.fromkeys(_NUMBERS), True
        message = choice.get("message") or choice.get("delta")
        if message is not None:
            message = message if isinstance(message, dict) else {"content": message}
            content_parts = message.get("content")
            has_parts = isinstance(content_parts, list) and bool(content_parts)
            thoughts = message.get("reasoning") or message.get("thinking") or has_parts
            message |= {"content": extract_text(content_parts), "refusal": has_refusal(message), "reasoning": thoughts}
        choices.append({**choice, **numbers, "message": message, "text": extract_text(choice.get("text"))})
    return msgspec.convert({**reply, "choices": choices, "prompt_token_ids": None}, _Reply), is_damaged


def _json(text: str) -> Any:
    """Return the JSON in a body. The events of a stream are joined to one reply."""
    try:
        return _loads(text)
    except ValueError:
        lines = (line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith(("data:", "{")))
        events = [_loads(line) for line in lines if line != "[DONE]"]
        if not events:
            raise
    choices = [choice for event in events for choice in event.get("choices") or () if not choice.get("index")]
    messages = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    text = "".join(extract_text(message.get("content")) or "" for message in messages)
    reason = next((choice["finish_reason"] for choice in reversed(choices) if choice.get("finish_reason")), None)
    whole = {name: value for event in events for name, value in event.items() if value is not None}
    return whole | {"choices": [{"message": {"content": text}, "finish_reason": reason}] if choices else []}


_loads: Final = partial(json.loads, parse_constant=lambda _: None, strict=False)
