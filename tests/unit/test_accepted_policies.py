"""What `MemAgent` takes as its policy: an address, a chat model, or a client of the openai package."""

from __future__ import annotations

import openai
import pytest
from httpx2 import AsyncClient
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from support.fake_server import HELLO, FakeServer

from memagent_graph import Budget, ChatModelPolicy, MemAgent, OpenAICompatiblePolicy, SamplingParams
from memagent_graph.errors import MemAgentError, PolicyError, PolicyRequestError
from memagent_graph.events import EventKind
from memagent_graph.settings import NO_KEY

SETTINGS = {"tokenizer": "embedded", "budget": Budget(chunk_tokens=50), "run_log": False}


def test_an_address_passed_as_model_is_an_error_that_names_base_url() -> None:
    with pytest.raises(MemAgentError, match=r"Pass the address as base_url"):
        MemAgent(model="http://localhost:8000/v1")


def test_a_chat_model_is_a_policy_and_its_missing_logprobs_are_reported(caplog) -> None:
    with MemAgent(GenericFakeChatModel(messages=iter("ab")), logprobs=True, **SETTINGS) as reader:
        assert isinstance(reader.policy, ChatModelPolicy)
        result = reader.read("Ada signed it.", "Who signed it?")
    assert "cannot be trained on" in caplog.text
    assert [event.kind for event in result.events].count(EventKind.LOGPROBS_DROPPED) == 2, "once per reply"


@pytest.mark.parametrize("vllm", [True, False])
def test_an_address_is_a_server_and_missing_token_ids_are_reported_once(vllm: bool, caplog) -> None:
    read_arguments = ("The key of harbor is 4711.", "What is the key of harbor?")
    with FakeServer(vllm=vllm) as server, MemAgent(server.base_url, **SETTINGS) as reader:
        assert reader.settings.base_url == server.base_url
        assert [result.answer for result in reader.batch([read_arguments] * 2)] == ["4711"] * 2
        reader.copy(temperature=0.5).read(*read_arguments)
    assert caplog.text.count("cannot be trained on") == (0 if vllm else 1)


def test_the_error_for_a_command_line_option_names_the_python_argument() -> None:
    with pytest.raises(MemAgentError, match=r"limits=Limits\(max_chunks=\.\.\.\)"):
        MemAgent(max_chunks=2)
    for name in ("temperature", "update_retries"):
        with pytest.raises(MemAgentError, match=rf"{name} must be at least 0, got -1(\.0)?\. Choose a {name}"):
            MemAgent(**{name: -1})


@pytest.mark.parametrize("client_class", [openai.OpenAI, openai.AsyncOpenAI])
async def test_settings_of_an_openai_client_are_used(client_class: type) -> None:
    with FakeServer(lambda body, number: "hi", key="the-clients-own-key") as server:
        client = client_class(
            base_url=server.base_url, api_key="the-clients-own-key", organization="ours", project="p",
            default_headers={"X-Team": "a"}, default_query={"version": "2"}, timeout=7.0, max_retries=1,
        )  # fmt: skip
        policy = MemAgent(client, model="fake", **SETTINGS).policy
        completion = await policy.complete(HELLO, SamplingParams())
        await policy.aclose()
    assert completion.text == "hi"
    header_names = ("OpenAI-Organization", "OpenAI-Project", "X-Team")
    assert [server.headers[0].get(name) for name in header_names] == ["ours", "p", "a"]
    assert policy._server.read_timeout == 7.0
    assert policy._make_url("models").endswith("/v1/models?version=2")


