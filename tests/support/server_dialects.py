"""The dialects of the OpenAI API that servers speak, one quirk each, as replies of a `FakeServer`.

Each is written from a provider's documentation or a public report. The stand-in answers correctly in it; what a read
must make of it stands beside it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from support.fake_server import FakeServer
from support.scripts import read_perfectly
from support.server_faults import make_error, make_response

Body = dict[str, Any]
Reply = dict[str, Any]


@dataclass(frozen=True)
class Dialect:
    """One quirk: how a server changes a usual reply, or which requests it refuses."""

    reply: Callable[[Reply, int], Any] = lambda reply, number: reply
    refuses: Callable[[Body], Any] = lambda body: None
    """The reply to a request that it does not take, as JSON; None for others."""
    status: int = 400
    """Of such a reply."""
    models: Any = None
    """Its reply at /models, as JSON, or as a function that returns a response."""
    events: frozenset[str] = frozenset()
    """The kinds of event that must appear, and no others."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the read."""
    vllm: bool = False

    def server(self) -> FakeServer:
        server = FakeServer(self._respond, vllm=self.vllm)
        server.models = self.models
        return server

    def _respond(self, body: Body, number: int) -> Any:
        if (refusal := self.refuses(body)) is not None:
            return web.json_response(refusal, status=self.status)
        reply = FakeServer().completion(body, read_perfectly(body["messages"][-1]["content"]))
        answer = self.reply(copy.deepcopy(reply), number)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)


def _choice(change: Callable[[Reply], Any]) -> Callable[[Reply, int], Reply]:
    """Change the only choice of each reply."""

    def change_reply(reply: Reply, number: int) -> Reply:
        change(reply["choices"][0])
        return reply

    return change_reply


def _content(change: Callable[[str], Any]) -> Dialect:
    """Return a server that sends the content in another form."""

    def change_reply(choice: Reply) -> None:
        choice["message"]["content"] = change(choice["message"]["content"])

    return Dialect(_choice(change_reply))


def _with(**fields: Any) -> Dialect:
    """A server with other fields beside the choices."""
    return Dialect(lambda reply, number: {**reply, **fields})


def _finish(word: Any, *events: str, **fields: Any) -> Dialect:
    """Return a server that ends every reply with this finish reason."""
    return Dialect(_choice(lambda choice: choice.update({"finish_reason": word, **fields})), events=frozenset(events))


def _at_second(change: Callable[[Reply], Any], *events: str) -> Dialect:
    """A server whose second reply is changed; the document's fact is in the first chunk."""

    def change_reply(reply: Reply, number: int) -> Reply:
        if number == 1:
            change(reply["choices"][0])
        return reply

    return Dialect(change_reply, events=frozenset(events))


def _fail(**fields: Any) -> Dialect:
    def change(choice: Reply) -> None:
        choice["message"]["content"] = "half a te"
        choice.update(fields)

    return _at_second(change, "request_retried")


def _refuses(
    field: str, words: Any, *events: str, when: Callable[[Any], bool] = lambda value: True, **more: Any
) -> Dialect:
    """Return a server that refuses requests with this field."""
    refusal = {"error": {"message": words}} if isinstance(words, str) else words
    return Dialect(
        refuses=lambda body: refusal if field in body and when(body[field]) else None, events=frozenset(events), **more
    )


def _text(part: str) -> Reply:
    return {"type": "text", "text": part}


_ALL_LOGPROBS = {"logprobs": True}
_THOUGHT = "maybe the key of harbor is 1"
_UNUSED = '{"choices": [{"index": 0, "message": %s, "finish_reason": "stop", %s}]}'


def _raw(more: str, encode: Callable[[str], bytes] = str.encode) -> Dialect:
    """A server whose bytes are no usual JSON."""

    def answer(reply: Reply, number: int) -> web.Response:
        body = _UNUSED % (json.dumps(reply["choices"][0]["message"]), more)
        return make_response(encode(body))()

    return Dialect(answer)


def _json(reply: Reply) -> bytes:
    return json.dumps(reply).encode()


