"""Chat models of LangChain as policies: each has a server that speaks its API, and options arrive there."""

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
from memagent_graph.errors import MemAgentError, PolicyAuthenticationError, PolicyError, PolicyResponseError
from memagent_graph.policy import Message, Policy, TokenUsage

HELLO = [Message(role="user", content="hello there")]
OLLAMA_REPLY = {
    "model": "m",
    "created_at": "2026-01-01T00:00:00Z",
    "message": {"role": "assistant", "content": "hi"},
    "done": True,
    "done_reason": "length",
    "prompt_eval_count": 5,
    "eval_count": 1,
}
GEMINI_REPLY = {
    "candidates": [{"content": {"role": "model", "parts": [{"text": "hi"}]}, "finishReason": "MAX_TOKENS"}],
    "usageMetadata": {"promptTokenCount": 5, "candidatesTokenCount": 1, "totalTokenCount": 6},
    "modelVersion": "m",
}
ANTHROPIC_REPLY = {
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
    """Answers every request with a fixed reply of the API that its path belongs to, and keeps the requests."""

    base_url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def reply(self, request: web.BaseRequest) -> web.Response:
        self.requests.append(await request.json())
        if request.path.startswith("/api/"):
            return web.json_response(OLLAMA_REPLY)
        return web.json_response(GEMINI_REPLY if "generateContent" in request.path else ANTHROPIC_REPLY)


@pytest.fixture
async def server() -> AsyncIterator[ChatServer]:
    server = ChatServer()
    async with RawTestServer(server.reply) as test_server:
        server.base_url = str(test_server.make_url("")).rstrip("/")
        yield server


def make_ollama(url: str) -> BaseChatModel:
    from langchain_ollama import ChatOllama

    return ChatOllama(model="m", base_url=url, num_ctx=4096, temperature=0.1)


def make_gemini(url: str) -> BaseChatModel:
    from langchain_google_genai import ChatGoogleGenerativeAI

    return ChatGoogleGenerativeAI(model="m", google_api_key="key", base_url=url)


def make_anthropic(url: str) -> BaseChatModel:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model="m", api_key="key", base_url=url)


@pytest.mark.parametrize(
    ("make_model", "get_options"),
    [
        (make_ollama, lambda body: body["options"]),
        (make_gemini, lambda body: body["generationConfig"]),
        (make_anthropic, lambda body: body),
    ],
)
async def test_sampling_parameters_reach_the_server(
    make_model: Callable[[str], BaseChatModel], get_options: Callable[[dict], dict], server: ChatServer
) -> None:
    policy = ChatModelPolicy(make_model(server.base_url))
    reply = await policy.complete(HELLO, SamplingParams(max_tokens=7, temperature=0.5, stop=("end",)))
    assert (reply.text, reply.finish_reason, reply.usage) == ("hi", FinishReason.LENGTH, TokenUsage(5, 1))
    options = get_options(server.requests[0])
    assert [options[name] for name in {"max_tokens", "maxOutputTokens", "num_predict"} & options.keys()] == [7]
    assert options["temperature"] == 0.5
    stop_options = {"stop", "stopSequences", "stop_sequences"} & options.keys()
    assert [options[name] for name in stop_options] == [["end"]]


async def test_options_of_the_users_model_are_kept(server: ChatServer) -> None:
    model = make_ollama(server.base_url)
    await ChatModelPolicy(model).complete(HELLO, SamplingParams(max_tokens=7, temperature=0.5, seed=3, top_p=0.9))
    options = {"num_ctx": 4096, "num_predict": 7, "temperature": 0.5, "seed": 3, "top_p": 0.9}
    assert (server.requests[0]["options"], model.temperature) == (options, 0.1)  # type: ignore[attr-defined]


def raise_or_return(reply: AIMessage | Exception) -> AIMessage:
    if isinstance(reply, Exception):
        raise reply
    return reply


async def test_unsupported_sampling_parameters_are_left_out_and_reported(server: ChatServer) -> None:
    sampling = SamplingParams(max_tokens=7, seed=3)
    for unsupported in ((), ("seed",)):
        policy = ChatModelPolicy(make_anthropic(server.base_url), unsupported=unsupported)
        completion = await policy.complete(HELLO, sampling)
        assert (completion.text, [kind for kind, _ in completion.notes]) == ("hi", [EventKind.SAMPLING_CHANGED])
    assert all("seed" not in body for body in server.requests)
    refused_key = type("AuthenticationError", (Exception,), {"status_code": 401})("something else")
    replies = [ValueError("seed is not supported"), refused_key, AIMessage("hi")]
    policy = ChatModelPolicy(GenericFakeChatModel(messages=map(raise_or_return, replies)))
    with pytest.raises(PolicyAuthenticationError, match="something else"):
        await policy.complete(HELLO, sampling)
    assert (await policy.complete(HELLO, sampling)).notes == (), "an option is kept if leaving it out does not help"


async def test_errors_of_the_model_are_policy_errors() -> None:
    policy = ChatModelPolicy(GenericFakeChatModel(messages=iter([])), name="chat")
    assert isinstance(policy, Policy)
    with pytest.raises(PolicyError, match=r"^chat: "):
        await policy.complete(HELLO, SamplingParams())


async def test_an_interrupted_reply_is_requested_again_up_to_max_retries_and_a_cut_one_is_not(monkeypatch) -> None:
    monkeypatch.setattr("memagent_graph.policies.chat_model._FIRST_PAUSE_SECONDS", 0)
    interrupted_reply = AIMessage("half a te", response_metadata={"finish_reason": "error"})
    refusals = [AIMessage("", additional_kwargs={"refusal": "I cannot."}), ValueError("400: Content Exists Risk")]
    cut_reasons = ({"stopReason": "max_tokens"}, {"incomplete_details": {"reason": "max_output_tokens"}})
    ended_replies = [*refusals, *(AIMessage("cut", response_metadata=reason) for reason in cut_reasons)]
    replies = iter([interrupted_reply, AIMessage("whole"), *ended_replies, interrupted_reply, interrupted_reply])
    policy = ChatModelPolicy(GenericFakeChatModel(messages=map(raise_or_return, replies)), max_retries=1)
    assert (await policy.complete(HELLO, SamplingParams())).retries == 1
    reasons = [(await policy.complete(HELLO, SamplingParams())).finish_reason for _ in ended_replies]
    assert reasons == [FinishReason.REFUSED] * 2 + [FinishReason.LENGTH] * 2
    with pytest.raises(PolicyResponseError, match="still failed during a reply after 1 retry"):
        await policy.complete(HELLO, SamplingParams())
    with pytest.raises(MemAgentError, match="max_retries must be at least 0, got -1"):
        ChatModelPolicy(GenericFakeChatModel(messages=replies), max_retries=-1)
