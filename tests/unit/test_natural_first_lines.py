"""What people have in their hands is a policy: an address, a chat model, a client of the openai package."""

from __future__ import annotations

import openai
import pytest
from httpx2 import AsyncClient
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from support.fake_server import FakeServer

from memagent_graph import Budget, ChatModelPolicy, MemAgent, OpenAICompatiblePolicy, SamplingParams
from memagent_graph.errors import MemAgentError, PolicyError, PolicyRequestError
from memagent_graph.events import EventKind
from memagent_graph.policy import Message
from memagent_graph.settings import NO_KEY

HELLO = [Message(role="user", content="hello there")]
CHOICES = {"tokenizer": "embedded", "budget": Budget(chunk_tokens=50), "run_log": False}


def test_an_address_in_the_model_s_place_is_an_error_that_names_the_argument() -> None:
    with pytest.raises(MemAgentError, match=r"Pass the address as base_url"):
        MemAgent(model="http://localhost:8000/v1")


def test_a_chat_model_is_a_policy_that_says_what_it_lacks(caplog) -> None:
    with MemAgent(GenericFakeChatModel(messages=iter("ab")), logprobs=True, **CHOICES) as reader:
        assert isinstance(reader.policy, ChatModelPolicy)
        result = reader.read("Ada signed it.", "Who signed it?")
    assert "cannot be trained on" in caplog.text
    assert [event.kind for event in result.events].count(EventKind.LOGPROBS_DROPPED) == 2, "at each reply, if asked for"


@pytest.mark.parametrize("vllm", [True, False])
def test_an_address_is_a_server_which_is_told_once_that_it_has_no_token_ids(vllm: bool, caplog) -> None:
    request = ("The key of harbor is 4711.", "What is the key of harbor?")
    with FakeServer(vllm=vllm) as server, MemAgent(server.base_url, **CHOICES) as reader:
        assert reader.settings.base_url == server.base_url
        assert [result.answer for result in reader.batch([request] * 2)] == ["4711"] * 2
        reader.copy(temperature=0.5).read(*request)
    assert caplog.text.count("cannot be trained on") == (0 if vllm else 1)


def test_an_option_of_the_command_line_that_is_no_setting_leads_to_its_place() -> None:
    with pytest.raises(MemAgentError) as error:
        MemAgent(max_chunks=2)
    assert "limits=Limits(max_chunks=...)" in str(error.value)


@pytest.mark.parametrize("kind", [openai.OpenAI, openai.AsyncOpenAI])
async def test_a_client_s_settings_are_taken_over(kind: type) -> None:
    with FakeServer(lambda body, number: "hi", key="the-clients-own-key") as server:
        client = kind(
            base_url=server.base_url, api_key="the-clients-own-key", organization="ours", project="p",
            default_headers={"X-Team": "a"}, default_query={"version": "2"}, timeout=7.0, max_retries=1,
        )  # fmt: skip
        policy = MemAgent(client, model="fake", **CHOICES).policy
        completion = await policy.complete(HELLO, SamplingParams())
        await policy.aclose()
    assert completion.text == "hi"
    names = ("OpenAI-Organization", "OpenAI-Project", "X-Team")
    assert [server.headers[0].get(name) for name in names] == ["ours", "p", "a"]
    assert policy._server.read_timeout == 7.0
    assert policy._make_url("models").endswith("/v1/models?version=2")


async def test_azure_gets_its_key_header_version_and_deployment() -> None:
    client = openai.AsyncAzureOpenAI(api_key="a" * 12, azure_endpoint="https://x.example", api_version="2024-10-21")
    policy = MemAgent(client, model="mine", **CHOICES).policy
    url = "https://x.example/openai/deployments/mine/chat/completions?api-version=2024-10-21"
    assert policy._make_url("chat/completions") == url
    assert policy._headers["api-key"] == "a" * 12
    assert "Authorization" not in policy._headers
    with pytest.raises(PolicyRequestError, match="deployment is not named"):
        MemAgent(client, **CHOICES)


def test_a_client_s_proxy_is_taken_over_and_its_password_stays_hidden() -> None:
    client = openai.AsyncOpenAI(
        base_url="http://far.example/v1",
        api_key="k" * 12,
        http_client=AsyncClient(proxy="http://me:secretly@proxy:3128"),
    )
    policy = MemAgent(client, **CHOICES).policy
    assert policy._proxy == "http://me:secretly@proxy:3128"
    assert "secretly" not in policy._server.redact("refused secretly")


def test_a_client_whose_key_comes_from_a_function_is_refused_with_the_way_round() -> None:
    with pytest.raises(PolicyRequestError, match="ChatOpenAI"):
        MemAgent(openai.OpenAI(base_url="http://x/v1", api_key=lambda: "key"), **CHOICES)


def client_of(library: str) -> object:
    return type("Client", (), {"__module__": f"{library}.client"})()


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (object(), "Pass the address of a server"), (5, "Pass the address of a server"),
        (OpenAICompatiblePolicy, "Pass an object of it"), (AsyncClient(), "AsyncOpenAI"),
        (client_of("anthropic"), "ChatAnthropic"), (client_of("ollama"), "localhost:11434/v1"),
        (client_of("litellm"), "LiteLLM's proxy"),
    ],
)  # fmt: skip
def test_objects_that_are_no_policy_are_refused_with_a_remedy(value: object, remedy: str) -> None:
    with pytest.raises(PolicyError, match="is not a policy") as error:
        MemAgent(value, **CHOICES)
    assert remedy in str(error.value)


async def test_headers_of_one_s_own_are_sent_and_never_shown() -> None:
    with FakeServer(lambda body, number: "hi") as server:
        reader = MemAgent(base_url=server.base_url, header=["X-Gateway-Key: very-secret-value"], **CHOICES)
        await reader.policy.complete(HELLO, SamplingParams())
        await reader.aclose()
    assert server.headers[0]["X-Gateway-Key"] == "very-secret-value"
    assert "very-secret-value" not in f"{reader.settings!r}{reader.settings.for_log()}"
    assert reader.policy._server.redact("it was very-secret-value") == "it was [hidden]"


async def test_a_query_at_the_end_of_the_address_is_in_every_request() -> None:
    policy = OpenAICompatiblePolicy("m", base_url="http://x.example/v1?api-version=3")
    assert policy._make_url("chat/completions") == "http://x.example/v1/chat/completions?api-version=3"


def test_organisation_and_project_go_only_where_a_key_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "ours")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "p")
    headers = {
        key: OpenAICompatiblePolicy("m", base_url="http://x/v1", api_key=key)._headers for key in ("key", NO_KEY)
    }
    assert headers["key"]["OpenAI-Organization"] == "ours"
    assert not {"OpenAI-Organization", "OpenAI-Project"} & headers[NO_KEY].keys()


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"ca_file": "nowhere.pem"},
            {"proxy": "proxy"},
            {"unsupported": ["model"]},
            {"default_headers": {"X": "a\nb"}},
        ),
        *({"session_header": name} for name in ("", "two words", "Authorization", "content-type", "X:Y", "Host")),
    ],
)
def test_unusable_server_options_are_refused_before_a_request(wrong: dict) -> None:
    with pytest.raises(PolicyRequestError):
        OpenAICompatiblePolicy("m", base_url="https://x/v1", **wrong)
