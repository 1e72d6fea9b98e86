"""The chat models of LangChain's own packages, each with a server that speaks its API: what is asked arrives there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from memagent_graph import ChatModelPolicy, EventKind, FinishReason, SamplingParams
from memagent_graph.errors import PolicyError, PolicyRequestError, PolicyResponseError
from memagent_graph.policy import Message, Policy, TokenUsage

HELLO = [Message(role="user", content="hello there")]
OLLAMA = {
    "model": "m",
    "created_at": "2026-01-01T00:00:00Z",
    "message": {"role": "assistant", "content": "hi"},
    "done": True,
    "done_reason": "length",
    "prompt_eval_count": 5,
    "eval_count": 1,
}
GEMINI = {
    "candidates": [{"content": {"role": "model", "parts": [{"text": "hi"}]}, "finishReason": "MAX_TOKENS"}],
    "usageMetadata": {"promptTokenCount": 5, "candidatesTokenCount": 1, "totalTokenCount": 6},
    "modelVersion": "m",
}
ANTHROPIC = {
    "id": "1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "max_tokens",
    "usage": {"input_tokens": 5, "output_tokens": 1},
}


@dataclass
class ChatServer:
    """Answers every request with the same reply of one of the APIs, and keeps what it was asked."""

    base_url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.BaseRequest) -> web.Response:
        self.requests.append(await request.json())
        if request.path.startswith("/api/"):
            return web.json_response(OLLAMA)
        return web.json_response(GEMINI if "generateContent" in request.path else ANTHROPIC)


@pytest.fixture
async def server() -> AsyncIterator[ChatServer]:
    server = ChatServer()
    async with RawTestServer(server.handle) as raw:
        server.base_url = str(raw.make_url("")).rstrip("/")
        yield server


def ollama(url: str) -> BaseChatModel:
    from langchain_ollama import ChatOllama

    return ChatOllama(model="m", base_url=url, num_ctx=4096, temperature=0.1)


def gemini(url: str) -> BaseChatModel:
    from langchain_google_genai import ChatGoogleGenerativeAI

    return ChatGoogleGenerativeAI(model="m", google_api_key="key", base_url=url)


def anthropic(url: str) -> BaseChatModel:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model="m", api_key="key", base_url=url)


@pytest.mark.parametrize(
    ("make", "options_in"),
    [
        (ollama, lambda body: body["options"]),
        (gemini, lambda body: body["generationConfig"]),
        (anthropic, lambda body: body),
    ],
)
async def test_sampling_parameters_reach_the_server(
    make: Callable[[str], BaseChatModel], options_in: Callable[[dict[str, Any]], dict[str, Any]], server: ChatServer
) -> None:
    policy = ChatModelPolicy(make(server.base_url))
    completion = await policy.complete(HELLO, SamplingParams(max_tokens=7, temperature=0.5, stop=("end",)))
    assert (completion.text, completion.finish_reason) == ("hi", FinishReason.LENGTH)
    assert completion.usage == TokenUsage(5, 1)
    options = options_in(server.requests[0])
    bounds = {"max_tokens", "maxOutputTokens", "num_predict"} & options.keys()
    assert [options[name] for name in bounds] == [7]
    assert options["temperature"] == 0.5
    stops = {"stop", "stopSequences", "stop_sequences"} & options.keys()
    assert [options[name] for name in stops] == [["end"]]


async def test_options_of_ones_own_model_stay(server: ChatServer) -> None:
    model = ollama(server.base_url)
    await ChatModelPolicy(model).complete(HELLO, SamplingParams(max_tokens=7, temperature=0.5, seed=3, top_p=0.9))
    expected = {"num_ctx": 4096, "num_predict": 7, "temperature": 0.5, "seed": 3, "top_p": 0.9}
    assert server.requests[0]["options"] == expected
    assert model.temperature == 0.1  # type: ignore[attr-defined]


def raise_or_return(reply: AIMessage | Exception) -> AIMessage:
    if isinstance(reply, Exception):
        raise reply
    return reply


async def test_unsupported_sampling_parameters_are_left_out_and_reported(server: ChatServer) -> None:
    sampling = SamplingParams(max_tokens=7, seed=3)
    for policy in (
        ChatModelPolicy(anthropic(server.base_url)),
        ChatModelPolicy(anthropic(server.base_url), unsupported={"seed"}),
    ):
        completion = await policy.complete(HELLO, sampling)
        assert (completion.text, [kind for kind, _ in completion.notes]) == ("hi", [EventKind.SAMPLING_CHANGED])
    assert all("seed" not in body for body in server.requests)
    replies = [ValueError("seed is not supported"), ValueError("something else"), AIMessage("hi")]
    policy = ChatModelPolicy(GenericFakeChatModel(messages=map(raise_or_return, replies)))
    with pytest.raises(PolicyError, match="something else"):
        await policy.complete(HELLO, sampling)
    assert (await policy.complete(HELLO, sampling)).notes == (), "an option is not given up where that does not help"


async def test_an_error_of_the_model_and_a_prompt_of_token_ids_are_errors_of_the_policy() -> None:
    policy = ChatModelPolicy(GenericFakeChatModel(messages=iter([])), name="chat")
    assert isinstance(policy, Policy)
    with pytest.raises(PolicyError, match=r"^chat: "):
        await policy.complete(HELLO, SamplingParams())
    with pytest.raises(PolicyRequestError, match="messages, not token ids"):
        await policy.complete([1, 2], SamplingParams())


async def test_a_model_that_failed_while_it_wrote_is_asked_again_as_often_as_that_is_allowed(monkeypatch) -> None:
    monkeypatch.setattr("memagent_graph.policies.chat_model._FIRST_PAUSE_SECONDS", 0)
    half = AIMessage("half a te", response_metadata={"finish_reason": "error"})
    refusal = AIMessage("", additional_kwargs={"refusal": "I cannot."})
    replies = iter([half, AIMessage("whole"), refusal, half, half])
    policy = ChatModelPolicy(GenericFakeChatModel(messages=replies), max_retries=1)
    completion = await policy.complete(HELLO, SamplingParams())
    assert (completion.text, completion.retries) == ("whole", 1)
    assert (await policy.complete(HELLO, SamplingParams())).finish_reason is FinishReason.REFUSED
    with pytest.raises(PolicyResponseError, match="still broke its reply off after 1 retries"):
        await policy.complete(HELLO, SamplingParams())
