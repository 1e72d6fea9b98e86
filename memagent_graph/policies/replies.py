"""Decodes an OpenAI-compatible server's reply into a `Completion`.

Only the fields that are used are decoded: a reply has hundreds of log-prob entries, each with token, bytes and
alternatives, of which one number is kept. The client's own typed models take more processor time than everything else
in a step, and drop what vLLM adds (token ids).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from memagent_graph.policies.sending import MalformedReplyError
from memagent_graph.policy import Completion, FinishReason, TokenUsage

_FINISH_REASONS: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.REFUSED,
}

_LARGEST_COUNT: Final = 2**40
"""A larger number is not a count of tokens, and databases could not add it up."""


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None
    """/chat/completions"""
    token_logprobs: list[float] | None = None
    """/completions"""

    def values(self) -> list[float] | None:
        if self.content is not None:
            return [each.logprob for each in self.content]
        return self.token_logprobs


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def says_why_it_is_empty(self) -> bool:
        """Whether the model refused, or wrote nothing but its reasoning."""
        return bool(self.refusal or self.reasoning or self.reasoning_content)


class _Choice(msgspec.Struct):
    message: _Message | None = None
    """/chat/completions"""
    text: str | None = None
    """/completions"""
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    """/completions has the prompt's ids here, /chat/completions next to the choices."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    id: Any = None
    model: str | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


_decoder: Final = msgspec.json.Decoder(_Reply)


def decode_completion(content: bytes, *, model: str, policy_version: str = "") -> Completion:
    """Return the completion in a reply's body.

    A reply without text is accepted only with a reason: the model refused, was cut off, called a tool, or wrote only
    its reasoning. It is then an empty completion, for which the reader has a rule.

    Args:
        content: the body.
        model: the model's name, if the server gives none.
        policy_version: which weights the server runs.

    Raises:
        MalformedReplyError: the body is not a completion; the reason says why.
    """
    try:
        reply = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedReplyError(str(error), content) from error
    if not reply.choices:
        raise MalformedReplyError("it has no choices", content)
    choice = reply.choices[0]
    message = choice.message
    text = message.content if message else choice.text
    explained = message is not None and message.says_why_it_is_empty
    if text is None and not explained and choice.finish_reason in {None, "stop"}:
        raise MalformedReplyError("its text is null, without a reason", content)
    refused = message is not None and bool(message.refusal) and not text
    try:
        return Completion(
            text=text or "",
            finish_reason=FinishReason.REFUSED if refused else _finish_reason(choice.finish_reason),
            model=reply.model or model,
            usage=_usage(reply.usage),
            prompt_token_ids=reply.prompt_token_ids or choice.prompt_token_ids,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs.values() if choice.logprobs else None,
            policy_version=policy_version,
            request_id=reply.id if isinstance(reply.id, str) else "",
        )
    except OverflowError as error:
        raise MalformedReplyError(f"a token id is out of range: {error}", content) from error


def _finish_reason(word: str | None) -> FinishReason:
    return _FINISH_REASONS.get(word or "", FinishReason.OTHER)


def _usage(usage: _Usage | None) -> TokenUsage | None:
    """Return the server's token counts; None if there are none, or they are impossible."""
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    counts = usage.prompt_tokens or 0, usage.completion_tokens or 0, (details.cached_tokens or 0) if details else 0
    if not all(0 <= count <= _LARGEST_COUNT for count in counts):
        return None
    return TokenUsage(*counts)