def _stream(text: str, reason: str) -> web.Response:
    """The reply as events, though it was not asked for as a stream."""
    deltas = [({"role": "assistant"}, None), ({"content": text[:3]}, None), ({"content": text[3:]}, None), ({}, reason)]
    events = [_json({"choices": [{"index": 0, "delta": delta, "finish_reason": word}]}) for delta, word in deltas]
    return make_response(b"".join(b"event: message\ndata: %s\n\n" % event for event in events) + b"data: [DONE]\n")()


FINISH_REASONS = {
    "cut, as 'MAX_TOKENS'": _finish("MAX_TOKENS", "truncated"),
    "cut, and no reason": Dialect(
        lambda reply, number: {
            **reply,
            "choices": [{**reply["choices"][0], "finish_reason": None}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 40},
        },
        events=frozenset({"truncated"}),
    ),
    "cut, as an object": _finish({"type": "max_tokens"}, "truncated"),
    "cut, as a finishReason": _finish(None, "truncated", finishReason="MAX_TOKENS"),
    "cut, in the provider's own word": _finish("stop", "truncated", native_finish_reason="MAX_TOKENS"),
    "ended, with another word of the provider's": _finish("stop", native_finish_reason="banana"),
    "cut, as a stop_reason": _finish(None, "truncated", stop_reason="max_tokens"),
    "refused, as 'SAFETY'": _at_second(lambda choice: choice.update({"finish_reason": "SAFETY"}), "refused"),
    "failed, as 'abort'": _fail(finish_reason="abort"),
    "failed, as an error in the choice": _fail(error={"code": 502, "message": "upstream"}),
    "failed, as an error beside the choices": Dialect(
        lambda reply, number: {**reply, "error": {"message": "upstream"}} if number == 1 else reply,
        events=frozenset({"request_retried"}),
    ),
    "ended, without a reason": _finish(None),
    "unknown, as a number": _finish(7, "unusual_finish"),
    "a tool was called": _finish("tool_calls", "unusual_finish"),
}

CONTENTS = {
    "reasoning, of which all forms are in test_reasoning": _content(
        lambda text: f"<think>{_THOUGHT}</think>\n\n{text}"
    ),
    "thinking and a text part": _content(
        lambda text: [{"type": "thinking", "thinking": [_text(_THOUGHT)]}, _text(text)]
    ),
    "reasoning and an output_text part": _content(
        lambda text: [{"type": "reasoning", "text": _THOUGHT}, {"type": "output_text", "text": text}]
    ),
    "a thought among Gemini's parts": _content(
        lambda text: {"parts": [{"text": text}, {"text": _THOUGHT, "thought": True}]}
    ),
    "two text parts and a reference": _content(
        lambda text: [_text(text[:3]), {"type": "reference", "reference_ids": [1]}, _text(text[3:])]
    ),
    "a list of texts": _content(lambda text: [text]),
    "an object": _content(_text),
    "a text with a value": _content(lambda text: [{"type": "text", "text": {"value": text, "annotations": []}}]),
    "a message that is a text": Dialect(_choice(lambda choice: choice.update(message=choice["message"]["content"]))),
    "a delta": Dialect(_choice(lambda choice: choice.update(delta=choice.pop("message")))),
    "a refusal among the parts": _at_second(
        lambda choice: choice["message"].update(content=[{"type": "refusal", "refusal": "I cannot."}]), "refused"
    ),
    "a refusal as an object": _at_second(
        lambda choice: choice["message"].update(content=None, refusal={"text": "I cannot."}), "refused"
    ),
}

