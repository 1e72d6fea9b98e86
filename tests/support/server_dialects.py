"""Dialects of the OpenAI API, each with one quirk of a server, as replies of a `FakeServer`.

Each follows a provider's documentation or a public report. The server answers correctly in its dialect, and the dialect
lists the events that a read must report.
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

    change_reply: Callable[[Reply, int], Any] = lambda reply, number: reply
    """Changes a usual reply, given the number of its request from 0."""
    refuse: Callable[[Body], Any] = lambda body: None
    """Returns the refusal of a request as JSON, or None to accept it."""
    status: int = 400
    """The HTTP status of a refusal."""
    models: Any = None
    """The reply at /models: JSON, or a function that returns a response."""
    events: frozenset[str] = frozenset()
    """Exactly the kinds of event that a read must report."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the read."""
    vllm: bool = False

    def make_server(self) -> FakeServer:
        server = FakeServer(self._respond, vllm=self.vllm)
        server.models = self.models
        return server

    def _respond(self, body: Body, number: int) -> Any:
        if (refusal := self.refuse(body)) is not None:
            return web.json_response(refusal, status=self.status)
        reply = FakeServer().make_reply(body, read_perfectly(body["messages"][-1]["content"]))
        answer = self.change_reply(copy.deepcopy(reply), number)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)


def _change_choice(change: Callable[[Reply], Any]) -> Callable[[Reply, int], Reply]:
    """Return a function that changes the only choice of each reply."""

    def change_reply(reply: Reply, number: int) -> Reply:
        change(reply["choices"][0])
        return reply

    return change_reply


def _change_content(change: Callable[[str], Any]) -> Dialect:
    """Return the dialect of a server that sends the content in another form."""

    def change_reply(choice: Reply) -> None:
        choice["message"]["content"] = change(choice["message"]["content"])

    return Dialect(_change_choice(change_reply))


def _add_fields(**fields: Any) -> Dialect:
    """Return the dialect of a server that sends these fields beside the choices."""
    return Dialect(lambda reply, number: {**reply, **fields})


def _finish(reason: Any, *events: str, **fields: Any) -> Dialect:
    """Return the dialect of a server that ends every reply with this finish reason."""
    change_reply = _change_choice(lambda choice: choice.update({"finish_reason": reason, **fields}))
    return Dialect(change_reply, events=frozenset(events))


def _change_second(change: Callable[[Reply], Any], *events: str) -> Dialect:
    """Return the dialect of a server that changes or replaces its second reply; the fact is in the first chunk."""

    def change_reply(reply: Reply, number: int) -> Any:
        response = change(reply["choices"][0]) if number == 1 else None
        return reply if response is None else response

    return Dialect(change_reply, events=frozenset(events))


def _fail(**fields: Any) -> Dialect:
    def change(choice: Reply) -> None:
        choice["message"]["content"] = "half a te"
        choice.update(fields)

    return _change_second(change, "request_retried")


def _refuse(
    field: str, error: Any, *events: str, when: Callable[[Any], bool] = lambda value: True, **more: Any
) -> Dialect:
    """Return the dialect of a server that refuses requests with this field."""
    refusal = {"error": {"message": error}} if isinstance(error, str) else error
    return Dialect(
        refuse=lambda body: refusal if field in body and when(body[field]) else None, events=frozenset(events), **more
    )


def _make_part(text: str) -> Reply:
    return {"type": "text", "text": text}


_ALL_LOGPROBS = {"logprobs": True}
_AZURE_FILTER = "The response was filtered due to the prompt triggering Azure OpenAI's content management policy."
_THOUGHT = "maybe the key of harbor is 1"
_COMPLETION = '{"choices": [{"index": 0, "message": %s, "finish_reason": "stop", %s}]}'


def _send_raw(field: str, encode: Callable[[str], bytes] = str.encode) -> Dialect:
    """Return the dialect of a server with this field in its JSON, or with an unusual encoding."""

    def change_reply(reply: Reply, number: int) -> web.Response:
        return make_response(encode(_COMPLETION % (json.dumps(reply["choices"][0]["message"]), field)))()

    return Dialect(change_reply)


def _dump(reply: Reply) -> bytes:
    return json.dumps(reply).encode()


def _make_stream(text: str, reason: str) -> web.Response:
    """Return the reply as server-sent events, though the request asked for none."""
    deltas = [({"role": "assistant"}, None), ({"content": text[:3]}, None), ({"content": text[3:]}, None), ({}, reason)]
    events = [_dump({"choices": [{"index": 0, "delta": delta, "finish_reason": end}]}) for delta, end in deltas]
    stream = b"".join(b"event: message\ndata: %s\n\n" % event for event in (b"", *events, b"[DONE]"))
    return make_response(stream)()


