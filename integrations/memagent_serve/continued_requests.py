"""Builds the request to the policy server after its long parts were read: shorter, but otherwise unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from memagent_graph.events import StopReason
from memagent_graph.results import ReadResult
from memagent_serve.chat_requests import ChatMessage, ChatRequest
from memagent_serve.long_parts import Place, Plan
from memagent_serve.request_texts import Source

_KEPT: Final = ("tools", "functions", "logprobs", "logit_bias", "presence_penalty", "frequency_penalty")
"""Fields that only the model server supports."""


def needs_model_server(request: ChatRequest, plan: Plan) -> bool:
    """Whether the model server must write the reply from the findings; otherwise the read's answer is the reply.

    It must if only the model server supports the request (tools, a format, log-probs), or if the read parts are tool
    results or the older part of a conversation.
    """
    asks = any(map(request.has, _KEPT)) or (request.has("response_format") and not _is_text_format(request))
    reads_results = any(request.messages[place.message].role in {"tool", "function"} for place in plan.places)
    return asks or reads_results or plan.history > 0


def _is_text_format(request: ChatRequest) -> bool:
    given = msgspec.json.decode(request.fields["response_format"])
    return isinstance(given, dict) and given.get("type") == "text"


def findings(result: ReadResult) -> str:
    """The findings of a read: its answer, and the memory that it is based on."""
    if result.stop_reason.resumable:
        answer = f"Not known: reading stopped early after {result.chunks_read} parts ({result.stop_reason.value})."
    elif result.stop_reason is StopReason.NO_ANSWER or not result.answer:
        answer = "none was found."
    else:
        answer = result.answer
    return f"Answer: {answer}\n\nNoted while reading:\n{result.memory.strip() or '(nothing)'}"


def messages_after(
    request: ChatRequest, plan: Plan, sources: Sequence[Source], result: ReadResult, shortened_request: str
) -> list[dict[str, Any]]:
    """The messages with the findings instead of the parts that were read.

    Args:
        request: the request.
        plan: its parts that were read.
        sources: the texts that were read, from `sources_of`.
        result: the read's.
        shortened_request: the replacement of the user's latest request if that was read itself.
    """
    names = ", ".join(source.name for source in sources)
    found = (
        f"[{names}: too long to show, so it was read part by part, with this question in mind: {result.question}]\n\n"
        f"{findings(result)}"
    )
    bearer = None if plan.history else plan.places[-1]
    messages: list[dict[str, Any]] = []
    shown = False
    for number, message in enumerate(request.messages):
        is_system = message.role in {"system", "developer"}
        if plan.history and not is_system and not shown:
            messages.append({"role": "user", "content": f"[Of earlier messages:]\n\n{found}"})
            shown = True
        if number < plan.history and not is_system and number != plan.asked:
            continue
        places = {place.part for place in plan.places if place.message == number}
        if not places:
            messages.append(dict(message.fields))
            continue
        texts = {}
        for place in places:
            text = found if Place(number, place) == bearer else "[Too long to show; the findings are given separately.]"
            if number == plan.asked and message.parts[place].kind == "text":
                text = f"{text}\n\n{shortened_request}"
            elif is_system and (instructions := message.parts[place].text) is not None:
                text = f"{instructions.head(_HEAD_BYTES)} [...]\n\n{text}"
            texts[place] = text
        messages.append({**message.fields, "content": _content(message, texts)})
    return messages


_HEAD_BYTES: Final = 600


def _content(message: ChatMessage, texts: dict[int, str]) -> Any:
    if len(message.parts) == 1 and message.parts[0].raw is None:
        return texts[0]
    return [
        {"type": "text", "text": texts[place]} if place in texts else part.raw
        for place, part in enumerate(message.parts)
    ]


def body_after(request: ChatRequest, messages: list[dict[str, Any]]) -> bytes:
    """The body to pass on: the request's own fields, with these messages."""
    values: dict[str, Any] = {**request.fields, "messages": messages}
    if request.options.stream and not request.options.wants_usage:
        # The server reports the call's usage at the stream's end, if requested.
        values["stream_options"] = {**(request.options.stream_options or {}), "include_usage": True}
    return msgspec.json.encode(values)
