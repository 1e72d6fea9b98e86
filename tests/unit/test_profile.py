"""Profiles: budget, prompts, boundary, rule and strategy of a policy, named by the user for a policy server."""

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from support.fake_server import FakeServer
from support.scripts import make_document
from support.strategies import EXAMPLE, answer_perfectly

from memagent_graph import MemAgent, OpenAICompatiblePolicy, Overwrite, ScriptedPolicy, UpdateRules, load_tokenizer
from memagent_graph.budget import Budget
from memagent_graph.errors import MissingExtraError, PolicyError, ProfileError, PromptError, TokenizerError
from memagent_graph.events import UpdateRule
from memagent_graph.policies.model_info import ModelInfo, find_model_info
from memagent_graph.policies.profile import (
    EMBEDDED_FOLDER,
    find_profile_folder,
    load_profile,
    require_profile,
    save_profile,
)
from memagent_graph.prompts import load_prompts
from memagent_graph.reading.assembly import assemble
from memagent_graph.strategies import load_strategy

UNNEEDED_FILES = ("model.safetensors", "CARD.md")


@pytest.fixture
async def policy() -> AsyncIterator[OpenAICompatiblePolicy]:
    """A policy whose server reports only the context window."""
    with FakeServer() as server:
        served_policy = OpenAICompatiblePolicy(base_url=server.base_url)
        yield served_policy
        await served_policy.aclose()


async def test_a_profile_folder_gives_budget_prompts_boundary_rule_and_tokenizer(policy, tmp_path: Path) -> None:
    folder = shutil.copytree(EMBEDDED_FOLDER, tmp_path / "profile", ignore=shutil.ignore_patterns(*UNNEEDED_FILES))
    config = (folder / "config.json").read_text()
    for profile, damage in ((folder, '0, "x": '), (str(folder), "-"), ("embedded", "9" * 400)):
        (folder / "config.json").write_text(config.replace('heads": ', f'heads": {damage}'))
        with MemAgent(policy, profile=profile, store=tmp_path, run_log=False) as reader:
            context = await reader.aprepare()
        expected_profile, info = load_profile(folder), find_model_info("a name", str(folder), None)
        assert (info.profile, info.shape) == (expected_profile, None)
        assert context.budget == expected_profile.budget
        assert context.prompts.fingerprint == expected_profile.prompts.fingerprint
        assert context.boundary == expected_profile.boundary == "sentence"
        assert context.rules.invented is expected_profile.on_invented is UpdateRule.KEEP_PREVIOUS
        assert context.tokenizer.fingerprint == load_tokenizer("embedded").fingerprint


def write_profile(strategy: str, folder: Path) -> Path:
    shutil.copytree(EMBEDDED_FOLDER, folder, ignore=shutil.ignore_patterns(*UNNEEDED_FILES), dirs_exist_ok=True)
    save_profile(replace(require_profile(folder), strategy=strategy), folder)
    return folder


async def test_a_profile_can_name_the_default_strategy(policy, tmp_path: Path) -> None:
    options = {"profile": write_profile("gated:stop=yes", tmp_path / "own"), "store": tmp_path, "run_log": False}
    assert MemAgent(policy, **options).strategy == load_strategy("gated:stop=yes")
    assert MemAgent(policy, strategy="overwrite", **options).strategy == Overwrite()
    assert MemAgent(policy, profile="embedded", store=tmp_path, run_log=False).strategy == Overwrite()


async def test_the_strategy_of_a_reported_profile_is_used(tmp_path: Path) -> None:
    class ProfilePolicy(ScriptedPolicy):
        async def describe(self) -> ModelInfo:
            return ModelInfo(profile=require_profile(write_profile("refine", tmp_path / "own")))

    reader = MemAgent(ProfilePolicy(["x"]), tokenizer="embedded", store=tmp_path, run_log=False)
    context = (await reader.agraph()).reader_context
    assert reader.strategy.name == context.strategy == "refine"


@pytest.mark.parametrize("strategy", ["retrieval:chunks=3", "middle_truncation"])
async def test_a_profile_may_not_name_a_strategy_that_reads_only_a_part(policy, tmp_path: Path, strategy) -> None:
    folder = write_profile(strategy, tmp_path / "own")
    with pytest.raises(ProfileError, match="does not read the whole document") as error:
        MemAgent(policy, profile=folder, store=tmp_path, run_log=False)
    assert f"--strategy {strategy}" in str(error.value.hint)
    assert not MemAgent(policy, profile=folder, strategy=strategy, store=tmp_path, run_log=False).strategy.reads_all


async def test_settings_have_priority_over_the_profile(policy, tmp_path: Path) -> None:
    profile = require_profile("embedded")
    settings = {"budget": replace(profile.budget, chunk_tokens=100), "prompts": load_prompts(), "boundary": "token"}
    settings["rules"] = UpdateRules(invented=UpdateRule.RETRY)
    with MemAgent(policy, profile="embedded", store=tmp_path, run_log=False, **settings) as reader:
        context = await reader.aprepare()
    assert context.budget.chunk_tokens == 100
    assert context.prompts.fingerprint == load_prompts().fingerprint
    assert context.boundary == "token"
    assert context.rules.invented is UpdateRule.RETRY


