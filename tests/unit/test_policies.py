"""Policies of servers and scripts: requests, replies, errors, proxies and limits."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
from support.fake_server import HELLO, FakeServer
from support.server_faults import make_error

from memagent_graph import Completion, FinishReason, OpenAICompatiblePolicy, SamplingParams, ScriptedPolicy
from memagent_graph.errors import PolicyAuthenticationError, PolicyError, PolicyRequestError, PolicyUnreachableError
from memagent_graph.policies.sending import find_proxy
from memagent_graph.policy import Policy, TokenUsage


def make_script(text: str):
    return lambda body, number: text


async def ask(policy: Policy, **sampling) -> Completion:
    return await policy.complete(HELLO, SamplingParams(**sampling))


async def test_a_completion_has_text_usage_and_finish_reason() -> None:
    with FakeServer(make_script("one two three"), count_tokens=lambda text: 2) as server:
        completion = await server.ask(SamplingParams(max_tokens=7, temperature=0.5, seed=3, stop=("END",)))
    assert (completion.text, completion.finish_reason) == ("one two three", FinishReason.STOP)
    assert (completion.usage, completion.token_ids) == (TokenUsage(prompt_tokens=2, completion_tokens=3), None)
    (request,) = server.requests
    assert (request["max_tokens"], request["temperature"], request["seed"], request["stop"]) == (7, 0.5, 3, ["END"])
    assert "logprobs" not in request


async def test_token_ids_are_requested_only_from_vllm() -> None:
    for is_vllm in (True, False):
        with FakeServer(make_script("a b"), vllm=is_vllm, count_tokens=lambda text: 2) as server:
            completion = await server.ask(SamplingParams(logprobs=True))
        assert list(completion.logprobs) == [-0.5, -0.5]
        ids = completion.token_ids, completion.prompt_token_ids
        assert [row and list(row) for row in ids] == ([[0, 1], [0, 1]] if is_vllm else [None, None])
        assert ("return_token_ids" in server.requests[0]) is is_vllm


async def test_the_errors_for_a_wrong_key_and_a_wrong_model_name_them() -> None:
    with FakeServer(key="right") as server:
        with pytest.raises(PolicyAuthenticationError, match="OPENAI_API_KEY"):
            await server.ask(api_key="wrong")
        policy = OpenAICompatiblePolicy("other", base_url=server.base_url, api_key="right")
        with pytest.raises(PolicyRequestError, match="`other` does not exist"):
            await ask(policy)
        await policy.describe()
        with pytest.raises(PolicyRequestError, match="it serves fake"):
            await ask(policy)
        await policy.aclose()


async def test_the_only_served_model_is_the_default_and_adapters_have_its_window() -> None:
    with FakeServer(make_script("x"), model="1") as server:
        server.adapters = a, b = ["version-1", "a long name" * 99]
        server.models = [{"id": 1, "max_model_len": 4096}, {"id": a, "parent": "1"}, {"id": f"models/{b}", "parent": 1}]
        for name, expected_model in ((None, "1"), (a, a), (b, b)):
            policy = OpenAICompatiblePolicy(name, base_url=server.base_url)
            assert (await ask(policy)).model == policy.name == expected_model
            assert (await policy.describe()).context_window == 4096
            await policy.aclose()
        for server.models, names in (([{"id": "one"}, {"id": [2]}], r"one, \[2\]"), ({"data": None}, "no model")):
            with pytest.raises(PolicyRequestError, match=rf"serves {names}\. Choose one with model"):
                await server.ask(model=None)


async def test_switching_the_model_changes_name_and_version_of_later_requests() -> None:
    with FakeServer(make_script("x"), delay=0.2) as server:
        server.adapters = ["version-2"]
        policy = OpenAICompatiblePolicy("fake", base_url=server.base_url, policy_version="1")
        running_request = asyncio.create_task(ask(policy))
        await asyncio.sleep(0.1)
        policy.switch_model("version-2", "2")
        replies = await running_request, await ask(policy)
        await policy.aclose()
    assert [(reply.model, reply.policy_version) for reply in replies] == [("fake", "1"), ("version-2", "2")]
    assert [request["model"] for request in server.requests] == ["fake", "version-2"]


async def test_the_document_key_is_sent_only_in_the_session_header() -> None:
    with FakeServer() as server:
        policy = OpenAICompatiblePolicy("fake", base_url=server.base_url, session_header="X-Session-Id")
        await ask(policy, session="sha256:12")
        await ask(policy)
        await policy.aclose()
        await server.ask(SamplingParams(session="sha256:12"))
    assert [header.get("X-Session-Id") for header in server.headers] == ["sha256:12", None, None]
    assert all("sha256:12" not in str(body) for body in server.requests)


async def test_an_unreachable_server_and_a_timeout_have_different_errors() -> None:
    with FakeServer(make_script("late"), delay=1.0) as silent_server:
        silent_server.models = lambda: time.sleep(0.4)
        for message, options in {
            "no connection to .* Check": {"base_url": "http://127.0.0.1:9/v1"},
            "no connection to .* ca_file": {"base_url": silent_server.base_url.replace("http", "https")},
            r"in time \(0\.2 s for a completion\)": {"read_timeout": 0.2},
            r"in time\. ": {"model": None, "connect_timeout": 0.1},
        }.items():
            with pytest.raises(PolicyUnreachableError, match=message):
                await silent_server.ask(**options, max_retries=0)
        silent_server.models = make_error(503)
        with pytest.raises(PolicyError, match="answered 503"):
            await OpenAICompatiblePolicy("fake", base_url=silent_server.base_url, max_retries=0).describe()


async def test_concurrent_requests_are_limited() -> None:
    with FakeServer(make_script("x"), delay=0.05) as server:
        policy = OpenAICompatiblePolicy("fake", base_url=server.base_url, max_concurrency=3)
        await asyncio.gather(*(ask(policy) for _ in range(12)))
        await policy.aclose()
    assert server.peak_concurrency == 3


async def test_a_scripted_policy_replies_in_order_and_fails_after_its_last_reply() -> None:
    policy = ScriptedPolicy(["one", ValueError("two")])
    assert (await ask(policy)).text == "one"
    for error, message in ((ValueError, "two"), (PolicyError, "ended after 2")):
        with pytest.raises(error, match=message):
            await ask(policy)
    assert policy.prompts == ["hello there"] * 3


@pytest.mark.parametrize("parameters", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}])
def test_invalid_sampling_parameters_are_refused(parameters) -> None:
    with pytest.raises(ValueError):
        SamplingParams(**parameters)


async def test_proxy_and_organization_of_the_environment_are_used(monkeypatch) -> None:
    with FakeServer(make_script("by proxy")) as proxy:
        monkeypatch.setenv("http_proxy", proxy.base_url.removeprefix("http://").removesuffix("/v1"))
        monkeypatch.setenv("OPENAI_ORG_ID", "an-organisation")
        assert (await proxy.ask(base_url="http://far.example/v1", api_key="a-key")).text == "by proxy"
        monkeypatch.setenv("no_proxy", "near.eu,far.example:8000")
        addresses = [f"http://{host}/v1" for host in ("near.eu", "far.example:8000", "far.example")]
        assert [*map(bool, map(find_proxy, addresses))] == [False, False, True]
    monkeypatch.setenv("http_proxy", "socks5://me:pw@proxy:1")
    with pytest.raises(PolicyRequestError, match=r"environment's proxy .*: socks5://proxy:1 .*NO_PROXY"):
        find_proxy("http://far.example/v1")
    expected = {"Host": "far.example", "Authorization": "Bearer a-key", "OpenAI-Organization": "an-organisation"}
    assert [expected.items() <= dict(headers).items() for headers in proxy.headers] == [True]


def test_a_program_that_closes_no_reader_exits_without_warnings_and_its_fork_without_a_pause(tmp_path) -> None:
    program = """
