"""What a server says with an error: its words, whether they speak of length, and which field it refuses."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from typing import Final

import msgspec

OPTIONAL_FIELDS: Final = (
    "max_tokens", "max_completion_tokens", "return_token_ids", "logprobs", "response_format", "seed", "stop", "top_p",
    "temperature",
)  # fmt: skip
"""The fields of a request that can be left out, in the order in which they are looked for in a refusal."""
_BOUNDS: Final = frozenset({"max_tokens", "max_completion_tokens"})
_LENGTH: Final = re.compile(
    r"context[ _-]?(?:length|window|size|limit)|maximum (?:\w+ )?length|too (?:long|many tokens|large)|n_ctx"
    r"|tokens? .{0,40}(?:exceed|must be <)|exceed\w* .{0,60}(?:context|window|tokens?|length)"
    r"|(?:input|prompt) (?:length|is too)|max_model_len|sequence length|longer than|reduce the length"
    r"|at most \d+ tokens|> ?\d+ maximum",
    re.IGNORECASE,
)
_UNSUPPORTED: Final = re.compile(
    r"unsupported|not (?:yet )?(?:be )?(?:supported|permitted|allowed|accepted|recogni[sz]ed|implemented|available)"
    r"|(?:not|n't) (?:support|permit|allow|accept|recogni[sz]e)|unknown|unexpected|unrecogni[sz]ed|extra|deprecated"
    r"|instead|forbidden|cannot (?:both )?be|mutually exclusive|invalid (?:parameter|field|argument|key)",
    re.IGNORECASE,
)


def words_of(content: bytes) -> str:
    """Return a server's message, without the JSON around it, and the field that it names beside it."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = msgspec.json.decode(content)
        if isinstance(body, list) and body:
            body = body[0]
        if isinstance(body, dict):
            inner = body.get("error") or body
            message = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
            field = inner.get("param") if isinstance(inner, dict) else None
            if message:
                named = isinstance(field, str) and field not in str(message)
                return f"{message} ({field})" if named else str(message)
    return content.decode(errors="replace") or "no words"


def speaks_of_length(words: str) -> bool:
    """Whether a server says that the prompt, or what should be written, is too long."""
    for field in OPTIONAL_FIELDS:
        words = words.replace(field, "")
    return bool(_LENGTH.search(words))


def refused_field(words: str, sent: Collection[str]) -> str | None:
    """Return the field that a server does not take, by its words; None if they name none that can be left out.

    Args:
        words: what the server said.
        sent: the names of the fields in the request.
    """
    if speaks_of_length(words):
        return None
    is_unsupported = bool(_UNSUPPORTED.search(words))
    for field in OPTIONAL_FIELDS:
        needs_reason = field in _BOUNDS or field == "response_format"  # words on their values are no refusal
        if field in sent and _names(words, field) and (is_unsupported or not needs_reason):
            return field
    return None


def is_final(words: str) -> bool:
    """Whether the same request is bound to fail again, although the status says that it need not."""
    return speaks_of_length(words) or bool(_UNSUPPORTED.search(words) and refused_field(words, OPTIONAL_FIELDS))


def _names(words: str, field: str) -> bool:
    pattern = rf"['\"`(\[]{field}['\"`)\]]" if field == "stop" else rf"(?<![\w-]){field}(?![\w-])"
    return re.search(pattern, words) is not None
