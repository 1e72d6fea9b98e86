"""Policies by name: those of the package, those that installed packages add, and models in folders and on the hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.added_package import add_package

from memagent_graph.entry_points import POLICIES
from memagent_graph.errors import MemAgentError, PolicyError
from memagent_graph.policies.local import LocalPolicy
from memagent_graph.policies.openai_compatible import OpenAICompatiblePolicy
from memagent_graph.policy import SamplingParams
from memagent_graph.policy_registry import list_policy_names, make_policy
from memagent_graph.settings import PolicySettings, ReadSettings

CODE = """
from memagent_graph import MissingExtraError, ScriptedPolicy

def mine(request):
    return ScriptedPolicy([f"{request.model} {request.timeout:g}"])

def broken(request):
    raise RuntimeError("no weights")

def lacking(request):
    raise MissingExtraError("local", "the policy of mine")

def nothing(request):
    return 3
"""
FACTORIES = ("mine", "broken", "lacking", "nothing")
URL = "http://127.0.0.1:9/v1"


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {name: f"policies_of_mine:{name}" for name in FACTORIES}
    entries |= {"absent": "policies_of_mine:absent", "nowhere": "no_such_module:make", "embedded": "no_such_module:x"}
    monkeypatch.syspath_prepend(add_package(tmp_path / "site", "policies_of_mine", CODE, {POLICIES: entries}))


async def test_a_package_adds_a_policy(added) -> None:
    policy = make_policy(ReadSettings(policy="mine", model="large", timeout=9))
    completion = await policy.complete([{"role": "user", "content": "?"}], SamplingParams(max_tokens=9))
    assert completion.text == "large 9"


def test_an_unknown_name_says_what_is_near(added) -> None:
    assert list_policy_names()[:3] == ("embedded", "local", "server") and set(FACTORIES) < set(list_policy_names())
    with pytest.raises(PolicyError, match=r"no policy 'mien'\. Did you mean mine\?"):
        make_policy(ReadSettings(policy="mien"))


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("broken", "RuntimeError: no weights", "policies_of_mine 1.2"),
        ("lacking", 'the policy of mine needs the extra "local"', "pip install"),
        ("nothing", "its factory gives a value of type int", "policies_of_mine 1.2"),
        ("absent", "AttributeError", "policies_of_mine 1.2"),
        ("nowhere", "No module named 'no_such_module'", "policies_of_mine 1.2"),
    ],
)
def test_a_policy_that_cannot_be_made_is_told_with_its_package(added, name, message, hint) -> None:
    with pytest.raises(PolicyError) as caught:
        make_policy(PolicySettings(policy=name))
    assert caught.value.message.startswith(f"the policy {name!r} of the package policies_of_mine 1.2 fails: ")
    assert message in caught.value.message and hint in str(caught.value.hint)


def test_the_policies_that_come_with_the_package_are_in_the_same_registry(added, monkeypatch) -> None:
    embedded = make_policy(ReadSettings(policy="embedded"))
    assert isinstance(embedded, LocalPolicy) and embedded.name == "embedded", "no package takes its name"
    assert isinstance(make_policy(ReadSettings(policy="server", model="x", base_url=URL)), OpenAICompatiblePolicy)
    with pytest.raises(PolicyError, match=r"no model.*with model"):
        make_policy(ReadSettings(policy="local"))
    with pytest.raises(PolicyError, match=r"^no server is named.*\(base_url\)"):
        make_policy(ReadSettings(policy="server"))
    with pytest.raises(PolicyError, match=r"^x is not a folder here, and no server is named.*\(base_url\)"):
        make_policy(ReadSettings(model="x"))
    assert isinstance(make_policy(ReadSettings(model="x", api_key="key")), OpenAICompatiblePolicy)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    assert isinstance(make_policy(ReadSettings(model="x")), OpenAICompatiblePolicy)
    with pytest.raises(PolicyError, match=r"float16 was asked for, but a server.*leave out dtype"):
        make_policy(ReadSettings(policy="server", model="x", base_url=URL, dtype="float16"))


async def test_a_model_of_the_hub_runs_in_this_process_with_its_own_tokenizer_and_profile(cached: str) -> None:
    policy = make_policy(ReadSettings(model=cached))
    assert isinstance(policy, LocalPolicy)
    assert policy.name == cached
    info = await policy.describe()
    assert info.tokenizer is not None and info.profile is not None and info.shape is not None
    replies = [await model.complete([700, 701], SamplingParams(4)) for model in (policy, LocalPolicy.embedded())]
    assert replies[0].text == replies[1].text
    with pytest.raises(PolicyError, match=r"some/other cannot be downloaded from the hub.*hf download"):
        make_policy(ReadSettings(model="some/other"))


@pytest.mark.parametrize("name", ["./rl-polcy", "../x/y", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_a_folder_misspelt_is_no_request_to_a_server(name: str) -> None:
    with pytest.raises(PolicyError, match=r"there is no folder.*hub id"):
        make_policy(ReadSettings(model=name))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (ReadSettings(), "server"),
        (ReadSettings(model="embedded"), "embedded"),
        (ReadSettings(model="a-name"), "server"),
        (ReadSettings(model="{folder}"), "local"),
        (ReadSettings(model="some/model"), "local"),
        (ReadSettings(model="some/model", base_url=URL), "server"),
        (ReadSettings(base_url=URL), "server"),
        (ReadSettings(base_url=URL, policy="mine"), "mine"),
    ],
)
def test_model_and_server_stand_for_a_policy_where_none_is_named(settings, name, tmp_path) -> None:
    if settings.model == "{folder}":
        settings = ReadSettings(model=str(tmp_path))
    assert settings.policy_name == name


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        (ReadSettings(), URL),
        (ReadSettings(model="a-name"), URL),
        (ReadSettings(policy="server"), URL),
        (ReadSettings(model="embedded"), None),
        (ReadSettings(policy="embedded"), None),
        (ReadSettings(policy="mine", model="a-name"), None),
        (ReadSettings(base_url="http://other/v1"), "http://other/v1"),
    ],
)
def test_the_environment_s_server_is_for_those_who_name_no_other_policy(settings, url, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", URL)
    assert settings.resolve().base_url == url


def test_the_log_keeps_policy_and_strategy() -> None:
    settings = ReadSettings(policy="mine", strategy="own.py:Gate")
    assert settings.for_log() == {"policy": "mine", "strategy": "own.py:Gate", "model": None}
    assert ReadSettings.from_log(settings.for_log(), "r") == settings
    assert ReadSettings(model="embedded").for_log() == {"model": "embedded"}


def test_another_policy_takes_the_place_of_the_one_in_the_log() -> None:
    moved = ReadSettings(policy="server", model="m", base_url="http://old/v1").with_other(base_url=URL)
    assert make_policy(moved) and (moved.policy_name, moved.model, moved.base_url) == ("server", "m", URL)
    served = ReadSettings(model="large", base_url=URL)
    assert served.with_other(policy="mine") == ReadSettings(policy="mine"), "nothing of the server's is left"


def test_arguments_of_the_chat_template_go_with_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = '{"enable_thinking": false}'
    settings = PolicySettings(base_url="http://localhost/v1", model="m", chat_template_kwargs=arguments)
    server = make_policy(settings)
    assert server._make_body([], SamplingParams(), False, None)["chat_template_kwargs"] == {"enable_thinking": False}
    local = make_policy(replace(settings, base_url=None, model="embedded"))
    requests: list[dict[str, Any]] = []
    tokenizer = local._engine._tokenizer
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda _, **options: requests.append(options) or "text")
    local._engine.encode_prompt([{"role": "user", "content": "Who?"}], local._template_arguments)
    assert requests == [{"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}]
    with pytest.raises(MemAgentError, match=r"'off' is not a JSON object.*enable_thinking"):
        make_policy(replace(settings, chat_template_kwargs="off"))