SHAPES = {
    "the choices in another order": Dialect(
        lambda reply, number: {
            **reply,
            "choices": [{"index": 1, "message": {"content": "wrong"}, "finish_reason": "stop"}, *reply["choices"]],
        }
    ),
    "log-probs with items that are null": Dialect(
        _choice(lambda choice: choice.update(logprobs={"content": [None, None]}))
    ),
    "log-probs without a word": Dialect(_choice(lambda choice: choice.update(logprobs={}))),
    "a log-prob that is NaN": _raw('"logprobs": {"content": [{"logprob": NaN}]}'),
    "NaN in a field of its own": _raw('"score": NaN'),
    "a byte order mark": _raw('"x": 1', lambda text: text.encode("utf-8-sig")),
    "a number of a hundred digits": _raw(f'"created": {"9" * 100}'),
    "a line's end in a text": Dialect(lambda reply, number: make_response(_json(reply).replace(b'": "', b'": "\n'))()),
    "half of a surrogate pair": _raw('"x": 1', lambda text: text.replace('": "', '": "\\ud83d ', 1).encode()),
    "comments that keep a connection alive": Dialect(
        lambda reply, number: make_response(b": OPENROUTER PROCESSING\n\n: OPENROUTER PROCESSING\n\n" + _json(reply))()
    ),
    "a stream": Dialect(lambda reply, number: _stream(reply["choices"][0]["message"]["content"], "stop")),
    "a stream that was cut": Dialect(
        lambda reply, number: _stream(reply["choices"][0]["message"]["content"], "length"),
        events=frozenset({"truncated"}),
    ),
    "a stream that broke off": Dialect(
        lambda reply, number: make_response('data: {"error": {"message": "upstream"}}\n\n')() if number == 1 else reply,
        events=frozenset({"request_retried"}),
    ),
    "a token id below 0": Dialect(
        _choice(lambda choice: choice.update(token_ids=[-1])),
        events=frozenset({"logprobs_dropped"}),
        settings=_ALL_LOGPROBS,
    ),
    "a token id beyond 32 bits": Dialect(_choice(lambda choice: choice.update(token_ids=[2**32]))),
    "counts as a text and with a point": _with(usage={"prompt_tokens": "12", "completion_tokens": 3.0}),
    "counts in Anthropic's words": _with(usage={"input_tokens": 12, "output_tokens": 3}),
    "counts below 0": _with(usage={"prompt_tokens": -1, "completion_tokens": 3}),
    "counts that are zero": _with(usage={"prompt_tokens": 0, "completion_tokens": 0}),
    "counts in a list": _with(usage=[12, 3]),
    "details of counts in a list": _with(
        usage={"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": []}
    ),
    "an id that is a number": _with(id=7),
    "no model": _with(model=None),
    "a model that is an object": _with(model={"name": "m"}),
    "reasoning as an object": Dialect(_choice(lambda choice: choice["message"].update(reasoning={"text": _THOUGHT}))),
    "an error that is null": _with(error=None),
    "a refusal that is empty": Dialect(_choice(lambda choice: choice["message"].update(refusal=""))),
}

REFUSED_FIELDS = {
    "max_tokens": _refuses(
        "max_tokens",
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    ),
    "max_tokens, beside the words": _refuses(
        "max_tokens", {"error": {"message": "Unsupported parameter.", "param": "max_tokens", "code": "unsupported"}}
    ),
    "temperature beside top_p": _refuses(
        "top_p", "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
    ),
    "temperature beside top_p below 1": _refuses(
        "top_p", "temperature and top_p cannot both be specified", "sampling_changed", settings={"top_p": 0.9}
    ),
    "a temperature of 0": _refuses(
        "temperature",
        "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.",
        "sampling_changed",
        when=lambda value: value != 1,
    ),
    "a top_p of 1": _refuses(
        "top_p", {"error": "Input validation error: `top_p` must be > 0.0 and < 1.0"}, when=lambda value: value == 1,
        status=422,
    ),
    "temperature, named in advance": _refuses(
        "temperature", "no", "sampling_changed", settings={"unsupported": "temperature"}
    ),
    "seed": _refuses("seed", "Unknown field: seed", "sampling_changed", settings={"seed": 1}),
    "seed, as FastAPI says it": _refuses(
        "seed",
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]},
        "sampling_changed",
        settings={"seed": 1},
    ),
    "seed, in a list as Google says it": _refuses(
        "seed", [{"error": {"code": 400, "message": 'Unknown name "seed": Cannot find field.'}}], "sampling_changed",
        settings={"seed": 1},
    ),
    "stop": _refuses(
        "stop", "Unsupported parameter: 'stop' is not supported with this model.", "sampling_changed",
        settings={"stop_texts": ("END",)},
    ),
    "logprobs": _refuses("logprobs", "logprobs is not supported", "logprobs_dropped", settings=_ALL_LOGPROBS),
    "logprobs, with the status 500": _refuses(
        "logprobs", "logprobs is not supported with logits_all=False", "logprobs_dropped", settings=_ALL_LOGPROBS,
        status=500,
    ),
    "return_token_ids": _refuses(
        "return_token_ids",
        {"message": "[{'type': 'extra_forbidden', 'loc': ('body', 'return_token_ids'), 'msg': 'Extra inputs'}]"},
        "logprobs_dropped",
        vllm=True,
        settings=_ALL_LOGPROBS,
    ),
}  # fmt: skip

