"""Interprets finish reasons, message contents, token counts and refusals of servers whose API differs from OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from memagent_graph.events import EventKind
from memagent_graph.plain_text import replace_lone_surrogates
from memagent_graph.policy import FinishReason, Note, SamplingParams, TokenUsage

_MAX_COUNT: Final = 2**40
"""The maximum plausible number of tokens. The sums of larger numbers would not fit in a database column."""
_USAGE_FIELDS: Final = {
    "prompt_tokens": 0, "input_tokens": 0, "completion_tokens": 1, "output_tokens": 1,
    "cached_tokens": 2, "cache_read": 2, "prompt_cache_hit_tokens": 2, "cache_read_input_tokens": 2,
}  # fmt: skip
"""Maps names of token counts in replies to the index of the field in `TokenUsage`."""
_SPELLINGS: Final = {
    FinishReason.STOP: (
        "stop end end_turn stop_sequence stop_token eos eos_token im_end eot_id end_of_text end_of_turn complete "
        "completed finished finish done normal success none null"
    ),
    FinishReason.LENGTH: (
        "length max_length max_tokens max_token max_output_tokens max_new_tokens max_completion_tokens model_length "
        "token_limit length_limit output_limit limit context_length context_window model_context_window_exceeded "
        "context_length_exceeded context_window_exceeded max_context_length num_predict num_ctx incomplete truncated "
        "length_capped max_tokens_reached token_limit_reached"
    ),
    FinishReason.REFUSED: (
        "content_filter content_filtered content_filtering filtered filter refusal refused safety recitation blocklist "
        "prohibited_content image_safety spii blocked block guardrail guardrails guardrail_intervened content_policy "
        "content_policy_violation policy_violation error_toxic moderation content_moderation flagged sensitive "
        "censored unsafe"
    ),
    FinishReason.FAILED: (
        "error errored failed failure fail abort aborted cancel cancelled canceled interrupted timeout timed_out "
        "network_error server_error internal_error internal_server_error engine_error backend_error upstream_error "
        "provider_error service_error insufficient_system_resource preempted disconnected unavailable overloaded "
        "malformed_response stream_error generation_error"
    ),
}
_REASON_BY_WORD: Final = {
    word.replace("_", ""): reason for reason, words in _SPELLINGS.items() for word in words.split()
}
_NON_ALPHANUMERIC: Final = re.compile(r"[^a-z0-9]+")
_REASON_PREFIX: Final = re.compile(r"^(?:finish|stop|done)reason")


def parse_finish_reason(value: object) -> FinishReason:
    """Return the finish reason for a server's value in any spelling; STOP without a value, OTHER for an unknown one."""
    if isinstance(value, Mapping):
        value = value.get("type") or value.get("reason")
    if value is None or value == "":
        return FinishReason.STOP
    word = _NON_ALPHANUMERIC.sub("", str(value).lower())
    return _REASON_BY_WORD.get(_REASON_PREFIX.sub("", word) or word, FinishReason.OTHER)


def extract_text(content: object) -> str | None:
    """Return the text of a message's content: a text, an object, or a list of parts. Reasoning is left out.

    Raises:
        ValueError: the content has another type.
    """
    if content is None:
        return None
    if isinstance(content, str):
        return replace_lone_surrogates(content)
    if isinstance(content, list):
        texts = [text for text in map(extract_text, content) if text is not None]
        return "".join(texts) if texts else None
    if isinstance(content, Mapping):
        kind = str(content.get("type", ""))
        if content.get("thought") is True or "think" in kind or "reason" in kind or kind == "refusal":
            return None
        names = ("text", "content", "parts", "value")
        return extract_text(next((content[name] for name in names if content.get(name) is not None), None))
    raise ValueError(f"its text is of type {type(content).__name__}")


def has_refusal(message: Mapping[str, Any]) -> bool:
    """Return whether a message says that the model refused."""
    parts = message["content"] if isinstance(message.get("content"), list) else ()
    part_types = (part.get("type") for part in parts if isinstance(part, Mapping))
    return bool(message.get("refusal")) or "refusal" in part_types


def parse_token_usage(usage: object) -> TokenUsage | None:
    """Return the token counts of a reply; None if they are missing or implausible."""
    if not isinstance(usage, dict):
        return None
    counts = [0, 0, 0]
    details = usage.get("prompt_tokens_details") or usage.get("input_token_details")
    for name, value in (usage | details if isinstance(details, dict) else usage).items():
        if value and name in _USAGE_FIELDS:
            counts[_USAGE_FIELDS[name]] = value if type(value) is int else _parse_count(value)
    prompt, completion, cached = counts
    are_plausible = 0 <= prompt <= _MAX_COUNT >= completion >= 0 <= cached <= _MAX_COUNT
    return TokenUsage(prompt, completion, cached) if are_plausible and (prompt or completion) else None


def _parse_count(value: Any) -> int:
    """Return a number or a text with a number as an integer; 0 for anything else."""
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return 0


def make_finish_notes(reason: FinishReason, value: object, text: str | None) -> tuple[Note, ...]:
    """Return a note about an unknown finish reason (the server's `value`) of a reply with text."""
    if reason is not FinishReason.OTHER or not text:
        return ()
    return ((EventKind.UNUSUAL_FINISH, f"the server's reason to stop was {str(value)[:60]!r}"),)


