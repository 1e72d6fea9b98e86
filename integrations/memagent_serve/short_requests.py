"""Answers requests that fit the policy's window, through the policy's server or with a policy in this process.

The client's body is passed on unchanged, with this server's key, and the server's reply is relayed.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Final

import aiohttp
from sse_starlette import EventSourceResponse
from starlette.responses import JSONResponse, Response, StreamingResponse

from memagent_graph.plain_text import replace_lone_surrogates
from memagent_graph.policies.api_variants import extract_server_message
from memagent_graph.policies.openai_compatible import OpenAICompatiblePolicy
from memagent_graph.policies.sending import read_body, read_error_body
from memagent_graph.policies.server_errors import MalformedReplyError, OverlongReplyError
from memagent_graph.policy import FinishReason, Message, Policy, SamplingParams, TokenUsage
from memagent_graph.reasoning import extract_reply
from memagent_serve.api_errors import APIError, hide_private_text, make_bad_request_error, make_not_found_error
from memagent_serve.chat_replies import DONE, ReplyHead, sum_usage
from memagent_serve.chat_requests import ChatRequest

_RELAYED_HEADERS: Final = frozenset({"retry-after", "x-request-id", "openai-processing-ms", "openai-version"})
_MAX_REPLY_BYTES: Final = 1 << 25
"""Bytes of a reply, or of a line or event of a stream."""
_TOO_LONG_MESSAGE: Final = f"a line or event may have {_MAX_REPLY_BYTES:,} bytes"
EVENT_STREAM: Final = "text/event-stream"


async def relay_request(
    server: OpenAICompatiblePolicy, method: str, path: str, body: bytes | None = None, *, accept: str | None = None
) -> Response:
    """Return the server's reply to a request.

    Args:
        server: the policy server.
        method: GET or POST.
        path: chat/completions or models; no path comes from a request.
        body: the client's body, which is not changed.
        accept: the client's Accept header, if the client may get a stream of events.

    Raises:
        PolicyError: the server cannot be reached, does not answer, or sends too much.
        APIError: the reply is neither JSON nor a stream of events.
    """
    async with AsyncExitStack() as stack:
        headers = {"Content-Type": "application/json", "Accept": accept or "application/json"}
        reply = await stack.enter_async_context(server.relay(method, path, body, headers))
        if accept and get_media_type(reply) == EVENT_STREAM:
            return StreamingResponse(
                _iter_lines(reply, stack.pop_all()), reply.status, _pick_headers(reply), EVENT_STREAM
            )
        if 300 <= reply.status < 400 or get_media_type(reply) != "application/json":
            raise await make_gateway_error(reply)
        return Response(
            await read_body(reply, _MAX_REPLY_BYTES), reply.status, _pick_headers(reply), "application/json"
        )


def get_media_type(reply: aiohttp.ClientResponse) -> str:
    """Return the reply's media type; "" if the reply is compressed, since it may be a decompression bomb."""
    return "" if reply.headers.get("Content-Encoding", "identity") != "identity" else reply.content_type


def _pick_headers(reply: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.lower() in _RELAYED_HEADERS}


async def make_gateway_error(reply: aiohttp.ClientResponse) -> APIError:
    """Return the error for an unexpected reply, with its status and message."""
    message = (
        extract_server_message(await read_error_body(reply))[:300] if get_media_type(reply) else "a compressed reply"
    )
    status = reply.status if reply.status >= 400 else 502
    message = f"the policy server answered {reply.status}: {hide_private_text(message)}"
    return APIError(status, message, code="bad_gateway", headers=_pick_headers(reply))