async def test_an_azure_client_gives_header_version_and_deployment(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    client = openai.AsyncAzureOpenAI(api_key="a" * 12, azure_endpoint="https://x.example", api_version="2024-10-21")
    policy = MemAgent(client, model="mine", header=["X-Team: a"], **SETTINGS).policy
    url = "https://x.example/openai/deployments/mine/chat/completions?api-version=2024-10-21"
    assert policy._make_url("chat/completions") == url
    assert (policy._server.headers["api-key"], policy._server.headers["X-Team"]) == ("a" * 12, "a")
    assert "Authorization" not in policy._server.headers
    with pytest.raises(PolicyRequestError, match="does not name a deployment"):
        MemAgent(client, **SETTINGS)


def test_the_proxy_of_a_client_is_used_and_its_password_hidden() -> None:
    http_client = AsyncClient(proxy="http://me:secretly@proxy:3128")
    client = openai.AsyncOpenAI(
        base_url="http://far.example/v1", api_key="k" * 12, organization="", timeout=0, http_client=http_client
    )
    policy = MemAgent(client, **SETTINGS).policy
    assert policy._server.proxy == "http://me:secretly@proxy:3128"
    assert "secretly" not in policy._server.redact("refused secretly")
    assert "OpenAI-Organization" not in policy._server.headers and policy._server.read_timeout == 0


def test_a_client_whose_key_is_a_function_is_refused() -> None:
    with pytest.raises(PolicyRequestError, match="ChatOpenAI"):
        MemAgent(openai.OpenAI(base_url="http://x/v1", api_key=lambda: "key"), **SETTINGS)


def make_client(library: str) -> object:
    return type("Client", (), {"__module__": f"{library}.client"})()


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (object(), "Pass the address of a server"), (5, "Pass the address of a server"),
        (OpenAICompatiblePolicy, "Pass an instance"), (AsyncClient(), "AsyncOpenAI"),
        (make_client("anthropic"), "ChatAnthropic"), (make_client("ollama"), "localhost:11434/v1"),
        (make_client("litellm"), "LiteLLM's proxy"),
    ],
)  # fmt: skip
def test_the_error_for_an_object_that_is_not_a_policy_gives_advice(value: object, advice: str) -> None:
    with pytest.raises(PolicyError, match="is not a policy") as error:
        MemAgent(value, **SETTINGS)
    assert advice in str(error.value)


async def test_custom_headers_are_sent_and_never_shown() -> None:
    with FakeServer(lambda body, number: "hi") as server:
        headers = "X-Title: Basic Assistant of mine\nX-Gateway-Key: Token id=very-secret-value"  # or as a list
        reader = MemAgent(base_url=server.base_url, header=headers, **SETTINGS)
        await reader.policy.complete(HELLO, SamplingParams())
        await reader.aclose()
    assert server.headers[0]["X-Gateway-Key"] == "Token id=very-secret-value"
    assert "very-secret-value" not in f"{reader.settings!r}{reader.settings.for_log()}"
    assert reader.policy._server.redact("an Assistant with very-secret-value") == "an Assistant with [hidden]"


async def test_the_query_of_the_address_is_in_every_request() -> None:
    policy = OpenAICompatiblePolicy("m", base_url="http://x.example/v1?region=swedencentral")
    assert (policy._make_url("x"), policy.secrets) == ("http://x.example/v1/x?region=swedencentral", ())


def test_key_organization_and_project_are_not_for_a_server_with_other_credentials(monkeypatch) -> None:
    for name, value in {"API_KEY": "sk-key", "ORG_ID": "ours", "PROJECT_ID": "p"}.items():
        monkeypatch.setenv(f"OPENAI_{name}", value)
    options = ({}, {"api_key": NO_KEY}, {"default_headers": {"Api-Key": "k"}}, {"base_url": "http://me:pw@x/v1"})
    sent = [OpenAICompatiblePolicy("m", **{"base_url": "http://x/v1"} | more)._server.headers for more in options]
    assert [len({"Bearer sk-key", "ours", "p"} & set(headers.values())) for headers in sent] == [3, 0, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        *({"ca_file": "nowhere.pem"}, {"proxy": "proxy"}, {"unsupported": ["model"]}),
        *({"default_headers": {"X": "a\nb"}}, {"max_retries": -1}, {"max_concurrency": 0}),
        *({"session_header": name} for name in ("", "two words", "Authorization", "content-type", "X:Y", "Host")),
    ],
)
def test_invalid_server_options_are_refused(options: dict) -> None:
    with pytest.raises(MemAgentError):
        OpenAICompatiblePolicy("m", base_url="https://x/v1", **options)