def list_sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters as fields of a request."""
    fields = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def make_sampling_notes(sampling: SamplingParams, unsupported: Collection[str]) -> tuple[Note, ...]:
    """Return notes about requested options that the server does not accept."""
    requested = {**list_sampling_fields(sampling), "max_completion_tokens": sampling.max_tokens}
    notes = [
        (EventKind.SAMPLING_CHANGED, f"the server does not accept {name}; {requested[name]} was requested")
        for name in sorted(requested.keys() & unsupported)
        if name not in {"temperature", "top_p"} or requested[name] != 1  # the default of servers
    ]
    if sampling.logprobs and "logprobs" in unsupported:
        notes.append((EventKind.LOGPROBS_DROPPED, "the server does not accept logprobs"))
    return tuple(notes)


OPTIONAL_FIELDS: Final = (
    "max_tokens", "max_completion_tokens", "return_token_ids", "logprobs", "response_format", "seed", "stop", "top_p",
    "temperature",
)  # fmt: skip
"""The request fields that can be left out, in the order in which a server's message is searched for them."""
_LENGTH_ERROR: Final = re.compile(
    r"context[ _-]?(?:length|window|size|limit)|maximum (?:\w+ )?length|too (?:long|many tokens|large)|n_ctx"
    r"|tokens? .{0,40}(?:exceed|must be <)|exceed\w* .{0,60}(?:context|window|tokens?|length)"
    r"|(?:input|prompt) (?:length|is too)|max_model_len|sequence length|longer than|reduce the length"
    r"|(?:at most|less than) \d+ tokens|> ?\d+ maximum",
    re.IGNORECASE,
)
_REASON_BY_REFUSAL: Final = {
    re.compile(
        r"triggering .{0,30}content management policy|your prompt was flagged|contain inappropriate content"
        r"|content exists risk", re.IGNORECASE,
    ): FinishReason.REFUSED,
    re.compile("model output limit was reached"): FinishReason.LENGTH,
}  # fmt: skip
"""Messages of servers that refuse a request for which others send an empty reply, and its finish reason: filters of
Azure, OpenAI, Qwen and DeepSeek, and OpenAI's models that only reason within the limit."""
_UNSUPPORTED_FIELD_ERROR: Final = re.compile(
    r"unsupported|not (?:yet )?(?:be )?(?:supported|permitted|allowed|accepted|recogni[sz]ed|implemented|available)"
    r"|(?:not|n't) (?:support|permit|allow|accept|recogni[sz]e)|unknown|unexpected|unrecogni[sz]ed|extra|deprecated"
    r"|instead|forbidden|cannot (?:both )?be|mutually exclusive|invalid (?:parameter|field|argument|key)",
    re.IGNORECASE,
)


def extract_server_message(content: bytes) -> str:
    """Return a server's message without the JSON around it. If the error names a field (`param`), it is appended."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = msgspec.json.decode(content)
        if isinstance(body, list) and body:
            body = body[0]
        if isinstance(body, dict):
            error = body.get("error") or body
            values = error if isinstance(error, dict) else {"message": error}
            message, field = values.get("message") or values.get("detail"), values.get("param")
            details = values.get("metadata")
            if isinstance(details, dict) and isinstance(details.get("raw"), str):  # the reply of OpenRouter's provider
                reason = extract_server_message(details["raw"].encode(errors="replace"))
                message = f"{message}: {reason}" if message else reason
            if message:
                is_missing = isinstance(field, str) and field not in str(message)
                return f"{message} ({field})" if is_missing else str(message)
    return content.decode(errors="replace") or "no message"


def is_length_error(message: str) -> bool:
    """Return whether a server's message says that the prompt or the reply would be too long."""
    for field in OPTIONAL_FIELDS:
        message = message.replace(field, "")
    return bool(_LENGTH_ERROR.search(message))


def find_reason_of_refusal(message: str) -> FinishReason | None:
    """Return the finish reason that a server's refusal stands for; None for other refusals."""
    return next((reason for pattern, reason in _REASON_BY_REFUSAL.items() if pattern.search(message)), None)


def find_refused_field(message: str, fields: Collection[str]) -> str | None:
    """Return the field that a server does not accept, from its message; None if no field can be left out.

    Args:
        message: the server's message.
        fields: the names of the fields in the request.
    """
    if is_length_error(message):
        return None
    is_unsupported = bool(_UNSUPPORTED_FIELD_ERROR.search(message))
    for field in OPTIONAL_FIELDS:
        # The message may also be about the value of one of these fields.
        needs_reason = field in {"max_tokens", "max_completion_tokens", "response_format"}
        pattern = rf"['\"`(\[]{field}['\"`)\]]" if field == "stop" else rf"(?<![\w-]){field}(?![\w-])"
        if field in fields and re.search(pattern, message, re.IGNORECASE) and (is_unsupported or not needs_reason):
            return field
    return None


def is_retriable(status: int, message: str) -> bool:
    """Return whether a retry can succeed: after 408, 409, 429 or 5xx, unless a 500 or 501 has a lasting cause.

    Other 5xx come from gateways, which may say that a reply "took longer than" they wait.
    """
    if status not in {500, 501}:
        return status in {408, 409, 429} or status > 501
    is_unsupported = _UNSUPPORTED_FIELD_ERROR.search(message) and find_refused_field(message, OPTIONAL_FIELDS)
    return not (is_length_error(message) or is_unsupported)