@contextmanager
def bad_gateway_on_error(noun: str) -> Iterator[None]:
    """Raise an `APIError`, 502, if the policy server's reply turns out to be malformed."""
    try:
        yield
    except (MalformedReplyError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise APIError(502, f"the policy server's {noun} cannot be understood", code="bad_gateway") from error


async def _iter_lines(reply: aiohttp.ClientResponse, stack: AsyncExitStack) -> AsyncIterator[bytes]:
    """Yield complete lines as they arrive, so that no secret in them is split. The stack is closed at the end."""
    incomplete_line = bytearray()
    async with stack:
        async for chunk in reply.content.iter_any():
            if end := chunk.rfind(b"\n") + 1:
                yield bytes(incomplete_line) + chunk[:end]
                incomplete_line.clear()
            incomplete_line += chunk[end:]
            if len(incomplete_line) > _MAX_REPLY_BYTES:
                raise OverlongReplyError(_TOO_LONG_MESSAGE)
        yield bytes(incomplete_line)


async def iter_events(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the data of each event in a stream of events, including the closing [DONE]."""
    data = bytearray()
    async for lines in _iter_lines(reply, AsyncExitStack()):
        for line in lines.splitlines():
            if line.startswith(b"data:"):
                data += line[5:].removeprefix(b" ") + b"\n"
                if len(data) > _MAX_REPLY_BYTES:
                    raise OverlongReplyError(_TOO_LONG_MESSAGE)
            elif not line and data:
                yield data[:-1].decode(errors="replace")
                data.clear()
    if data:
        yield data[:-1].decode(errors="replace")


# A policy in this process

_FINISH_REASONS: Final = {FinishReason.LENGTH: "length", FinishReason.REFUSED: "content_filter"}
_SERVER_ONLY_FIELDS: Final = ("tools", "functions", "logprobs", "logit_bias", "response_format", "modalities", "audio")


def require_supported(request: ChatRequest, policy: Policy) -> None:
    """Refuse a request that a policy without a server does not support.

    Raises:
        APIError: 400 naming the field, 404 for another model.
    """
    require_model(request, policy.name)
    for name in _SERVER_ONLY_FIELDS:
        if request.has_value(name):
            raise make_bad_request_error(
                f"the policy runs in this process and does not know {name}; start memagent serve with --base-url "
                "and a model server that does",
                name,
            )
    if (request.options.n or 1) != 1:
        raise make_bad_request_error("the policy gives one answer; send n=1", "n")


def require_model(request: ChatRequest, name: str) -> None:
    """Refuse a model that is not served here.

    Raises:
        APIError: 404.
    """
    if request.options.model not in {None, name}:
        raise make_not_found_error(
            f"the model {request.options.model!r} cannot be used here for this request; {name!r} can",
            "model_not_found",
            "model",
        )


async def answer_locally(request: ChatRequest, policy: Policy, base: SamplingParams, max_tokens: int) -> Response:
    """Return the policy's reply to a request that fits in its window.

    Raises:
        PolicyError: the call failed.
        APIError: 400; a message has something other than text.
    """
    if (kind := request.unreadable_kind) is not None:
        raise make_bad_request_error(f"this policy takes text, and a message has a part of type {kind!r}", "messages")
    messages = [
        Message(role=message.role, content="\n".join(part.text.decode() for part in message.parts if part.text))
        for message in request.messages
    ]
    options = request.options
    reply_tokens = min(options.answer_tokens or max_tokens, max_tokens)
    sampling = replace(
        options.make_sampling(base), max_tokens=reply_tokens, stop=options.stop_texts, logprobs=None, json_schema=None
    )
    completion = await policy.complete(messages, sampling)
    reply_head = ReplyHead(secrets.token_hex(12), completion.model)
    text = replace_lone_surrogates(extract_reply(completion.text).strip())
    finish_reason = _FINISH_REASONS.get(completion.finish_reason, "stop")
    usage = sum_usage(completion.usage or TokenUsage(0, 0))
    if not options.stream:
        return JSONResponse(reply_head.make_completion({"content": text}, finish_reason, usage))

    async def iter_reply_events() -> AsyncIterator[str]:
        yield reply_head.make_chunk({"role": "assistant", "content": text})
        yield reply_head.make_chunk({}, finish_reason)
        if options.wants_usage:
            yield reply_head.make_usage_chunk(usage)
        yield DONE

    return EventSourceResponse(iter_reply_events(), sep="\n")
