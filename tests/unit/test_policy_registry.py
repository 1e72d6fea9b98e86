"""Policies by name: those of this package and of installed packages, and models in folders and on the hub."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from support.added_package import add_package
from support.fake_server import HELLO

from memagent_graph.cli.read import Resume
from memagent_graph.entry_points import POLICIES, list_entry_points
from memagent_graph.errors import MemAgentError, PolicyError
from memagent_graph.policies.local import LocalPolicy
from memagent_graph.policies.openai_compatible import OpenAICompatiblePolicy
from memagent_graph.policy import SamplingParams
from memagent_graph.policy_registry import make_policy
from memagent_graph.settings import PolicySettings, ReadSettings

MODULE = """
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


def test_the_first_of_two_entry_points_with_the_same_name_counts(monkeypatch) -> None:
    group_type: Any = type("EntryPoints", (tuple,), {"__getitem__": None})  # since Python 3.12, it takes names
    entries = group_type(EntryPoint("mine", value, POLICIES) for value in ("first", "second"))
    monkeypatch.setattr("memagent_graph.entry_points.entry_points", lambda group: entries)
    assert list_entry_points(POLICIES)["mine"].value == "first"


@pytest.fixture
def added_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {name: f"policies_of_mine:{name}" for name in FACTORIES}
    entries |= {"absent": "policies_of_mine:absent", "nowhere": "no_such_module:make", "embedded": "no_such_module:x"}
    monkeypatch.syspath_prepend(add_package(tmp_path / "site", "policies_of_mine", MODULE, {POLICIES: entries}))


async def test_a_package_adds_a_policy(added_policies) -> None:
    policy = make_policy(ReadSettings(policy="mine", model="large", timeout=9))
    completion = await policy.complete([{"role": "user", "content": "?"}], SamplingParams(max_tokens=9))
    assert completion.text == "large 9"


def test_the_error_for_an_unknown_name_suggests_a_similar_one(added_policies) -> None:
    with pytest.raises(PolicyError, match=r"Choose one of: embedded, local, server, .*broken, lacking, mine, nothing"):
        make_policy(ReadSettings(policy="?"))
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
def test_the_error_of_a_failing_factory_names_its_package(added_policies, name, message, hint) -> None:
    with pytest.raises(PolicyError) as error:
        make_policy(PolicySettings(policy=name))
    assert error.value.message.startswith(f"the policy {name!r} of the package policies_of_mine 1.2 fails: ")
    assert message in error.value.message and hint in str(error.value.hint)


def test_policies_of_the_package_are_in_the_registry(added_policies, monkeypatch) -> None:
    embedded = make_policy(ReadSettings(policy="embedded"))
    assert isinstance(embedded, LocalPolicy) and embedded.name == "embedded", "no package can replace it"
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
    with pytest.raises(PolicyError, match=r"float16 was requested, but a server.*leave out dtype"):
        make_policy(ReadSettings(policy="server", model="x", base_url=URL, dtype="float16"))


async def test_a_model_of_the_hub_runs_in_this_process_with_its_own_tokenizer_and_profile(cached: str) -> None:
    policy = make_policy(ReadSettings(model=cached))
    assert isinstance(policy, LocalPolicy)
    assert policy.name == cached
    info = await policy.describe()
    assert info.tokenizer is not None and info.profile is not None and info.shape is not None
    replies = [await model.complete(HELLO, SamplingParams(4)) for model in (policy, LocalPolicy.embedded())]
    assert replies[0].text == replies[1].text
    with pytest.raises(PolicyError, match=r"some/other cannot be downloaded from the hub.*hf download"):
        make_policy(ReadSettings(model="some/other"))


@pytest.mark.parametrize("name", ["./rl-polcy", "../x/y", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_a_misspelt_folder_is_not_a_model_of_a_server(name: str) -> None:
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
def test_the_policy_follows_from_model_and_server_if_none_is_named(settings, name, tmp_path) -> None:
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
def test_the_server_of_the_environment_is_used_only_without_another_policy(settings, url, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", URL)
    assert settings.resolve().base_url == url


def test_policy_and_strategy_are_logged() -> None:
    settings = ReadSettings(policy="mine", strategy="own.py:Gate")
    assert settings.for_log() == {"policy": "mine", "strategy": "own.py:Gate", "model": None}
    assert ReadSettings.from_log(settings.for_log(), "r") == settings
    assert ReadSettings(base_url="http://u:p@h/v1?a=1&code=a-secret").for_log()["base_url"] == "http://h/v1?a=1"


def test_another_policy_replaces_that_of_the_log() -> None:
    old = ReadSettings(policy="server", model="m", base_url="http://old/v1")
    other = Resume(run_id="r", base_url=URL).change_settings(old)
    assert make_policy(other) and (other.policy_name, other.model, other.base_url) == ("server", "m", URL)
    own = Resume(run_id="r", policy="mine").change_settings(other)
    assert own == ReadSettings(policy="mine"), "no setting of the server is kept"


def test_chat_template_arguments_are_in_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = '{"enable_thinking": false}'
    settings = PolicySettings(base_url="http://localhost/v1", model="m", chat_template_kwargs=arguments)
    body = make_policy(settings)._make_body([], SamplingParams(), False, None)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    local_policy = make_policy(replace(settings, base_url=None, model="embedded"))
    requests: list[dict[str, Any]] = []
    tokenizer = local_policy._engine._hf_tokenizer
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda _, **options: requests.append(options) or "text")
    local_policy._engine.encode_prompt([{"role": "user", "content": "Who?"}], local_policy._template_arguments)
    assert requests == [{"return_dict": False, "add_generation_prompt": True, "enable_thinking": False}]
    with pytest.raises(MemAgentError, match=r"'off' is not a JSON object.*enable_thinking"):
        make_policy(replace(settings, chat_template_kwargs="off"))