FINISH_REASONS = {
    "cut, as 'MAX_TOKENS'": _finish("MAX_TOKENS", "truncated"),
    "cut, as GPT-5 refuses it": _change_second(lambda _: make_error(400, "model output limit was reached")(), "empty"),
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
    "refused, as Azure's 400": _change_second(lambda _: make_error(400, _AZURE_FILTER)(), "refused"),
    "refused, as DeepSeek's 400": _change_second(lambda _: make_error(400, "Content Exists Risk")(), "refused"),
    "refused, as 'SAFETY'": _change_second(lambda choice: choice.update({"finish_reason": "SAFETY"}), "refused"),
    "failed, as 'abort'": _fail(finish_reason="abort"),
    "failed, as an error in the choice": _fail(error={"code": 502, "message": "upstream"}),
    "failed, as an error beside the choices": _change_second(
        lambda choice: web.json_response({"choices": [choice], "error": {"message": "upstream"}}), "request_retried"
    ),
    "ended, without a reason": _finish(None),
    "unknown, as a number": _finish(7, "unusual_finish"),
    "a tool was called": _finish("tool_calls", "unusual_finish"),
}

CONTENTS = {
    "reasoning, of which all forms are in test_reasoning": _change_content(
        lambda text: f"<think>{_THOUGHT}</think>\n\n{text}"
    ),
    "thinking and a text part": _change_content(
        lambda text: [{"type": "thinking", "thinking": [_make_part(_THOUGHT)]}, _make_part(text)]
    ),
    "reasoning and an output_text part": _change_content(
        lambda text: [{"type": "reasoning", "text": _THOUGHT}, {"type": "output_text", "text": text}]
    ),
    "a thought among Gemini's parts": _change_content(
        lambda text: {"parts": [{"text": text}, {"text": _THOUGHT, "thought": True}]}
    ),
    "two text parts and a reference": _change_content(
        lambda text: [_make_part(text[:3]), {"type": "reference", "reference_ids": [1]}, _make_part(text[3:])]
    ),
    "a list of texts": _change_content(lambda text: [text]),
    "an object": _change_content(_make_part),
    "a text with a value": _change_content(lambda text: [{"type": "text", "text": {"value": text, "annotations": []}}]),
    "a message that is a text": Dialect(
        _change_choice(lambda choice: choice.update(message=choice["message"]["content"]))
    ),
    "a delta": Dialect(_change_choice(lambda choice: choice.update(delta=choice.pop("message")))),
    "a refusal among the parts": _change_second(
        lambda choice: choice["message"].update(content=[{"type": "refusal", "refusal": "I cannot."}]), "refused"
    ),
    "a refusal as an object": _change_second(
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
        _change_choice(lambda choice: choice.update(logprobs={"content": [None, None]}))
    ),
    "log-probs without a word": Dialect(_change_choice(lambda choice: choice.update(logprobs={}))),
    "a log-prob that is NaN": _send_raw('"logprobs": {"content": [{"logprob": NaN}]}'),
    "NaN in a field of its own": _send_raw('"score": NaN'),
    "a byte order mark": _send_raw('"x": 1', lambda text: text.encode("utf-8-sig")),
    "a number of a hundred digits": _send_raw(f'"created": {"9" * 100}'),
    "a line's end in a text": Dialect(lambda reply, number: make_response(_dump(reply).replace(b'": "', b'": "\n'))()),
    "half of a surrogate pair": _send_raw('"x": 1', lambda text: text.replace('": "', '": "\\ud83d ', 1).encode()),
    "comments that keep a connection alive": Dialect(
        lambda reply, number: make_response(b": OPENROUTER PROCESSING\n\n: OPENROUTER PROCESSING\n\n" + _dump(reply))()
    ),
    "a stream": Dialect(lambda reply, number: _make_stream(reply["choices"][0]["message"]["content"], "stop")),
    "a stream that was cut": Dialect(
        lambda reply, number: _make_stream(reply["choices"][0]["message"]["content"], "length"),
        events=frozenset({"truncated"}),
    ),
    "a stream that broke off": _change_second(
        lambda _: make_response('data: {"error": {"message": "upstream"}}\n\n')(), "request_retried"
    ),
    "a token id below 0": Dialect(
        _change_choice(lambda choice: choice.update(token_ids=[-1])),
        events=frozenset({"logprobs_dropped"}),
        settings=_ALL_LOGPROBS,
    ),
    "a token id beyond 32 bits": Dialect(_change_choice(lambda choice: choice.update(token_ids=[2**32]))),
    "counts as a text and with a point": _add_fields(usage={"prompt_tokens": "12", "completion_tokens": 3.0}),
    "counts in Anthropic's words": _add_fields(usage={"input_tokens": 12, "output_tokens": 3}),
    "counts below 0": _add_fields(usage={"prompt_tokens": -1, "completion_tokens": 3}),
    "counts that are zero": _add_fields(usage={"prompt_tokens": 0, "completion_tokens": 0}),
    "counts in a list": _add_fields(usage=[12, 3]),
    "details of counts in a list": _add_fields(usage={"prompt_tokens": 12, "prompt_tokens_details": []}),
    "an id that is a number": _add_fields(id=7),
    "no model": _add_fields(model=None),
    "a model that is an object": _add_fields(model={"name": "m"}),
    "reasoning as an object": Dialect(
        _change_choice(lambda choice: choice["message"].update(reasoning={"text": _THOUGHT}))
    ),
    "an error that is null": _add_fields(error=None),
    "a refusal that is empty": Dialect(_change_choice(lambda choice: choice["message"].update(refusal=""))),
}

