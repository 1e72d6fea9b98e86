"""What a policy was trained with, named by the user because its server's files are elsewhere."""

from __future__ import annotations

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

LEFT_OUT = ("model.safetensors", "CARD.md")


@pytest.fixture
async def policy() -> AsyncIterator[OpenAICompatiblePolicy]:
    """One whose server tells its window alone."""
    with FakeServer() as server:
        policy = OpenAICompatiblePolicy(base_url=server.base_url)
        yield policy
        await policy.aclose()


async def test_a_folder_brings_budget_wording_boundary_rule_and_tokenizer(policy, tmp_path: Path) -> None:
    folder = shutil.copytree(EMBEDDED_FOLDER, tmp_path / "profile", ignore=shutil.ignore_patterns(*LEFT_OUT))
    for name in (folder, str(folder), "embedded"):
        with MemAgent(policy, profile=name, store=tmp_path, run_log=False) as reader:
            context = await reader.aprepare()
        own = load_profile(folder)
        assert own == find_model_info("a name", str(folder), None).profile
        assert context.budget == own.budget
        assert context.prompts.fingerprint == own.prompts.fingerprint
        assert context.boundary == own.boundary == "sentence"
        assert context.rules.invented is own.on_invented is UpdateRule.KEEP_PREVIOUS
        assert context.tokenizer.fingerprint == load_tokenizer("embedded").fingerprint