MODEL_LISTS = {
    "404": Dialect(models=make_response("not here", 404, Content_Type="text/html")),
    "401": Dialect(models=make_error(401)),
    "500": Dialect(models=make_error(500)),
    "a page": Dialect(models=make_response("<html>hello</html>", Content_Type="text/html")),
    "data that is null": Dialect(models={"object": "list", "data": None}),
    "a bare array": Dialect(models=[{"id": "fake"}, {"id": "other"}]),
    "names alone": Dialect(models={"data": ["fake", "other"]}),
    "Ollama's own list": Dialect(models={"models": [{"name": "fake:latest"}, {"name": "other:7b"}]}),
    "a name with :latest": Dialect(models={"data": [{"id": "fake:latest"}, {"id": "other:7b"}]}),
    "the path of one file": Dialect(models={"data": [{"id": "/models/some.gguf", "owned_by": "llamacpp"}]}),
    "an object without names": Dialect(models={"data": [{"object": "model"}]}),
}
"""Replies of servers at /models, for reads that name their model."""

DIALECTS: dict[str, Dialect] = {
    f"{kind}: {name}": dialect
    for kind, dialects in (
        ("finish reason", FINISH_REASONS),
        ("content", CONTENTS),
        ("shape", SHAPES),
        ("refused field", REFUSED_FIELDS),
        ("models", MODEL_LISTS),
    )
    for name, dialect in dialects.items()
}

LENGTH_REFUSALS = {
    "vLLM": (400, "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens"),
    "llama.cpp": (400, "the request exceeds the available context size. try increasing the context size"),
    "llama.cpp, with the status 500": (500, "the request exceeds the available context size."),
    "LM Studio": (400, "Trying to keep the first 5000 tokens when context the overflows. ... context length"),
    "Groq": (413, "Request too large for model"),
    "TGI": (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4097. Given: 6000"),
    "Cohere": (400, "total number of tokens (prompt and prediction) cannot exceed 4081"),
    "Anthropic": (400, "prompt is too long: 210000 tokens > 200000 maximum"),
    "max_tokens that is too large": (400, "max_tokens is too large: 1024. The maximum context length is 512 tokens"),
}
"""Refusals that are about length, with their status."""


def make_counting_server(count: Callable[[str], int], window: int = 100_000) -> FakeServer:
    """Return a server that counts tokens in its own way.

    Of a prompt that is longer than its window it keeps the newest tokens, and its models have tags and say nothing of a
    window: all as Ollama does.
    """

    def respond(body: Body, number: int) -> Reply:
        prompt = body["messages"][-1]["content"]
        rest = prompt
        while count(rest) > window:
            rest = rest[len(rest) // 50 + 1 :]
        text = read_perfectly(rest) if len(rest) == len(prompt) else "nothing yet"
        return {
            "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": count(rest) + 20, "completion_tokens": 5},
        }

    server = FakeServer(respond)
    server.models = {"object": "list", "data": [{"id": "fake:latest", "object": "model", "owned_by": "library"}]}
    return server
