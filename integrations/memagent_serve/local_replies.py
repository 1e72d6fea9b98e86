"""Answers short requests with a policy in this process, without a server."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from sse_starlette import EventSourceResponse
from starlette.responses import JSONResponse, Response

from memagent_graph.policy import Completion, FinishReason, Message, Policy, SamplingParams, strip_reasoning
from memagent_serve.api_errors import api_error, bad_request, not_found
from memagent_serve.chat_replies import DONE, ReplyHead
from memagent_serve.chat_requests import ChatRequest

_NOT_HERE: Final = ("tools", "functions", "logprobs", "logit_bias", "response_format", "modalities", "audio")


def messages_of(request: ChatRequest) -> list[Message]:
    """The messages in the form that policies accept.

    Raises:
        ApiError: a message has something other than text.
    """
    if (kind := request.unreadable) is not None:
        raise bad_request(f"this policy takes text, and a message has a part of type {kind!r}", "messages")
    return [
        Message(role=each.role, content="\n".join(part.text.text() for part in each.parts if part.text is not None))
        for each in request.messages
    ]


def require_possible(request: ChatRequest, policy: Policy) -> None:
    """Refuse what a policy without a server cannot do.

    Raises:
        ApiError: 400 naming the field, 404 for another model.
    """
    require_model(request, policy.name)
    for name in _NOT_HERE:
        if request.has(name):
            raise bad_request(
                f"the policy runs in this process and does not know {name}; start memagent serve with --base-url "
                "and a model server that does",
                name,
            )
    if (request.options.n or 1) != 1:
        raise bad_request("the policy gives one answer; send n=1", "n")


def require_model(request: ChatRequest, name: str) -> None:
    """Refuse a model that is not served here.

    Raises:
        ApiError: 404.
    """
    if request.options.model != name:
        raise not_found(
            f"the model {request.options.model!r} does not read long requests here; {name!r} does",
            "model_not_found",
            "model",
        )


async def local_reply(
    request: ChatRequest, messages: Sequence[Message], policy: Policy, base: SamplingParams, most_tokens: int
) -> Response:
    """The policy's reply to messages that fit in its window.

    Raises:
        PolicyError: it failed.
        ApiError: 400.
    """
    options = request.options
    sampling = SamplingParams(
        max_tokens=min(options.answer_tokens or most_tokens, most_tokens),
        temperature=base.temperature if options.temperature is None else options.temperature,
        top_p=base.top_p if options.top_p is None else options.top_p,
        seed=base.seed if options.seed is None else options.seed,
        stop=options.stops,
    )
    completion = await policy.complete(messages, sampling)
    head = ReplyHead.of(secrets.token_hex(12), completion.model)
    text, reason, usage = strip_reasoning(completion.text).strip(), _reason(completion), _usage(completion)
    if not options.stream:
        values = head.completion({"content": text}, reason, usage, {})
        del values["memagent"]
        return JSONResponse(values)

    async def events() -> AsyncIterator[str]:
        yield head.chunk({"role": "assistant", "content": text})
        yield head.chunk({}, reason)
        if options.wants_usage:
            yield head.usage_chunk(usage)
        yield DONE

    return EventSourceResponse(events(), sep="\n")


def error_event(error: Exception) -> str:
    """An error inside a stream, in the API's form."""
    return json.dumps(api_error(error).body())


def _reason(completion: Completion) -> str:
    reasons = {FinishReason.LENGTH: "length", FinishReason.REFUSED: "content_filter"}
    return reasons.get(completion.finish_reason, "stop")


def _usage(completion: Completion) -> dict[str, Any]:
    usage = completion.usage
    prompt, written = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
