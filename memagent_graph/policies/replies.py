"""Decodes the replies of an OpenAI-compatible server: completions, and lists of models.

The typed models of the `openai` client would take more processor time than the rest of a step, and they drop vLLM's
token ids. Only token ids and log-probs are validated by a type, because the other fields differ among servers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
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
from memagent_graph.policies.server_errors import GenerationFailedError, MalformedReplyError
from memagent_graph.policy import Completion, FinishReason, Note, SamplingParams

_TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    """A choice. Only token ids and log-probs have the types that they need."""

    index: Any = 0
    message: Any = None
    delta: Any = None
    """The message in a stream."""
    finish_reason: Any = None
    native_finish_reason: Any = None
    """OpenRouter's, the one of the model's own server."""
    stop_reason: Any = None
    gemini_finish_reason: Any = msgspec.field(default=None, name="finishReason")
    error: Any = None
    logprobs: _Logprobs | None = None
    token_ids: list[_TokenId] | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice | None] | None = None
    model: Any = None
    usage: Any = None
    id: Any = None
    error: Any = None
    prompt_token_ids: list[_TokenId] | None = None


_DAMAGED_NOTE: Final[Note] = (EventKind.LOGPROBS_DROPPED, "the server's token ids or log-probs are not all numbers")


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
        GenerationFailedError: the server reports that it failed during generation.
        MalformedReplyError: the body is not a completion.
    """
    try:
        reply, is_damaged = _parse_reply(content)
        choices = [choice for choice in reply.choices or () if choice and choice != _Choice()]
        if not choices:
            if reply.error:
                raise GenerationFailedError(extract_server_message(content))
            raise MalformedReplyError("it has no choices", content)
        choice = min(choices, key=lambda option: option.index if isinstance(option.index, int) else 0)
        message = choice.message or choice.delta
        if not isinstance(message, Mapping):
            message = {"content": message}
        text = extract_text(message.get("content"))
        is_refusal = has_refusal(message)
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedReplyError(str(error), content) from error
    raw_reason = choice.finish_reason or choice.gemini_finish_reason or choice.stop_reason
    reason, usage = parse_finish_reason(raw_reason), parse_token_usage(reply.usage)
    native_reason = parse_finish_reason(choice.native_finish_reason)  # STOP without one
    if reason is FinishReason.STOP and native_reason is not FinishReason.OTHER:
        reason = native_reason
    if reason is FinishReason.FAILED or choice.error or reply.error:
        raise GenerationFailedError(str(choice.error or reply.error or raw_reason))
    has_reasoning = any(map(message.get, ("reasoning", "reasoning_content", "thinking", "content")))
    if text is None and reason is FinishReason.STOP and not (is_refusal or has_reasoning):
        raise MalformedReplyError("its text is null, without a reason", content)
    if is_refusal and not text:
        reason = FinishReason.REFUSED
    elif not raw_reason and usage and usage.completion_tokens >= sampling.max_tokens:
        reason = FinishReason.LENGTH
    notes = make_finish_notes(reason, raw_reason, text)
    if is_damaged and sampling.logprobs:
        notes = (*notes, _DAMAGED_NOTE)
    tokens = choice.logprobs.content if choice.logprobs else None
    return Completion(
        text=text or "",
        finish_reason=reason,
        model=reply.model if reply.model and isinstance(reply.model, str) else model,
        usage=usage,
        policy_version=policy_version,
        request_id=reply.id if isinstance(reply.id, str) else "",
        prompt_token_ids=reply.prompt_token_ids,
        token_ids=choice.token_ids,
        logprobs=None if tokens is None else [token.logprob for token in tokens],
        notes=notes,
    )


def _parse_reply(content: bytes) -> tuple[_Reply, bool]:
    """Return the reply in a body, and whether its token ids and log-probs were left out because of other values.

    Raises:
        ValueError, TypeError, AttributeError, RecursionError: the body is not a reply.
    """
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(content, type=_Reply), False
    fields = _parse_leniently(content)
    with suppress(msgspec.ValidationError):
        return msgspec.convert(fields, _Reply), False
    for choice in filter(None, fields.get("choices") or ()):
        choice.update(logprobs=None, token_ids=None)
    return msgspec.convert(fields | {"prompt_token_ids": None}, _Reply), True


def _parse_leniently(content: bytes) -> Any:
    """Return the JSON in a body, even with NaN and control characters. The events of a stream are joined."""
    text = content.decode("utf-8-sig")
    try:
        return _parse_json(text)
    except ValueError:
        lines = (
            line.removeprefix("data:").strip()
            for line in re.split(r"\r\n?|\n", text)
            if line.startswith(("data:", "{"))
        )
        events = [_parse_json(line) for line in lines if line not in {"", "[DONE]"}]
        if not events:
            raise
    choices = [choice for event in events for choice in event.get("choices") or () if not choice.get("index")]
    messages = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    text = "".join(extract_text(message.get("content")) or "" for message in messages)
    reason = next((choice["finish_reason"] for choice in reversed(choices) if choice.get("finish_reason")), None)
    last_values = {name: value for event in events for name, value in event.items() if value is not None}
    return last_values | {"choices": [{"message": {"content": text}, "finish_reason": reason}] if choices else []}


_parse_json: Final = partial(json.loads, parse_constant=lambda _: None, strict=False)


def parse_model_entries(content: bytes) -> list[dict[str, Any]]:
    """Return the entries of a list of models. The list may be a bare array, and an entry may be only a name."""
    try:
        body = msgspec.json.decode(content)
        entries = body if isinstance(body, list) else (body["data"] if "data" in body else body["models"]) or ()
        entries = [{"id": entry} if isinstance(entry, str) else entry for entry in entries]
        return [{**entry, "id": str(entry.get("id") or entry.get("name") or entry["model"])} for entry in entries]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise MalformedReplyError(f"not a list of models: {error}", content) from error
