"""A loop takes each preset of credit terms, and refuses a strategy that its policy has no words for."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")

from support.rl_loops import small_job

from memagent_graph import MemAgentError
from memagent_graph.settings import WordingSettings
from memagent_training.rl.rl_job import prepare

PRESETS = [("gru-mem", "gated:stop=yes"), ("rememr1", "recall"), ("longrlvr", None)]
READING = WordingSettings(chunk_tokens=200, memory_tokens=100, question_tokens=100, answer_tokens=40)


@pytest.mark.parametrize(("preset", "strategy"), PRESETS)
def test_a_loop_takes_each_preset(preset: str, strategy: str | None, plain_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path / "rl", preset=preset, strategy=strategy, model=str(plain_model), reading=READING)
    prepared = prepare(job)
    assert prepared.record["settings"]["credit"] == prepared.config.credit
    if strategy is not None:
        with pytest.raises(MemAgentError, match=r"no prompt for the role .* templates/.*follows instructions"):
            prepare(small_job(tmp_path / "rl", preset=preset, strategy=strategy, model="embedded"))