def profile_with(strategy: str, folder: Path) -> Path:
    shutil.copytree(EMBEDDED_FOLDER, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
    save_profile(replace(require_profile(folder), strategy=strategy), folder)
    return folder


async def test_a_profile_may_name_the_strategy_that_suits_the_policy(policy, tmp_path: Path) -> None:
    options = {"profile": profile_with("gated:stop=yes", tmp_path / "own"), "store": tmp_path, "run_log": False}
    assert MemAgent(policy, **options).strategy == load_strategy("gated:stop=yes")
    assert MemAgent(policy, strategy="overwrite", **options).strategy == Overwrite()
    assert MemAgent(policy, profile="embedded", store=tmp_path, run_log=False).strategy == Overwrite()


async def test_a_policy_that_reports_its_profile_reads_with_its_strategy(tmp_path: Path) -> None:
    class Reporting(ScriptedPolicy):
        async def describe(self) -> ModelInfo:
            return ModelInfo(profile=require_profile(profile_with("refine", tmp_path / "own")))

    reader = MemAgent(Reporting(["x"]), tokenizer="embedded", store=tmp_path, run_log=False)
    context = (await reader.agraph()).reader_context
    assert reader.strategy.name == context.strategy.name == "refine"


@pytest.mark.parametrize("strategy", ["retrieval:chunks=3", "middle_truncation"])
async def test_a_profile_may_not_name_a_strategy_that_shows_only_a_part(policy, tmp_path: Path, strategy) -> None:
    folder = profile_with(strategy, tmp_path / "own")
    with pytest.raises(ProfileError, match="does not read the whole document") as caught:
        MemAgent(policy, profile=folder, store=tmp_path, run_log=False)
    assert f"--strategy {strategy}" in str(caught.value.hint)
    assert not MemAgent(policy, profile=folder, strategy=strategy, store=tmp_path, run_log=False).strategy.reads_all


async def test_settings_go_before_the_profile(policy, tmp_path: Path) -> None:
    own = require_profile("embedded")
    settings = {
        "budget": replace(own.budget, chunk_tokens=100),
        "prompts": load_prompts(),
        "boundary": "token",
        "rules": UpdateRules(invented=UpdateRule.RETRY),
    }
    with MemAgent(policy, profile="embedded", store=tmp_path, run_log=False, **settings) as reader:
        context = await reader.aprepare()
    assert context.budget.chunk_tokens == 100
    assert context.prompts.fingerprint == load_prompts().fingerprint
    assert context.boundary == "token"
    assert context.rules.invented is UpdateRule.RETRY


async def test_a_profile_alone_brings_no_tokenizer(policy, tmp_path: Path) -> None:
    own = require_profile("embedded")
    save_profile(own, tmp_path / "bare")
    for name in (own, tmp_path / "bare"):
        reader = MemAgent(policy, profile=name, store=tmp_path, run_log=False)
        with pytest.raises(TokenizerError, match="which tokenizer"):
            await reader.aprepare()
        await reader.aclose()


def test_a_tokenizer_that_needs_an_extra_says_so_instead_of_being_unknown() -> None:
    missing = MissingExtraError("hub", "the tokenizer of some/model")
    with pytest.raises(MissingExtraError, match="the tokenizer of some/model"):
        assemble(MemAgent(ScriptedPolicy([]), run_log=False)._parts, ModelInfo(missing_extra=missing))


async def test_the_profile_of_english_comes_with_the_package(policy, tmp_path: Path) -> None:
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
    with pytest.raises(ProfileError, match=r"nowhere has no memagent\.json\. Name a folder that has one"):
        MemAgent(model="embedded", profile=tmp_path / "nowhere", store=tmp_path, run_log=False)
    with pytest.raises(ProfileError, match=r"has no memagent\.json"):
        require_profile(tmp_path)


def test_a_profile_may_have_the_template_of_any_role(tmp_path, make_reader) -> None:
    shutil.copytree(EMBEDDED_FOLDER, tmp_path / "policy", ignore=shutil.ignore_patterns("*.safetensors"))
    words = "<section>{chunk}</section> Our gate: <memory>{memory}</memory> <problem>{prompt}</problem>"
    words += " Reply with yes or no"
    (tmp_path / "policy" / "templates" / "gate.txt").write_text(words)
    profile = require_profile(tmp_path / "policy")
    save_profile(profile, tmp_path / "again")
    assert require_profile(tmp_path / "again").prompts.wording == profile.prompts.wording
    policy = ScriptedPolicy(answer_perfectly)
    reader = make_reader(policy, strategy=EXAMPLE, profile=tmp_path / "policy", budget=None, prompts=None)
    text = make_document({0.3: "The key of harbor is 4711."}, words=600)
    assert reader.read(text, "What is the key of harbor?").chunks_read > 1
    assert "Our gate:" in policy.prompts[0]


async def test_a_published_model_is_read_with_in_one_word_once_its_authors_wording_is_saved(policy, tmp_path) -> None:
    options = {"profile": "rl-memoryagent", "tokenizer": "embedded", "store": tmp_path, "run_log": False}
    with pytest.raises(PromptError, match=r"authors'.*Save in (\S+), .*update\.txt.*empty_memory\.txt"):
        MemAgent(policy, **options)
    folder = find_profile_folder("rl-memoryagent")
    folder.mkdir(parents=True)
    (folder / "update.txt").write_text("<q>{prompt}</q> <notes>{memory}</notes> <part>{chunk}</part> Write.")
    (folder / "answer.txt").write_text("<notes>{memory}</notes> <q>{prompt}</q> Answer in \\boxed{}.")
    (folder / "empty_memory.txt").write_text("nothing so far\n")
    with MemAgent(policy, **options) as reader, MemAgent(policy, temperature=0.0, **options) as greedy:
        context = await reader.aprepare()
        assert (await greedy.aprepare()).sampling.temperature == 0.0
    assert context.prompts.messages("update", "Who?", memory="", chunk="text")[0]["content"] == (
        "<q>Who?</q> <notes>nothing so far</notes> <part>text</part> Write."
    )
    assert context.budget == Budget(8192, 1024, 1024, 5000, 1024)
    assert (context.sampling.temperature, context.sampling.top_p) == (0.7, 0.95)
    save_profile(require_profile("rl-memoryagent"), tmp_path / "copy")
    assert require_profile(tmp_path / "copy") == replace(require_profile("rl-memoryagent"), prompts=ANY)
