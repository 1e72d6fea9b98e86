"""A loop with each preset of credit terms: scripted reads, and real training, without a server."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from support.rl_loops import SETTINGS, small_job
from support.scripts import part

from memagent_graph import Completion, FinishReason, MemAgent, MemAgentError, ScriptedPolicy
from memagent_graph.policies.profile import EMBEDDED_FOLDER, load_profile
from memagent_graph.policy import TokenUsage
from memagent_graph.settings import WordingSettings
from memagent_graph.tokenizers import EMBEDDED, load_tokenizer
from memagent_training.data.rollouts import RolloutGroup
from memagent_training.job.collect import CollectSettings
from memagent_training.job.job_settings import read_preset
from memagent_training.rl import loop, policy_serving
from memagent_training.rl.collecting import Collector
from memagent_training.rl.rl_job import prepare
from memagent_training.serving.policy_sync.sync import ServedPolicy, SyncMethod

_NUMBER = re.compile(r"\d{4,}")

PRESETS = [("gru-mem", "gated:stop=yes"), ("rememr1", "recall"), ("longrlvr", None)]
READING = WordingSettings(chunk_tokens=200, memory_tokens=100, question_tokens=100, answer_tokens=40)


@pytest.fixture
def follows_instructions(tmp_path: Path) -> Path:
    """A model without words of its own, as from the hub."""
    folder = tmp_path / "plain"
    shutil.copytree(EMBEDDED_FOLDER, folder, ignore=shutil.ignore_patterns("memagent.json", "templates"))
    return folder


class Sync:
    """Every version is served at once."""

    async def sync(self, policy: Path, version: str, logprobs: Any = None) -> ServedPolicy:
        return ServedPolicy("policy", version, SyncMethod.RELOAD, 0.1, 1e-5)

    @asynccontextmanager
    async def hold_weights(self, served: ServedPolicy) -> AsyncIterator[None]:
        yield


class NowAndThen(ScriptedPolicy):
    """Holds on to what it read now and then, and ends the read now and then; served under a version's name."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(self._completion)
        self._noise, self._tokenizer, self._version = random.Random(5), load_tokenizer(EMBEDDED), ""

    def switch_model(self, model: str, version: str) -> None:
        self._version = version

    async def aclose(self) -> None:
        pass

    def _completion(self, prompt: str) -> Completion:
        text = self._said(prompt)
        prompt_ids, ids = self._tokenizer.encode(prompt), self._tokenizer.encode(text)
        usage = TokenUsage(len(prompt_ids), len(ids))
        logprobs = [-2.0] * len(ids)
        return Completion(
            text, FinishReason.STOP, "scripted", usage, prompt_ids, ids, logprobs, policy_version=self._version
        )

    def _said(self, prompt: str) -> str:
        section, memory, question = (part(prompt, name) for name in ("section", "memory", "problem"))
        if not section:
            return f"\\boxed{{{_NUMBER.findall(memory)[-1] if _NUMBER.search(memory) else 'unknown'}}}"
        key = question.rpartition(" for ")[2].rstrip("?")
        found = [line for line in section.splitlines() if key in line and _NUMBER.search(line)]
        draw = self._noise.random()
        if "KEEP" not in prompt:
            return found[0] if found and draw < 0.7 else memory
        if draw > 0.9:
            return "STOP"
        return f"REWRITE\n{found[0] if found else section[:30]}" if (draw < 0.7) == bool(found) else "KEEP"


def test_an_iteration_is_trained_with_the_rewards_of_a_preset(
    follows_instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset, strategy = PRESETS[0]
    loaded: list[list[RolloutGroup]] = []
    load = Collector._load

    def remembered(*args: Any) -> list[RolloutGroup]:
        loaded.append(load(*args))
        return loaded[-1]

    monkeypatch.setattr(Collector, "_load", remembered)
    monkeypatch.setattr(policy_serving, "PolicySync", lambda *_, **__: Sync())
    monkeypatch.setattr(policy_serving, "OpenAICompatiblePolicy", NowAndThen)
    finished = loop.run(
        small_job(
            tmp_path / "rl",
            model=str(follows_instructions),
            preset=preset,
            strategy=strategy,
            reading=READING,
            iterations=1,
            settings={**SETTINGS, "max_logprob_gap": 99.0, "groups_per_step": 4, "beta": 0.0},
            base_url="http://127.0.0.1:9/v1",
            collect=CollectSettings(rollouts=4, groups=2, max_questions=6, concurrency=8),
        )
    )
    assert finished.steps == 1, finished.reason
    rewards = [rollout.term_rewards for groups in loaded for group in groups for rollout in group.rollouts_G]
    for name in {str(each["reward"]) for each in read_preset(preset)["credit"]} - {"outcome", "format"}:
        assert len({reward[name] for reward in rewards}) > 1, name
    saved = load_profile(finished.policy)
    assert saved is not None, "the finished policy reads as it was trained to"
    assert MemAgent(NowAndThen(), profile=saved, tokenizer="embedded", strategy=strategy, run_log=False)


@pytest.mark.parametrize(("preset", "strategy"), PRESETS)
def test_a_loop_takes_each_preset(
    preset: str, strategy: str | None, follows_instructions: Path, tmp_path: Path
) -> None:
    prepared = prepare(
        small_job(tmp_path / "rl", preset=preset, strategy=strategy, model=str(follows_instructions), reading=READING)
    )
    assert prepared.record["settings"]["credit"] == prepared.config.credit


@pytest.mark.parametrize(("preset", "strategy"), PRESETS[:2])
def test_a_policy_without_words_for_a_strategy_is_refused_before_anything_is_served(
    preset: str, strategy: str, tmp_path: Path
) -> None:
    with pytest.raises(MemAgentError, match=r"no prompt for the role .* templates/.*follows instructions"):
        prepare(small_job(tmp_path / "rl", preset=preset, strategy=strategy, model="embedded"))