import asyncio, os, sys, time
sys.path.insert(0, "tests")
from support.fake_server import FakeServer
from memagent_graph import MemAgent

def reader(server):
    files = {"checkpoints": sys.argv[1], "run_log": sys.argv[2]}
    return MemAgent(base_url=server.base_url, model="fake", tokenizer="embedded", chunk_tokens=50, **files)

with FakeServer(lambda body, number: "x", vllm=True) as server:
    kept = reader(server)
    print(kept.read("some words " * 100, "what?").stop_reason)
    print(asyncio.run(reader(server).aread("some words " * 100, "what?")).stop_reason, flush=True)
start = time.monotonic()
hasattr(os, "fork") and os.fork() and os.wait()
assert time.monotonic() - start < 7
"""
    command = [sys.executable, "-Wignore::DeprecationWarning", "-c", program, tmp_path / "states", tmp_path / "log"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (process.stdout, process.stderr) == ("answered\nanswered\n", "")


async def test_the_error_for_an_address_that_does_not_end_in_v1_names_the_right_one() -> None:
    with FakeServer() as server:
        for address in (server.base_url.removesuffix("/v1"), f"{server.base_url}/chat/completions"):
            with pytest.raises(PolicyRequestError, match=f"Most end in /v1: base_url {server.base_url}$"):
                await server.ask(base_url=address)