REFUSED_FIELDS = {
    "max_tokens": _refuse(
        "max_tokens",
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    ),
    "max_tokens, beside the words": _refuse(
        "max_tokens", {"error": {"message": "Unsupported parameter.", "param": "max_tokens", "code": "unsupported"}}
    ),
    "temperature beside top_p": _refuse(
        "top_p", "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
    ),
    "temperature beside top_p below 1": _refuse(
        "top_p", "temperature and top_p cannot both be specified", "sampling_changed", settings={"top_p": 0.9}
    ),
    "a temperature of 0": _refuse(
        "temperature",
        "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.",
        "sampling_changed",
        when=lambda value: value != 1,
    ),
    "a top_p of 1": _refuse(
        "top_p", {"error": "Input validation error: `top_p` must be > 0.0 and < 1.0"}, when=lambda value: value == 1,
        status=422,
    ),
    "temperature, named in advance": _refuse(
        "temperature", "no", "sampling_changed", settings={"unsupported": "temperature"}
    ),
    "seed, as OpenRouter passes it on": _refuse(
        "seed", {"error": {"message": "Provider returned error", "metadata": {"raw": '{"error": "Unknown: seed"}'}}},
        "sampling_changed", settings={"seed": 1},
    ),
    "seed, as FastAPI says it": _refuse(
        "seed",
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]},
        "sampling_changed", settings={"seed": 1},
    ),
    "seed, in a list as Google says it": _refuse(
        "seed", [{"error": {"code": 400, "message": 'Unknown name "seed": Cannot find field.'}}], "sampling_changed",
        settings={"seed": 1},
    ),
    "stop": _refuse(
        "stop", "Unsupported parameter: 'stop' is not supported with this model.", "sampling_changed",
        settings={"stop_texts": ("END",)},
    ),
    "logprobs": _refuse("logprobs", "Logprobs is not enabled for m", "logprobs_dropped", settings=_ALL_LOGPROBS),
    "logprobs, with the status 500": _refuse(
        "logprobs", "logprobs is not supported with logits_all=False", "logprobs_dropped", settings=_ALL_LOGPROBS,
        status=500,
    ),
    "return_token_ids": _refuse(
        "return_token_ids",
        {"message": "[{'type': 'extra_forbidden', 'loc': ('body', 'return_token_ids'), 'msg': 'Extra inputs'}]"},
        "logprobs_dropped", vllm=True, settings=_ALL_LOGPROBS,
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
"""Replies at /models, for reads whose settings name the model."""

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
    "TGI, for the prompt alone": (422, "Input validation error: `inputs` must have less than 1024 tokens. Given: 1168"),
    "Cohere": (400, "total number of tokens (prompt and prediction) cannot exceed 4081"),
    "Anthropic": (400, "prompt is too long: 210000 tokens > 200000 maximum"),
    "max_tokens that is too large": (400, "max_tokens is too large: 1024. The maximum context length is 512 tokens"),
}
"""Refusals of long prompts by servers: the status and the error message."""


def make_counting_server(count: Callable[[str], int], window: int = 100_000) -> FakeServer:
    """Return a server that counts tokens with `count`.

    As Ollama does, it keeps only the newest tokens of a prompt that is longer than its window, and its list of models
    has tags but no context window.
    """

    def respond(body: Body, number: int) -> Reply:
        prompt = body["messages"][-1]["content"]
        suffix = prompt
        while count(suffix) > window:
            suffix = suffix[len(suffix) // 50 + 1 :]
        text = read_perfectly(suffix) if suffix == prompt else "nothing yet"
        return {
            "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": count(suffix) + 20, "completion_tokens": 5},
        }

    server = FakeServer(respond)
    server.models = {"object": "list", "data": [{"id": "fake:latest", "object": "model", "owned_by": "library"}]}
    return server
