"""What an OpenAI-compatible server's completion looks like on the wire, and how it becomes a `Completion`.

Only the fields that are used are decoded: of the hundreds of log-prob entries in a reply, each with its token,
bytes and alternatives, one number is kept. The client's own typed models cost more processor time than all the rest
of a step, and drop what vLLM adds (token ids).
"""

from __future__ import annotations

from typing import Final

import msgspec

from memagent_graph.policy import Completion, FinishReason, TokenUsage

_FINISH_REASONS: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.REFUSED,
}


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


class _Choice(msgspec.Struct):
    message: _Message | None = None
    """/chat/completions"""
    text: str | None = None
    """/completions"""
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    """/completions puts the prompt's ids here, /chat/completions beside the choices."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    model: str | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


_decoder: Final = msgspec.json.Decoder(_Reply)


def decode_completion(content: bytes, *, model: str, retries: int, policy_version: str = "") -> Completion:
    """The completion in a reply's body.

    Args:
        content: the body.
        model: the model's name, where the server gives none.
        retries: how many times the request was sent again.
        policy_version: which weights the server runs.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: the body is not a completion; the words say what is wrong with it.
    """
    reply = _decoder.decode(content)
    if not reply.choices:
        raise msgspec.DecodeError("no choices")
    choice = reply.choices[0]
    message = choice.message
    text = (message.content if message else choice.text) or ""
    refused = message is not None and bool(message.refusal) and not text
    try:
        return Completion(
            text=text,
            finish_reason=FinishReason.REFUSED if refused else _finish_reason(choice.finish_reason),
            model=reply.model or model,
            usage=_usage(reply.usage),
            prompt_token_ids=reply.prompt_token_ids or choice.prompt_token_ids,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs.values() if choice.logprobs else None,
            retries=retries,
            policy_version=policy_version,
        )
    except OverflowError as error:
        raise msgspec.DecodeError(f"a token id is out of range: {error}") from error


def _finish_reason(word: str | None) -> FinishReason:
    return _FINISH_REASONS.get(word or "", FinishReason.OTHER)


def _usage(usage: _Usage | None) -> TokenUsage | None:
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return TokenUsage(
        prompt_tokens=usage.prompt_tokens or 0,
        completion_tokens=usage.completion_tokens or 0,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
    )
