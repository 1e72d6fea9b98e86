"""Models by name: a folder, a repository in the hub's local cache, a name on a server, or a mistake."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("huggingface_hub")

from memagent_graph import LocalPolicy, MemAgent, SamplingParams, ScriptedPolicy
from memagent_graph.errors import MissingExtraError, PolicyError
from memagent_graph.policies.model_info import ModelInfo
from memagent_graph.policy_registry import make_policy
from memagent_graph.reading.assembly import assemble
from memagent_graph.settings import ReadSettings


async def test_a_model_of_the_hub_runs_in_this_process_with_its_own_tokenizer_and_profile(cached: str) -> None:
    policy = make_policy(ReadSettings(model=cached))
    assert isinstance(policy, LocalPolicy)
    assert policy.name == cached
    info = await policy.describe()
    assert info.tokenizer is not None and info.profile is not None and info.shape is not None
    prompt = [700, 701]
    expected = await LocalPolicy.embedded().complete(prompt, SamplingParams(max_tokens=4))
    assert (await policy.complete(prompt, SamplingParams(max_tokens=4))).text == expected.text


def test_a_model_that_is_not_in_the_cache_is_an_error_with_a_remedy(cached: str) -> None:
    with pytest.raises(PolicyError, match="some/other cannot be downloaded from the hub") as refusal:
        make_policy(ReadSettings(model="some/other"))
    assert "hf download" in (refusal.value.hint or "")


@pytest.mark.parametrize("name", ["./rl-polcy", "../x/y", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_a_folder_misspelt_is_no_request_to_a_server(name: str) -> None:
    with pytest.raises(PolicyError, match="there is no folder") as refusal:
        make_policy(ReadSettings(model=name))
    assert "hub id" in (refusal.value.hint or "")


def test_a_tokenizer_that_needs_an_extra_says_so_instead_of_being_unknown() -> None:
    missing = MissingExtraError("hub", "the tokenizer of some/model")
    agent = MemAgent(ScriptedPolicy([]), run_log=False)
    with pytest.raises(MissingExtraError, match="the tokenizer of some/model"):
        assemble(agent._parts, ModelInfo(missing=missing))
