"""Reading settings of a loop are used by its readers and saved with its policy."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from safetensors.torch import load_file
from support.fake_server import FakeServer
from support.rl_loops import make_job

from memagent_graph import Document
from memagent_graph.budget import Budget
from memagent_graph.events import UpdateRule
from memagent_graph.policies.profile import EMBEDDED_FOLDER, Profile, load_profile
from memagent_graph.prompts import AnswerFormat, load_prompts
from memagent_graph.settings import WordingSettings
from memagent_graph.tokenizers import load_tokenizer
from memagent_training.job.base_model import BaseModel, find_base_model
from memagent_training.job.saved_policy import _convert_weights, _copy_base_files
from memagent_training.rl.policy_serving import ServerBackend
from memagent_training.rl.rl_job import prepare


def prepare_base(tmp_path: Path, reading: WordingSettings, model: Path | str = "embedded") -> BaseModel:
    return prepare(make_job(tmp_path / "rl", model=str(model), reading=reading)).base


def test_default_profile_is_that_of_the_model(tmp_path: Path) -> None:
    prepared = prepare(make_job(tmp_path / "rl"))
    assert prepared.base.profile is None
    assert "read_with" not in prepared.decisive_inputs["loop"]


async def test_rollouts_are_sampled_without_top_p_and_rules_of_the_profile(tmp_path: Path) -> None:
    """Rewards are for what the policy wrote, not for what rules kept of it."""
    model = tmp_path / "narrow"
    shutil.copytree(EMBEDDED_FOLDER, model)
    values = json.loads((model / "memagent.json").read_text())
    (model / "memagent.json").write_text(json.dumps({**values, "temperature": 0.7, "top_p": 0.95}))
    reading = WordingSettings(chunk_tokens=200)
    prepared = prepare(make_job(tmp_path / "rl", model=str(model), base_url="http://127.0.0.1:9/v1", reading=reading))
    serving = ServerBackend(prepared)
    contexts = [await serving.make_reader(1.0, as_deployed=as_deployed).aprepare() for as_deployed in (False, True)]
    assert [context.sampling.top_p for context in contexts] == [1.0, 0.95]
    assert [context.rules.invented for context in contexts] == [UpdateRule.ACCEPT, UpdateRule.KEEP_PREVIOUS]
    assert serving.make_rollout_reader().settings.top_p == 1.0
    assert prepared.profile is not None
    assert (prepared.profile.temperature, prepared.profile.top_p) == (0.7, 0.95)


def test_reading_settings_change_only_their_fields_of_the_profile(tmp_path: Path) -> None:
    base = load_profile("embedded")
    assert base is not None
    profile = prepare_base(tmp_path, WordingSettings(chunk_tokens=128, boundary="paragraph")).profile
    assert profile == Profile(replace(base.budget, chunk_tokens=128), base.prompts, "paragraph", base.on_invented)


def test_model_without_a_profile_gets_one(tmp_path: Path, plain_model: Path) -> None:
    reading = WordingSettings(
        layout="section_first", chunk_tokens=300, memory_tokens=64, question_tokens=64, answer_tokens=64
    )
    profile = prepare_base(tmp_path, reading, plain_model).profile
    assert profile is not None
    assert profile.budget == Budget(1024, 64, 64, 300, 64), "the window is the model's"
    assert profile.prompts.wording == load_prompts("section_first").wording
    assert prepare_base(tmp_path, WordingSettings(profile="embedded"), plain_model).profile == load_profile("embedded")


def test_saved_policy_has_the_reading_settings_of_its_training(tmp_path: Path, plain_model: Path) -> None:
    reading = WordingSettings(
        layout="section_first", answer_format="plain", empty_memory="new", boundary="sentence",
        chunk_tokens=200, memory_tokens=64, question_tokens=64, answer_tokens=64,
    )  # fmt: skip
    base = prepare_base(tmp_path, reading, plain_model)
    out = tmp_path / "policy"
    out.mkdir()
    _copy_base_files(out, base)
    profile, reading_profile = load_profile(out), base.profile
    assert profile is not None and reading_profile is not None
    assert profile.values == reading_profile.values
    assert (profile.prompts.answer_format, profile.prompts.empty_memory) == (AnswerFormat.PLAIN, "new")
    assert profile.prompts.fingerprint == reading_profile.prompts.fingerprint
    assert (out / "tokenizer.json").read_bytes() == (plain_model / "tokenizer.json").read_bytes()


def test_policy_without_reading_settings_keeps_its_files(tmp_path: Path) -> None:
    out = tmp_path / "policy"
    out.mkdir()
    _copy_base_files(out, find_base_model("embedded"))
    assert (out / "memagent.json").read_bytes() == (EMBEDDED_FOLDER / "memagent.json").read_bytes()


async def test_readers_of_a_loop_use_its_reading_settings(tmp_path: Path, plain_model: Path) -> None:
    with FakeServer() as server:
        job = make_job(
            tmp_path / "rl",
            model=str(plain_model),
            base_url=server.base_url,
            served_name=server.model,
            reading=WordingSettings(profile="embedded", chunk_tokens=50),
        )
        serving = ServerBackend(prepare(job))
        try:
            result = await serving.make_reader(0.0).aread(Document.from_text("One word more. " * 40), "What?")
        finally:
            await serving.close()
        model_profile = load_profile("embedded")
        assert model_profile is not None
        sections = [request["messages"][0]["content"] for request in server.requests[:-1]]
        head, _, tail = model_profile.prompts.update.text.partition("{chunk}")
        tokenizer = load_tokenizer("embedded")
        assert len(sections) == result.chunks_read > 2
        for section in sections:
            assert section.startswith(head)
            assert tokenizer.count(section.removeprefix(head).partition(tail.partition("{")[0])[0]) <= 50


def test_saved_weights_can_have_a_narrower_number_format(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED_FOLDER, tmp_path / "policy")
    for dtype in ("float32", "bfloat16"):
        _convert_weights(tmp_path / "policy", dtype)
        weights = load_file(tmp_path / "policy" / "model.safetensors")
        assert {str(value.dtype) for value in weights.values()} == {f"torch.{dtype}"}
        assert json.loads((tmp_path / "policy" / "config.json").read_text())["dtype"] == dtype
    shipped_weights = load_file(EMBEDDED_FOLDER / "model.safetensors")
    assert all(torch.equal(value, shipped_weights[name]) for name, value in weights.items())
