"""Answers requests that fit the policy's window: its server does, or a policy in this process.

What is passed on to the server is the client's body, unchanged, with this server's key; its reply is relayed.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Final, Protocol, runtime_checkable

import aiohttp
from sse_starlette import EventSourceResponse
from starlette.responses import JSONResponse, Response, StreamingResponse

from memagent_graph.policy import Completion, FinishReason, Message, Policy, SamplingParams
from memagent_graph.reasoning import extract_reply
from memagent_serve.api_errors import bad_request, not_found
from memagent_serve.chat_replies import DONE, ReplyHead
from memagent_serve.chat_requests import ChatRequest

_RELAYED: Final = frozenset({"content-type", "retry-after", "x-request-id", "openai-processing-ms", "openai-version"})
_LONGEST_LINE: Final = 1 << 20
PATHS: Final = frozenset({"chat/completions", "models"})
"""All paths that are requested from the policy server for clients. No path comes from a request."""


@runtime_checkable
class Relaying(Protocol):
    """A policy on a server that accepts other requests than the reader's."""

    base_url: str

    def relay(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request to the server; see `OpenAICompatiblePolicy`."""
        ...


async def pass_on(
    server: Relaying, method: str, path: str, body: bytes | None = None, *, accept: str | None = None
) -> Response:
    """Return the server's reply to a client's request, relayed while it arrives.

    Args:
        server: the policy server.
        method: GET or POST.
        path: one of `PATHS`.
        body: the client's, byte by byte.
        accept: the client's Accept header.

    Raises:
        PolicyUnreachableError: the server cannot be reached, or does not answer.
    """
    assert path in PATHS, path  # noqa: S101
    stack = AsyncExitStack()
    try:
        headers = {"Content-Type": "application/json", "Accept": accept or "*/*"}
        reply = await stack.enter_async_context(server.relay(method, path, body, headers))
        relayed = {name: value for name, value in reply.headers.items() if name.lower() in _RELAYED}
        if not is_stream(reply):
            content = await reply.read()
            await stack.aclose()
            return Response(content, reply.status, headers=relayed)
    except BaseException:
        await stack.aclose()
        raise
    return StreamingResponse(_relayed(reply, stack), reply.status, headers=relayed)


def is_stream(reply: aiohttp.ClientResponse) -> bool:
    """Whether a reply is a stream of events."""
    return reply.content_type == "text/event-stream"


async def _relayed(reply: aiohttp.ClientResponse, stack: AsyncExitStack) -> AsyncIterator[bytes]:
    async with stack:
        async for lines in _lines(reply):
            yield lines


async def _lines(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the reply's whole lines as they arrive: a secret in one of them is not divided."""
    rest = b""
    async for chunk in reply.content.iter_any():
        end = (rest + chunk).rfind(b"\n") + 1
        lines, rest = (rest + chunk)[:end], (rest + chunk)[end:]
        if len(rest) > _LONGEST_LINE:
            lines, rest = lines + rest, b""
        if lines:
            yield lines
    yield rest


async def events_of(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the data of each event in a stream of events, including the closing [DONE]."""
    data: list[str] = []
    async for lines in _lines(reply):
        for raw in lines.splitlines():
            line = raw.decode(errors="replace")
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data = []
    if data:
        yield "\n".join(data)


# A policy in this process

_NOT_HERE: Final = ("tools", "functions", "logprobs", "logit_bias", "response_format", "modalities", "audio")


def _messages_of(request: ChatRequest) -> list[Message]:
    """Return the messages in the form that policies accept.

    Raises:
        ApiError: a message has something other than text.
    """
    if (kind := request.unreadable) is not None:
        raise bad_request(f"this policy takes text, and a message has a part of type {kind!r}", "messages")
    return [
        Message(role=message.role, content="\n".join(part.text.text() for part in message.parts if part.text))
        for message in request.messages
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
    if request.options.model not in {None, name}:
        raise not_found(
            f"the model {request.options.model!r} does not read long requests here; {name!r} does",
            "model_not_found",
            "model",
        )


async def local_reply(request: ChatRequest, policy: Policy, base: SamplingParams, most_tokens: int) -> Response:
    """Return the policy's reply to a request that fits in its window.

    Raises:
        PolicyError: it failed.
        ApiError: 400.
    """
    options = request.options
    limit = min(options.answer_tokens or most_tokens, most_tokens)
    chosen = options.sampling(base)
    sampling = SamplingParams(limit, chosen.temperature, chosen.top_p, seed=chosen.seed, stop=options.stops)
    completion = await policy.complete(_messages_of(request), sampling)
    head = ReplyHead.of(secrets.token_hex(12), completion.model)
    text, reason, usage = extract_reply(completion.text).strip(), _reason(completion), _usage(completion)
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


def _reason(completion: Completion) -> str:
    reasons = {FinishReason.LENGTH: "length", FinishReason.REFUSED: "content_filter"}
    return reasons.get(completion.finish_reason, "stop")


def _usage(completion: Completion) -> dict[str, Any]:
    usage = completion.usage
    prompt, written = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