async def test_a_profile_without_tokenizer_files_gives_no_tokenizer(policy, tmp_path: Path) -> None:
    profile = require_profile("embedded")
    save_profile(profile, tmp_path / "bare")
    for profile_or_folder in (profile, tmp_path / "bare"):
        reader = MemAgent(policy, profile=profile_or_folder, store=tmp_path, run_log=False)
        with pytest.raises(TokenizerError, match="which tokenizer"):
            await reader.aprepare()
        await reader.aclose()


def test_the_error_for_a_tokenizer_without_its_extra_names_the_extra() -> None:
    error = MissingExtraError("hub", "the tokenizer of some/model")
    with pytest.raises(MissingExtraError, match="the tokenizer of some/model"):
        assemble(MemAgent(ScriptedPolicy([]), run_log=False)._parts, ModelInfo(missing_extra=error))


async def test_the_profile_english_is_part_of_the_package(policy, tmp_path: Path) -> None:
    options = {"profile": "english", "tokenizer": "embedded", "store": tmp_path, "run_log": False}
    with MemAgent(policy, **options) as reader:
        context = await reader.aprepare()
    assert reader.strategy == load_strategy("gated")
    assert assemble(reader._parts, ModelInfo(context_window=2000)).budget.context_window == 2000
    assert (context.budget.context_window, context.budget.chunk_tokens, context.boundary) == (2048, 512, "sentence")
    assert {"update", "answer", "gated_update"} <= context.prompts.wording.keys()
    with pytest.raises(PolicyError, match="memagent policy add english"):
        MemAgent(policy="local", model="english", store=tmp_path, run_log=False)


def test_a_folder_without_a_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"nowhere has no memagent\.json\. Give a folder that has one"):
        MemAgent(model="embedded", profile=tmp_path / "nowhere", store=tmp_path, run_log=False)
    with pytest.raises(ProfileError, match=r"has no memagent\.json"):
        require_profile(tmp_path)
    for values in ({"temperature": -1}, {"top_p": 0}, {"temperature": float("nan")}, {"empty_memory": None}):
        (tmp_path / "memagent.json").write_text(json.dumps(values))
        with pytest.raises(ProfileError, match=r"memagent\.json cannot be parsed"):
            require_profile(tmp_path)


def test_a_profile_may_have_the_template_of_any_role(tmp_path, make_reader) -> None:
    shutil.copytree(EMBEDDED_FOLDER, tmp_path / "policy", ignore=shutil.ignore_patterns("*.safetensors"))
    template = "<section>{chunk}</section> Our gate: <memory>{memory}</memory> <problem>{prompt}</problem>"
    template += " Reply with yes or no"
    (tmp_path / "policy" / "templates" / "gate.txt").write_text(template)
    profile = require_profile(tmp_path / "policy")
    save_profile(replace(profile, prompts=replace(profile.prompts, empty_memory="")), tmp_path / "again")
    assert require_profile(tmp_path / "again").prompts.wording == profile.prompts.wording | {"empty_memory": ""}
    policy = ScriptedPolicy(answer_perfectly)
    reader = make_reader(policy, strategy=EXAMPLE, profile=tmp_path / "policy", budget=None, prompts=None)
    text = make_document({0.3: "The key of harbor is 4711."}, words=600)
    assert reader.read(text, "What is the key of harbor?").chunks_read > 1
    assert "Our gate:" in policy.prompts[0]


async def test_a_published_model_has_a_named_profile_once_its_prompts_are_saved(policy, tmp_path) -> None:
    options = {"profile": "rl-memoryagent", "tokenizer": "embedded", "store": tmp_path, "run_log": False}
    with pytest.raises(PromptError, match=r"authors'.*Save in (\S+), .*update\.txt.*empty_memory\.txt"):
        MemAgent(policy, **options)
    folder = find_profile_folder("rl-memoryagent")
    folder.mkdir(parents=True)
    (folder / "update.txt").write_text("<q>{prompt}</q> <notes>{memory}</notes> <part>{chunk}</part> Write.")
    (folder / "answer.txt").write_text("<notes>{memory}</notes> <q>{prompt}</q> Answer in \\boxed{}.")
    (folder / "empty_memory.txt").write_text("nothing so far\n")
    with MemAgent(policy, **options) as reader, MemAgent(policy, temperature=0.0, **options) as greedy_reader:
        context = await reader.aprepare()
        assert (await greedy_reader.aprepare()).sampling.temperature == 0.0
    assert context.prompts.messages("update", "Who?", memory="", chunk="text")[0]["content"] == (
        "<q>Who?</q> <notes>nothing so far</notes> <part>text</part> Write."
    )
    assert context.budget == Budget(8192, 1024, 1024, 5000, 1024)
    assert (context.sampling.temperature, context.sampling.top_p) == (0.7, 0.95)
    for profile in (require_profile("rl-memoryagent"), replace(require_profile("rl-memoryagent"), temperature=0.0)):
        save_profile(profile, tmp_path / "copy")
        assert require_profile(tmp_path / "copy") == replace(profile, prompts=ANY)
