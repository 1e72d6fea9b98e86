"""What the fields of a reply mean in the dialects of the API: finish reasons, contents in parts, counts of tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from memagent_graph.events import EventKind
from memagent_graph.policy import FinishReason, Note, SamplingParams, TokenUsage
from memagent_graph.words import without_surrogates

_LARGEST_COUNT: Final = 2**40
"""A larger number is not a count of tokens, and databases could not add it up."""
_COUNTS: Final = {
    "prompt_tokens": 0, "input_tokens": 0, "completion_tokens": 1, "output_tokens": 1,
    "cached_tokens": 2, "cache_read": 2, "prompt_cache_hit_tokens": 2, "cache_read_input_tokens": 2,
}  # fmt: skip
"""What servers call them, and which field of `TokenUsage` each is."""
_WORDS: Final = {
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
_REASONS: Final = {word.replace("_", ""): reason for reason, words in _WORDS.items() for word in words.split()}
_NO_LETTER: Final = re.compile(r"[^a-z0-9]+")
_PREFIX: Final = re.compile(r"^(?:finish|stop|done)reason")


def finish_reason(word: object) -> FinishReason:
    """Return the reason that a server's word for it means, in any spelling; STOP if it gives none, OTHER if unknown."""
    if isinstance(word, str) and word in _REASONS:
        return _REASONS[word]
    if isinstance(word, Mapping):
        word = word.get("type") or word.get("reason")
    if word is None or word == "":
        return FinishReason.STOP
    letters = _NO_LETTER.sub("", str(word).lower())
    return _REASONS.get(_PREFIX.sub("", letters) or letters, FinishReason.OTHER)


def content_text(content: object) -> str | None:
    """Return the text in a content: a text, an object, or a list of parts, of which reasoning is left out.

    Raises:
        ValueError: it is something else.
    """
    if content is None:
        return None
    if isinstance(content, str):
        return without_surrogates(content)
    if isinstance(content, list):
        texts = [text for text in map(content_text, content) if text is not None]
        return "".join(texts) if texts else None
    if isinstance(content, Mapping):
        kind = str(content.get("type", ""))
        if content.get("thought") is True or "think" in kind or "reason" in kind or kind == "refusal":
            return None
        names = ("text", "content", "parts", "value")
        return content_text(next((content[name] for name in names if content.get(name) is not None), None))
    raise ValueError(f"its text is of type {type(content).__name__}")


def has_refusal(message: Mapping[str, Any]) -> bool:
    """Whether a message says that the model refused."""
    parts = message["content"] if isinstance(message.get("content"), list) else ()
    kinds = (part.get("type") for part in parts if isinstance(part, Mapping))
    return bool(message.get("refusal")) or "refusal" in kinds


def token_usage(usage: object) -> TokenUsage | None:
    """Return the counts of tokens in a reply; None if there are none, or they are impossible."""
    if not isinstance(usage, dict):
        return None
    counts = [0, 0, 0]
    details = usage.get("prompt_tokens_details") or usage.get("input_token_details")
    for name, value in (usage | details if isinstance(details, dict) else usage).items():
        if value and name in _COUNTS:
            counts[_COUNTS[name]] = value if type(value) is int else _count(value)
    prompt, completion, cached = counts
    are_possible = 0 <= prompt <= _LARGEST_COUNT >= completion >= 0 <= cached <= _LARGEST_COUNT
    return TokenUsage(prompt, completion, cached) if are_possible and (prompt or completion) else None


def _count(value: Any) -> int:
    """Return a number that may be written as a text; 0 if it is none."""
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return 0


def finish_notes(reason: FinishReason, word: object, text: str | None) -> tuple[Note, ...]:
    """Return what a user should know about a server's reason to stop, if it is unknown and there is a text."""
    if reason is not FinishReason.OTHER or not text:
        return ()
    return ((EventKind.UNUSUAL_FINISH, f"the server's reason to stop was {str(word)[:60]!r}"),)


def sampling_notes(sampling: SamplingParams, unsupported: Collection[str]) -> tuple[Note, ...]:
    """Return what was asked for in fields that a server does not take."""
    if not unsupported:
        return ()
    chosen = {
        "temperature": sampling.temperature if sampling.temperature != 1 else None,
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "seed": sampling.seed,
        "stop": sampling.stop or None,
        "max_tokens": sampling.max_tokens,
        "max_completion_tokens": sampling.max_tokens,
    }
    notes = [
        (EventKind.SAMPLING_CHANGED, f"the server does not take {name}; {chosen[name]} was asked for")
        for name in sorted(unsupported)
        if chosen.get(name) is not None
    ]
    if sampling.logprobs and "logprobs" in unsupported:
        notes.append((EventKind.LOGPROBS_DROPPED, "the server does not take logprobs"))
    return tuple(notes)
