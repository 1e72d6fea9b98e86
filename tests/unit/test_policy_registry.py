"""Policies by name: those that come with the package, and those that installed packages add."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.added_package import add_package

from memagent_graph.entry_points import POLICIES
from memagent_graph.errors import PolicyError
from memagent_graph.policies import LocalPolicy, OpenAICompatiblePolicy
from memagent_graph.policies.named import PolicyRequest, make_policy, policy_names
from memagent_graph.settings import ReaderSettings

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
    policy = ReaderSettings(policy="mine", model="large", timeout=9).make_policy()
    from memagent_graph import SamplingParams

    completion = await policy.complete([{"role": "user", "content": "?"}], SamplingParams(max_tokens=9))
    assert completion.text == "large 9"


def test_an_unknown_name_lists_what_is_there(added) -> None:
    assert policy_names()[:3] == ("embedded", "local", "server") and set(FACTORIES) < set(policy_names())
    with pytest.raises(PolicyError, match=r"no policy 'mien'\. Did you mean mine\? .*embedded, local, server, "):
        ReaderSettings(policy="mien").make_policy()


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
        make_policy(name, PolicyRequest())
    assert caught.value.message.startswith(f"the policy {name!r} of the package policies_of_mine 1.2 fails: ")
    assert message in caught.value.message and hint in str(caught.value.hint)


def test_the_policies_that_come_with_the_package_are_in_the_same_registry(added, tmp_path) -> None:
    embedded = ReaderSettings(policy="embedded").make_policy()
    assert isinstance(embedded, LocalPolicy) and embedded.name == "embedded", "no package takes its name"
    assert isinstance(ReaderSettings(policy="server", model="x", base_url=URL).make_policy(), OpenAICompatiblePolicy)
    with pytest.raises(PolicyError, match=r"no model.*--model"):
        ReaderSettings(policy="local").make_policy()
    with pytest.raises(PolicyError, match=r"^no server is named.*--base-url"):
        ReaderSettings(policy="server").make_policy()
    with pytest.raises(PolicyError, match=r"int8 was asked for, but a server.*leave --dtype out"):
        ReaderSettings(policy="server", model="x", base_url=URL, dtype="int8").make_policy()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (ReaderSettings(), "embedded"),
        (ReaderSettings(model="embedded"), "embedded"),
        (ReaderSettings(model="a-name"), "server"),
        (ReaderSettings(model="{folder}"), "local"),
        (ReaderSettings(model="some/model"), "local"),
        (ReaderSettings(model="some/model", base_url=URL), "server"),
        (ReaderSettings(base_url=URL), "server"),
        (ReaderSettings(base_url=URL, policy="mine"), "mine"),
    ],
)
def test_model_and_server_stand_for_a_policy_where_none_is_named(settings, name, tmp_path) -> None:
    if settings.model == "{folder}":
        settings = ReaderSettings(model=str(tmp_path))
    assert settings.policy_name == name


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        (ReaderSettings(), URL),
        (ReaderSettings(model="a-name"), URL),
        (ReaderSettings(policy="server"), URL),
        (ReaderSettings(model="embedded"), None),
        (ReaderSettings(policy="embedded"), None),
        (ReaderSettings(policy="mine", model="a-name"), None),
        (ReaderSettings(base_url="http://other/v1"), "http://other/v1"),
    ],
)
def test_the_environment_s_server_is_for_those_who_name_no_other_policy(settings, url, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", URL)
    assert settings.decided().base_url == url


def test_the_log_keeps_policy_and_strategy() -> None:
    settings = ReaderSettings(policy="mine", strategy="own.py:Gate")
    assert settings.for_log() == {"policy": "mine", "strategy": "own.py:Gate", "model": None}
    assert ReaderSettings.from_log(settings.for_log(), "r") == settings
    assert ReaderSettings().for_log() == {"model": "embedded"}


def test_another_policy_takes_the_place_of_the_one_in_the_log() -> None:
    logged = ReaderSettings(policy="mine", model="large", strategy="own.py:Gate", retries=7)
    assert logged.with_other() == logged
    assert logged.with_other(strategy="refine") == ReaderSettings(
        policy="mine", model="large", strategy="refine", retries=7
    )
    assert logged.with_other(model="folder") == ReaderSettings(model="folder", strategy="own.py:Gate", retries=7)
    assert logged.with_other(base_url=URL).policy_name == "server"
    moved = ReaderSettings(policy="server", model="m", base_url="http://old/v1").with_other(base_url=URL)
    assert moved.make_policy() and (moved.policy_name, moved.model, moved.base_url) == ("server", "m", URL)
    served = ReaderSettings(model="large", base_url=URL)
    assert served.with_other(policy="mine") == ReaderSettings(policy="mine"), "nothing of the server's is left"
